"""Index arithmetic beyond 32 bits in Triton's interpreter: strides, rows, distances, counts of tiles.

What is reached lies far apart in memory that nobody else touches.
"""

from __future__ import annotations

import attrs
import pytest
import torch
import triton
import triton.language as tl

from faback.core.segment import KVWrite
from faback.core.workspace import EagerWorkspace
from faback.kernels.torch_ops import TorchOps
from faback.kernels.triton import provider
from faback.kernels.triton.ops import TritonOps
from faback.kernels.triton.provider import TritonAttention
from faback.kernels.triton.schedule import find_work
from faback.kernels.triton.store import merge
from kernels.triton.interpreter import needs_interpreter
from kernels.triton.segments import make_case, together

needs_interpreter()

KERNEL, E5M2 = TritonAttention(), torch.float8_e5m2
FAR = (1 << 30) + 96
"""Elements: three times as many are more than 2^31."""


def far_apart(tensor, dim, stride=FAR):
    """The tensor with this stride between the entries of one dimension."""
    strides = list(torch.empty(tensor.shape[:dim] + tensor.shape[dim + 1 :], device="meta").stride())
    strides.insert(dim, stride)
    reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True))
    try:
        spread = torch.empty(reach, dtype=tensor.dtype).as_strided(tensor.shape, strides)
    except RuntimeError:
        pytest.skip("no address space for memory that nobody touches")
    as_bytes = (lambda t: t.view(torch.uint8)) if tensor.element_size() == 1 else (lambda t: t)
    as_bytes(spread).copy_(as_bytes(tensor))
    return spread


