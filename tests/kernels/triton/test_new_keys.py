"""Decoding rows whose newest key and value the attention kernel writes itself, in Triton's interpreter."""

from __future__ import annotations

import attrs
import pytest
import torch

from faback.core.segment import KVWrite
from faback.kernels.torch_ops import TorchOps
from faback.kernels.triton.provider import TritonAttention
from kernels.triton.cases import Processors
from kernels.triton.interpreter import needs_interpreter
from kernels.triton.new_keys import forgotten
from kernels.triton.segments import make_case, together

needs_interpreter()

KERNEL = TritonAttention()
ROWS = [(1, 700), (1, 1), (1, 64), (1, 0), (1, 65), (1, 333)]


def check(case, processors, deterministic=False):
    wanted = case.run(KERNEL, deterministic=deterministic)
    torch.testing.assert_close(wanted[0].isnan().any(), torch.tensor(False))
    before, new = forgotten(case)
    ws = Processors(TorchOps(), torch.device("cpu"), {}, processors)
    out, lse = before.run(KERNEL, ws, deterministic=deterministic, new=new)
    for cache, right in ((before.k, case.k), (before.v, case.v)):
        assert torch.equal(cache.nan_to_num(7.0), right.nan_to_num(7.0))
    torch.testing.assert_close(out, wanted[0], atol=2e-5, rtol=0)
    torch.testing.assert_close(lse, wanted[1], atol=2e-5, rtol=0)


@pytest.mark.parametrize("processors", [1, 500], ids=["whole", "split"])
@pytest.mark.parametrize(
    "features",
    [
        set(),
        {"sinks", "strided", "padded_rows"},
        {"slot_map", "softcap"},
        {"window", "start", "int64"},
        {"window", "keep", "slot_map"},
        {"chunk", "blocks"},
        {"head_scales", "blocks_apart"},
        {"scales", "row_window", "window"},
    ],
    ids=lambda names: together(names) or "plain",
)
def test_the_launch_writes_and_sees_them(features, processors):
    check(make_case(1, rows=ROWS, page=4, heads=(4, 2), dims=(24, 16), features=features), processors)


@pytest.mark.parametrize("features", [{"window"}, {"chunk", "sinks"}], ids=together)
def test_in_splits_that_depend_on_the_request_alone(features):
    case = make_case(2, rows=[(1, 4500), (1, 4096), (1, 4097), (1, 3)], features=features, window=700, chunk=1000)
    check(case, 500, deterministic=True)


def test_latents_have_keys_alone():
    case = make_case(3, rows=[(1, 150), (1, 2)], heads=(3, 1), dims=(576, 512), latent=True, dtype=torch.float16)
    check(case, 500)


@pytest.mark.parametrize(
    ("rows", "heads", "features"),
    [
        ([(2, 9), (1, 5)], (2, 1), set()),
        ([(1, 9)], (17, 1), set()),
        ([(1, 9)], (2, 1), {"padded_tokens"}),
        ([(1, 9)], (2, 1), {"tail"}),
        ([(1, 9)], (2, 1), {"non_causal"}),
        ([(1, 9)], (2, 1), {"dense"}),
        ([(1, 9)], (2, 1), {"shard"}),
        ([(1, 9)], (2, 1), {"raw"}),
        ([(1, 9)], (2, 1), {"q_len"}),
    ],
    ids=str,
)
def test_other_rows_leave_writing_to_others(rows, heads, features):
    case = make_case(4, rows=rows, heads=heads, features=features)
    slots = torch.ones(case.segment.tokens, dtype=torch.int64)
    longest = max(queries for queries, _ in rows)
    segment = attrs.evolve(case.segment, max_seqlen_q=longest, write=KVWrite(slots))
    ws = Processors(TorchOps(), torch.device("cpu"), {}, 1)
    assert not KERNEL.stores(KERNEL.prepare(segment, case.layer, case.request(), ws))


@pytest.mark.parametrize(
    ("write", "stores"),
    [
        (KVWrite(), False),
        (KVWrite(torch.ones(2, dtype=torch.int64)), True),
        (KVWrite(torch.ones(4, dtype=torch.int64)[::2]), False),
        (KVWrite(torch.ones(3, dtype=torch.int64)), False),
    ],
    ids=["nowhere", "one each", "apart", "more"],
)
def test_slots_are_read_as_they_lie(write, stores):
    case = make_case(5, rows=[(1, 9), (1, 4)])
    segment = attrs.evolve(case.segment, max_seqlen_q=1, write=write)
    ws = Processors(TorchOps(), torch.device("cpu"), {}, 1)
    assert KERNEL.stores(KERNEL.prepare(segment, case.layer, case.request(), ws)) is stores
