"""What error messages are made of."""

import copy
import pickle

import pytest

from faback import BatchError, CapacityError, ConfigError, FabackError, NoKernelError, PluginError, PoolError


def test_message_says_what_wanted_got_and_hint():
    error = ConfigError("page_size", wanted="a power of two", got=3, hint="Use 4.")
    assert str(error) == "page_size: wanted a power of two, got 3. Use 4."
    assert (error.what, error.wanted, error.got, error.hint) == ("page_size", "a power of two", 3, "Use 4.")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "x"),
        ({"wanted": "y"}, "x: wanted y"),
        ({"got": 0}, "x: got 0"),
        ({"hint": "Do z."}, "x. Do z."),
    ],
)
def test_absent_parts_leave_no_trace(fields, message):
    assert str(FabackError("x", **fields)) == message


def test_all_errors_have_one_base():
    for error in (BatchError, CapacityError, ConfigError, NoKernelError, PluginError, PoolError):
        assert issubclass(error, FabackError)


def test_no_kernel_lists_each_reason_on_its_own_line():
    error = NoKernelError("decode", ["a: too old", "b: too new"])
    assert error.reasons == ("a: too old", "b: too new")
    assert [line.strip() for line in str(error).splitlines()[1:3]] == ["- a: too old", "- b: too new"]


def test_no_kernel_without_any_installed_says_so():
    assert "no kernel is installed" in str(NoKernelError("decode", []))


def test_no_kernel_hint_is_a_line_of_its_own():
    lines = str(NoKernelError("decode", ["a: too old"], hint="Buy a GPU.")).splitlines()
    assert lines[-1] == "Buy a GPU."


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(
            NoKernelError("decode", ["a: too old"], hint="h"),
            id="no kernel",
        ),
        pytest.param(BatchError("x", wanted="y", got=1, hint="h"), id="batch"),
    ],
)
@pytest.mark.parametrize("trip", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))], ids=["copy", "pickle"])
def test_errors_survive_the_way_to_another_process(error, trip):
    twin = trip(error)
    assert (str(twin), twin.what, twin.wanted, twin.got, twin.hint) == (
        str(error),
        error.what,
        error.wanted,
        error.got,
        error.hint,
    )
