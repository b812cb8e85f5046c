"""Long rows cut into splits and merged by whoever comes last, and results that depend on their own request alone."""

from __future__ import annotations

import random

import pytest
import torch

from faback.kernels.torch_ops import TorchOps
from faback.kernels.triton.provider import TritonAttention
from kernels.triton.cases import Processors
from kernels.triton.interpreter import needs_interpreter
from kernels.triton.segments import make_case, together

needs_interpreter()

KERNEL = TritonAttention()
LONG = [(1, 700), (3, 333), (1, 64), (0, 200), (2, 0), (1, 129)]


def processors(count: int) -> Processors:
    return Processors(TorchOps(), torch.device("cpu"), {}, count)


def many() -> Processors:
    """So many that every long row is split."""
    return processors(500)


@pytest.mark.parametrize(
    "features",
    [
        {"sinks", "strided", "padded_rows", "padded_tokens"},
        {"softcap", "slot_map", "head_scales"},
        {"window", "keep"},
        {"window", "window_right", "non_causal"},
        {"chunk", "start"},
        {"row_window", "q_len"},
        {"tree", "slot_map"},
        {"branches", "sinks"},
        {"tail", "window"},
        {"shard"},
        {"raw", "positions"},
    ],
    ids=together,
)
def test_splits(features):
    case = make_case(1, rows=LONG, page=4, dims=(24, 16), features=features, window=450, chunk=400)
    case.check(KERNEL, many())


@pytest.mark.parametrize("heads", [(1, 1), (6, 2)], ids=str)
def test_splits_of_several_blocks_of_queries(heads):
    make_case(2, rows=[(40, 300), (1, 260)], heads=heads).check(KERNEL, many())


def test_splits_of_latents():
    make_case(3, rows=[(2, 150)], heads=(3, 1), dims=(576, 512), latent=True, dtype=torch.float16).check(KERNEL, many())


def test_more_processors_make_more_splits():
    """Or the tests above would test nothing."""
    case = make_case(4, rows=[(1, 2000)])
    few, lots = (case.run(KERNEL, ws)[0] for ws in (processors(1), processors(500)))
    assert not torch.equal(few, lots)
    torch.testing.assert_close(few, lots, atol=1e-5, rtol=0)


def test_scratch_memory_is_as_it_was():
    """Layers and passes of any size take turns in one workspace."""
    ws = many()
    cases = [make_case(5, rows=rows) for rows in (LONG, [(1, 400)], [(2, 650)] * 2)]
    first = [case.run(KERNEL, ws)[0] for case in cases]
    again = [case.run(KERNEL, ws)[0] for case in cases]
    assert all(map(torch.equal, first, again))
    for case in cases:
        case.check(KERNEL, ws)


class Guarded(Processors):
    """Scratch memory with more behind it, which nobody may touch."""

    def __init__(self, count):
        super().__init__(TorchOps(), torch.device("cpu"), {}, count)
        self.held = {}

    def scratch(self, name, size, dtype):
        self.held[name] = torch.zeros(size + 20000, dtype=dtype), size
        return self.held[name][0][:size]

    def intact(self):
        return not any(whole[size:].any() for whole, size in self.held.values())


@pytest.mark.parametrize("count", [1, 2, 3, 7, 20, 500])
@pytest.mark.parametrize("seed", range(4))
def test_scratch_memory_is_no_larger_than_splits_are_many(count, seed):
    """Long extends leave nothing behind but where they are split, however many blocks of queries they have."""
    pick = random.Random(seed)
    rows = [(pick.choice([1, 1, 30, 70]), pick.choice([0, 40, 150, 400])) for _ in range(pick.randint(1, 6))]
    ws = Guarded(count)
    make_case(seed, rows=rows, heads=(2, 1)).check(KERNEL, ws)
    assert ws.intact()
    _, slots = ws.held["arrivals"]
    assert slots <= 4 * (4 * 2 * count) // 3 + 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", [{"sinks"}, {"window", "keep", "start"}, {"row_window", "slot_map"}], ids=together)
def test_deterministic_results_depend_on_their_request_alone(features, dtype):
    lens = [(1, 1100), (2, 90), (1, 2300), (1, 0), (3, 64)]
    case = make_case(6, rows=lens, features=features, window=900, dtype=dtype)
    case.check(KERNEL, many(), deterministic=True)
    together = case.run(KERNEL, many(), deterministic=True)
    for row, (start, end) in enumerate(case.segment.cu_seqlens_q.unfold(0, 2, 1).tolist()):
        for whole, part in zip(together, case.alone(row).run(KERNEL, deterministic=True), strict=True):
            assert torch.equal(whole[start:end], part), f"row {row}"
