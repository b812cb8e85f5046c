"""Launches are remembered by what Triton may specialise on, and nothing else."""

import pytest
import torch
import triton

from faback.kernels.triton.launch import Kernel


class Param:
    def __init__(self, name, do_not_specialize):
        self.name, self.do_not_specialize = name, do_not_specialize


class Function:
    """Stands in for a Triton function: each call by name compiles a form, which is then called in order."""

    arg_names = ("x", "n", "z", "y", "SIZE")
    params = (Param("x", False), Param("n", True), Param("z", False), Param("y", True), Param("SIZE", False))

    def __init__(self):
        self.compiled, self.launched, self.noticed = [], [], 0

    def __getitem__(self, grid):
        def first(*args, **named):
            self.compiled.append((grid, args, named))
            return Form(self)

        return first


class Form:
    """As far as a compiled form is looked at: by what it is launched without listeners, and with them."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel):
        self._kernel = kernel

    def run(self, x, y, z, stream, function, metadata, launch_metadata, before, after, *args):
        assert (stream, function, metadata) == ("stream 3", "function", "metadata")
        assert launch_metadata is before is after is None
        self._kernel.launched.append(((x, y, z), args))

    def __getitem__(self, grid):
        self._kernel.noticed += 1
        return lambda *args: self._kernel.launched.append((grid, args))


class Driver:
    """The current device is number 3."""

    def get_current_device(self):
        return 3

    def get_current_stream(self, device):
        return f"stream {device}"


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    return Function()


def test_the_second_launch_is_in_the_order_of_the_kernel(kernel):
    z, x = torch.ones(2), torch.zeros(4)
    launch = Kernel(kernel, {"SIZE": 16}, {"num_warps": 4}).bound({"z": z, "y": 7})
    launch((1, 1, 1), (x,), (), (5,))
    launch((2, 1, 1), (x,), (), (6,))
    assert kernel.compiled == [((1, 1, 1), (x, 5), {"z": z, "y": 7, "SIZE": 16, "num_warps": 4})]
    assert kernel.launched == [((2, 1, 1), (x.data_ptr(), 6, z.data_ptr(), 7, 16))]


def test_tensors_come_first_then_numbers_then_free_ones(kernel):
    launch, x = Kernel(kernel, {}).bound({"y": 7}), torch.zeros(4)
    launch((1, 1, 1), (x,), (2,), (0.5,))
    launch((1, 1, 1), (x,), (2,), (0.25,))
    assert kernel.compiled == [((1, 1, 1), (x, 2, 0.5), {"y": 7})]
    assert kernel.launched == [((1, 1, 1), (x.data_ptr(), 2, 0.25, 7, None))]


@pytest.mark.parametrize("when", ["enter", "exit"])
def test_profilers_notice_launches(kernel, when):
    launch, hook = Kernel(kernel, {}).bound({}), getattr(triton.knobs.runtime, f"launch_{when}_hook")
    listener = lambda metadata: None  # noqa: E731
    launch((1, 1, 1), (), (2,))
    launch((1, 1, 1), (), (2,))
    assert kernel.noticed == 0
    hook.add(listener)
    try:
        launch((1, 1, 1), (), (2,))
    finally:
        hook.remove(listener)
    launch((1, 1, 1), (), (2,))
    assert kernel.noticed == 1 and len(kernel.launched) == 3


def test_other_versions_of_triton_launch_in_their_own_way(kernel, monkeypatch):
    monkeypatch.setattr(triton.knobs, "runtime", None)
    launch = Kernel(kernel, {}).bound({})
    for _ in range(3):
        launch((1, 1, 1), (), (2,))
    assert kernel.noticed == len(kernel.launched) == 2


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((torch.zeros(8),), (torch.zeros(8).half(),)),
        ((torch.zeros(8),), (torch.zeros(9)[1:],)),
        ((None,), (torch.zeros(8),)),
        ((None,), (None, None)),
    ],
    ids=["dtype", "alignment", "absence", "number"],
)
def test_what_a_kernel_may_be_specialised_on_is_told_apart(kernel, before, after):
    launch = Kernel(kernel, {}).bound({})
    for tensors in (before, after, before, after):
        launch((1, 1, 1), tensors)
    assert len(kernel.compiled) == len(kernel.launched) == 2


def test_numbers_are_told_apart_by_value(kernel):
    launch = Kernel(kernel, {}).bound({})
    for number in (1, 2, 1, 2):
        launch((1, 1, 1), (), (number,))
    assert len(kernel.compiled) == len(kernel.launched) == 2


@pytest.mark.parametrize(("n", "forms"), [(7, 1), (2**31 - 1, 1), (2**31, 2)])
def test_free_numbers_are_told_apart_by_their_width_alone(kernel, n, forms):
    launch = Kernel(kernel, {}).bound({})
    for count in (1, 16, n):
        launch((1, 1, 1), (), (), (count, 0.5 * count))
    assert len(kernel.compiled) == forms


@pytest.mark.parametrize(
    ("before", "after", "forms"),
    [
        ({"z": torch.zeros(8)}, {"z": torch.ones(3)}, 1),
        ({"z": torch.zeros(8)}, {"z": torch.zeros(8).half()}, 2),
        ({"z": torch.zeros(8)}, {"z": torch.zeros(9)[1:]}, 2),
        ({"z": None}, {"z": torch.zeros(8)}, 2),
        ({"z": 3}, {"z": 4}, 2),
        ({"y": 3}, {"y": 4}, 1),
        ({"y": 3}, {"y": 2**31}, 2),
        ({"z": 0.5}, {"z": 0.25}, 1),
    ],
    ids=["contents", "dtype", "alignment", "absence", "number", "free number", "wide number", "float"],
)
def test_another_plan_compiles_nothing_that_was_compiled(kernel, before, after, forms):
    made = Kernel(kernel, {})
    for args in (before, after, before, after):
        made.bound(args)((1, 1, 1), (torch.zeros(4),))
    assert len(kernel.compiled) == forms and len(kernel.launched) == 4 - forms


def test_interpreted_kernels_are_called_by_name_each_time():
    calls = []

    class Interpreted:
        def __getitem__(self, grid):
            return lambda *args, **named: calls.append((args, named))

    launch = Kernel(Interpreted(), {"SIZE": 2}).bound({})
    for _ in range(3):
        launch((1, 1, 1), (None,), (0,), (1,))
    assert calls == [((None, 0, 1), {"SIZE": 2})] * 3
