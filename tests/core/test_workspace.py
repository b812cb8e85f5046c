"""Workspaces: one fill per question, and constants that last."""

import pytest
import torch

from faback.core.workspace import EagerWorkspace
from faback.kernels.torch_ops import TorchOps


@pytest.fixture
def ws():
    return EagerWorkspace(TorchOps(), torch.device("cpu"), {})


def test_the_same_fill_of_the_same_inputs_is_one_tensor(ws):
    lens = torch.tensor([1, 2, 3])
    assert ws.offsets("a", lens) is ws.offsets("b", lens)
    assert ws.lens("a", lens, add=1) is ws.lens("b", lens, add=1)


def test_different_questions_have_different_answers(ws):
    lens, other = torch.tensor([1, 2, 3]), torch.tensor([1, 2, 3])
    first = ws.lens("a", lens, add=1)
    assert ws.lens("a", lens, add=2).tolist() == [3, 4, 5]
    assert ws.lens("a", other, add=1) is not first
    assert ws.lens("a", lens, add=1, active=torch.tensor([0, 1, 1])).tolist() == [0, 3, 4]
    assert first.tolist() == [2, 3, 4]
    assert ws.offsets("a", lens).tolist() == [0, 1, 3, 6]


def test_a_plan_of_its_own_starts_afresh():
    lens, constants = torch.tensor([1, 2]), {}
    a, b = (EagerWorkspace(TorchOps(), torch.device("cpu"), constants).lens("x", lens, add=1) for _ in range(2))
    assert a is not b


def test_the_op_is_called_once_with_its_parameters(ws):
    calls = []

    def op(out, source, extra, *, factor):
        calls.append((source, extra, factor))
        out.copy_(source * factor)

    lens = torch.tensor([1, 2])
    for _ in range(2):
        out = ws.fill("x", (2,), op, lens, None, factor=3, dtype=torch.int64)
    assert (out.tolist(), out.dtype, len(calls)) == ([3, 6], torch.int64, 1)
    assert ws.fill("x", (2,), op, lens, None, factor=4).tolist() == [4, 8]


def test_a_temporary_does_not_inherit_the_answer_of_another(ws):
    lens = torch.arange(40)
    found = []
    for low in range(30):
        found.append(ws.offsets("x", lens[low : low + 2]).tolist())
    assert found == [[0, low, 2 * low + 1] for low in range(30)]


def test_the_dtype_is_part_of_the_question(ws):
    lens = torch.tensor([1, 2])

    def op(out, source):
        out.copy_(source)

    assert ws.fill("x", (2,), op, lens, dtype=torch.int32).dtype == torch.int32
    assert ws.fill("x", (2,), op, lens, dtype=torch.int64).dtype == torch.int64


def test_lens_without_a_change_are_the_source(ws):
    lens = torch.tensor([1, 2])
    assert ws.lens("x", lens) is lens


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lens_leave_their_source_alone(ws, dtype):
    lens, active = torch.tensor([5, 6, 7], dtype=dtype), torch.tensor([2, 0, 9], dtype=dtype)
    out = ws.lens("x", lens, add=2, active=active)
    assert (out.tolist(), out.dtype) == ([7, 0, 9], torch.int32)
    assert (lens.tolist(), active.tolist()) == ([5, 6, 7], [2, 0, 9])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("values", [[], [0], [3, 0, 4]])
def test_offsets(ws, dtype, values):
    out = ws.offsets("x", torch.tensor(values, dtype=dtype))
    assert out.dtype == torch.int32
    assert out.tolist() == [sum(values[:i]) for i in range(len(values) + 1)]


@pytest.mark.parametrize("step", [1, 7])
def test_uniform_offsets_grow(ws, step):
    for rows in (0, 1, 255, 256, 257, 511, 512, 5000, 3):
        out = ws.uniform_offsets(rows, step)
        assert (out.dtype, out.shape) == (torch.int32, (rows + 1,))
        assert torch.equal(out, torch.arange(rows + 1, dtype=torch.int32) * step)


def test_uniform_offsets_outlive_the_plan():
    constants = {}
    a, b = (EagerWorkspace(TorchOps(), torch.device("cpu"), constants).uniform_offsets(5) for _ in range(2))
    assert a.data_ptr() == b.data_ptr()