@pytest.mark.parametrize("what", ["k", "v", "q", "k slots", "v slots", "tail"])
def test_strides_that_times_an_index_pass_32_bits(what):
    """Keys and values by head, as some pools have them, or by slot; queries by head; rows of a table of drafts."""
    features = {"tail_slots", "scales"} if what == "tail" else {"sinks"}
    rows = [(1, 70), (2, 9), (2, 40), (1, 3)]
    dtypes = {"dtype": torch.float16, "kv_dtype": E5M2}
    case = make_case(1, rows=rows, page=4, heads=(4, 4), features=features, **dtypes)
    wanted = case.run(KERNEL)
    if what == "tail":
        tail = attrs.evolve(case.segment.tail, slots=far_apart(case.segment.tail.slots, 0))
        far = attrs.evolve(case, segment=attrs.evolve(case.segment, tail=tail))
    elif "slots" in what:
        far = attrs.evolve(case, **{what[0]: far_apart(getattr(case, what[0]), 0, FAR // 16)})
    else:
        far = attrs.evolve(case, **{what: far_apart(getattr(case, what), 1)})
    assert all(map(torch.equal, wanted, far.run(KERNEL)))


def test_an_output_whose_heads_lie_far_apart():
    case = make_case(2, rows=[(1, 40), (2, 9)], heads=(4, 2), dtype=torch.float16)
    wanted = case.run(KERNEL)[0]
    out = far_apart(torch.zeros_like(wanted), 1)
    ws = EagerWorkspace(TorchOps(), torch.device("cpu"), {})
    KERNEL.run(KERNEL.prepare(case.segment, case.layer, case.request(), ws), case.q, case.k, case.v, out)
    assert torch.equal(out, wanted)


def test_writes_to_heads_that_lie_far_apart():
    k, v = (torch.randn(9, 4, 8, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    caches = [far_apart(torch.zeros(20, 4, 8).to(torch.float16), 1) for _ in "kv"]
    at = torch.randperm(19)[:9] + 1
    TritonOps().set_kv(k, v, *caches, KVWrite(at), None, None)
    for cache, new in zip(caches, (k, v), strict=True):
        assert torch.equal(cache[at], new.to(torch.float16))


def test_three_parts_of_more_elements_than_30_bits_count():
    outs = torch.randn(3, 5, 2, 8, generator=torch.Generator().manual_seed(0)).to(torch.float16)
    lses = torch.randn(3, 5, 2, generator=torch.Generator().manual_seed(1))
    far = far_apart(outs, 0)
    found, wanted = ((torch.empty_like(outs[0]), torch.empty_like(lses[0])) for _ in range(2))
    sizes = {"HEADS": 2, "DV": 8, "BLOCK": 16, "BLOCK_T": 4}
    strides = *far.stride()[1:3], lses.stride(1), *found[0].stride()[:2], found[1].stride(0)
    merge[(3,)](far, lses, *found, None, *strides, 3, 5, far.stride(0), lses.stride(0), **sizes)
    TorchOps().merge(list(outs), list(lses), *wanted, None)
    torch.testing.assert_close(found[0], wanted[0], atol=2e-3, rtol=0)
    torch.testing.assert_close(found[1], wanted[1])


@triton.jit
def first_item(out, cu_seqlens_q, kv_len, rows, tokens, target):
    work = find_work(0, rows, tokens, cu_seqlens_q, kv_len, None, 1 << 30, target, 32, 64, 32, 2, False, 0)
    tl.store(out, work[0])
    tl.store(out + 1, work[1])
    tl.store(out + 2, work[3])


def test_more_tiles_than_32_bits_count_need_no_splits():
    """2^19 blocks of queries against 2^15 tiles of keys."""
    out, million = torch.zeros(3, dtype=torch.int32), 1 << 20
    offsets, lens = torch.tensor([0, million], dtype=torch.int32), torch.tensor([million], dtype=torch.int32)
    first_item[(1,)](out, offsets, lens, 1, million, 132)
    assert out.tolist() == [0, (1 << 19) - 1, 1]  # row, block, splits


def test_the_last_keys_of_a_million():
    """Position, window and chunk at the end of a long row; what is not seen has no slot."""
    for features, seen in (({"window"}, 150), ({"chunk"}, 1_000_003 % 4096)):
        case = make_case(4, rows=[(3, seen)], page=16, features=features, window=140, chunk=4096)
        view, skipped = case.segment.kv, 1_000_003 - seen
        table = torch.full((view.req_to_token.shape[0], 1_000_003), 1 << 30, dtype=torch.int32)
        table[:, skipped:] = view.req_to_token[:, :seen]
        segment = attrs.evolve(
            case.segment,
            kv=attrs.evolve(view, req_to_token=table),
            kv_len=case.segment.kv_len + skipped,
            max_kv_len=1_000_003,
        )
        attrs.evolve(case, segment=segment).check(KERNEL)


@pytest.mark.parametrize("rule", ["window", "window_right", "chunk"])
@pytest.mark.parametrize("distance", [(1 << 30) + 1, (1 << 31) - 1, 1 << 40])
def test_distances_beyond_every_text_are_as_good_as_none(rule, distance):
    case = make_case(5, rows=[(2, 90), (1, 7)], features={rule, "non_causal"} if rule == "window_right" else {rule})
    visibility = case.segment.visibility
    far = {"window": (distance, None), "window_right": (None, distance)}.get(rule)
    far_rule = attrs.evolve(visibility, chunk=distance) if far is None else attrs.evolve(visibility, window=far)
    none = attrs.evolve(visibility, chunk=None, window=(None, None))
    found, wanted = (
        attrs.evolve(case, segment=attrs.evolve(case.segment, visibility=seen)).run(KERNEL)[0]
        for seen in (far_rule, none)
    )
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "features",
    [
        {"sinks", "padded_rows", "padded_tokens"},
        {"start", "row_window", "q_len"},
        {"keep", "window", "slot_map"},
        {"tree", "padded_tokens"},
        {"tail_slots", "tail_positions"},
        {"branches"},
        {"raw", "positions"},
        {"dense", "chunk"},
        {"shard"},
    ],
    ids=together,
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_more_rows_than_a_program_plans_over(monkeypatch, features, deterministic):
    """In launches of three rows each."""
    rows = [(1, 70), (3, 9), (0, 20), (2, 0), (1, 33), (2, 5), (1, 1), (4, 64)]
    case = make_case(6, rows=rows, page=4, features=features, window=20)
    monkeypatch.setattr(provider, "MAX_PLANNED_ROWS", 4)
    case.check(KERNEL, deterministic=deterministic)
