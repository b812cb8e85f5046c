"""The Triton kernels on a GPU at the sizes of real models, against the reference kernel in float64 on the same GPU."""

from __future__ import annotations

import math
import random

import attrs
import pytest
import torch

from faback.core.segment import KVWrite
from faback.core.workspace import EagerWorkspace
from faback.kernels.torch_ops import TorchOps
from faback.kernels.triton.ops import TritonOps
from faback.kernels.triton.provider import TritonAttention
from faback.testing.layers import as_bits
from gpu.marks import on_gpu
from kernels.triton.new_keys import forgotten
from kernels.triton.segments import CALL_FEATURES, ROWS, RULES, TAILS, VIEWS, make_case

pytestmark = on_gpu

KERNEL = TritonAttention()
BF16, FP16, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2


@pytest.fixture(autouse=True)
def returned_memory():
    """Pools here are large: none outlives its test."""
    yield
    torch.cuda.empty_cache()


def texts(count, longest, queries=1, seed=0):
    """Rows of uneven lengths up to `longest`, none of them and the longest among them."""
    pick = random.Random(seed)
    return [(queries, n) for n in [longest, 0, *(pick.randint(1, longest) for _ in range(count - 2))]]


GQA = {"heads": (32, 8), "dims": (128, 128), "dtype": BF16}
MLA = {"heads": (16, 1), "dims": (576, 512), "dtype": BF16, "latent": True}
MIXED = [(1, 8000), (1, 3), (700, 1500), (64, 0), (1, 0), (0, 77)]

REAL = {
    "decode": {**GQA, "rows": texts(64, 8192)},
    "decode page 16": {**GQA, "rows": texts(64, 8192), "page": 16, "features": {"slot_map", "padded_rows"}},
    "decode page 64": {**GQA, "rows": texts(17, 8192), "page": 64, "features": {"softcap", "sinks", "int64"}},
    "decode one": {**GQA, "rows": [(1, 8191)], "page": 16},
    "decode window": {**GQA, "rows": texts(40, 8192), "page": 16, "features": {"window", "keep"}, "window": 1000},
    "decode chunk": {**GQA, "rows": texts(40, 8192), "page": 16, "features": {"chunk", "start"}, "chunk": 2048},
    "decode e4m3": {**GQA, "rows": texts(64, 8192), "page": 16, "kv_dtype": E4M3, "features": {"head_scales"}},
    "decode e5m2": {**GQA, "rows": texts(33, 4096), "dtype": FP16, "kv_dtype": E5M2, "features": {"scales", "sinks"}},
    "decode d64": {"heads": (8, 1), "dims": (64, 64), "dtype": FP16, "rows": texts(64, 4096), "page": 64},
    "decode d256": {"heads": (8, 4), "dims": (256, 256), "dtype": BF16, "rows": texts(33, 4096), "page": 16},
    "decode float32": {"heads": (6, 2), "dims": (80, 80), "rows": texts(20, 3000), "page": 3},
    "decode mla": {**MLA, "rows": texts(33, 8192), "page": 64},
    "decode mla e4m3": {**MLA, "rows": texts(33, 4096), "page": 1, "kv_dtype": E4M3, "features": {"scales"}},
    "verify": {**GQA, "rows": texts(32, 8192, 8), "page": 16, "features": {"tree", "slot_map"}},
    "verify e4m3": {**GQA, "rows": texts(9, 4096, 8), "kv_dtype": E4M3, "features": {"tree", "scales", "window"}},
    "verify mla": {**MLA, "rows": texts(20, 4096, 4), "page": 64, "features": {"tree", "tail_slots"}},
    "branches": {**GQA, "rows": texts(20, 4096, 4), "page": 16, "features": {"branches", "sinks"}},
    "branches mla": {**MLA, "rows": texts(9, 2048, 3), "page": 16, "features": {"branches"}},
    "mixed": {**GQA, "rows": MIXED, "page": 16, "features": {"sinks", "padded_tokens"}},
    "mixed window": {**GQA, "rows": MIXED, "features": {"row_window", "softcap", "strided"}, "window": 500},
    "mixed mla": {**MLA, "rows": MIXED, "page": 64},
    "prefill": {**GQA, "rows": [(2000, 4096), (513, 513)], "page": 16},
    "prefill d64": {"heads": (16, 2), "dims": (64, 64), "dtype": FP16, "rows": [(1025, 1025)], "features": {"sinks"}},
    "prefill d192/128": {
        "heads": (16, 16),
        "dims": (192, 128),
        "dtype": BF16,
        "rows": [(900, 900)],
        "features": {"raw"},
    },
    "prefill d256": {"heads": (8, 4), "dims": (256, 256), "dtype": BF16, "rows": [(700, 1400)], "page": 16},
    "prefill e4m3": {**GQA, "rows": [(1000, 2000)], "page": 16, "kv_dtype": E4M3, "features": {"scales"}},
    "prefill both ways": {**GQA, "rows": [(800, 800), (70, 70)], "features": {"raw", "non_causal"}},
    "prefill chunk": {**GQA, "rows": [(1500, 3000)], "page": 16, "features": {"chunk", "sinks"}, "chunk": 700},
}


@pytest.mark.parametrize("name", REAL)
def test_real_sizes(name):
    make_case(1, device="cuda", **REAL[name]).check(KERNEL)


@pytest.mark.parametrize("name", [name for name in REAL if name.startswith("decode")])
def test_new_keys_that_the_launch_writes_are_seen(name):
    """Whichever split reads them: what it should not have read is NaN."""
    case = make_case(1, device="cuda", **REAL[name])
    wanted = case.run(KERNEL)
    ws = EagerWorkspace(TorchOps(), torch.device("cuda"), {})
    for _ in range(10):
        before, new = forgotten(case)
        for got, right in zip(before.run(KERNEL, ws, new=new), wanted, strict=True):
            torch.testing.assert_close(got.float(), right.float(), atol=2e-2, rtol=0)
        for cache, right in ((before.k, case.k), (before.v, case.v)):
            assert torch.equal(as_bits(cache), as_bits(right))


@pytest.mark.parametrize("seed", range(24))
def test_mixtures(seed):
    """Whatever features come together."""
    pick = random.Random(seed)
    wanted = {name for name in (*CALL_FEATURES, *RULES, *VIEWS, *TAILS, *ROWS) if pick.random() < 0.3}
    if "raw" in wanted:
        wanted -= {*VIEWS, *TAILS} - {"raw"}
    if "shard" in wanted:
        wanted -= set(TAILS)
    if "branches" in wanted:
        wanted -= {"tree", "tail_positions"}
    rows = [(pick.choice([0, 1, 3, 17]), pick.choice([0, 1, 63, 64, 300, 2000])) for _ in range(pick.randint(1, 9))]
    make_case(
        seed,
        rows=rows,
        page=pick.choice([1, 16, 64]),
        heads=pick.choice([(8, 2), (6, 2), (5, 1)]),
        dims=pick.choice([(64, 64), (128, 128), (192, 128)]),
        dtype=pick.choice([BF16, FP16]),
        kv_dtype=pick.choice([None, E4M3]),
        features=wanted,
        window=pick.choice([0, 5, 100, 1000]),
        chunk=pick.choice([3, 64, 500]),
        device="cuda",
    ).check(KERNEL)


@pytest.mark.parametrize("sizes", [GQA, MLA, {**GQA, "kv_dtype": E4M3}], ids=["gqa", "mla", "e4m3"])
def test_results_are_the_same_every_time(sizes):
    """Splits arrive in any order, and are merged in one."""
    case = make_case(2, rows=texts(5, 8192), page=16, device="cuda", **sizes)
    ws = EagerWorkspace(TorchOps(), torch.device("cuda"), {})
    first = case.run(KERNEL, ws)
    for _ in range(20):
        assert all(map(torch.equal, first, case.run(KERNEL, ws)))


@pytest.mark.parametrize(
    "rows", [texts(30, 8192), [(1, 5000), (300, 700), (1, 0), (5, 64), (1, 8192)]], ids=["decode", "mixed"]
)
@pytest.mark.parametrize(
    "sizes", [GQA, MLA, {**GQA, "kv_dtype": E4M3, "features": {"window", "scales"}}], ids=["gqa", "mla", "e4m3"]
)
def test_deterministic_results_depend_on_their_request_alone(sizes, rows):
    case = make_case(3, rows=rows, page=16, window=2000, device="cuda", **sizes)
    case.check(KERNEL, deterministic=True)
    together = case.run(KERNEL, deterministic=True)
    for row, (start, end) in enumerate(case.segment.cu_seqlens_q.unfold(0, 2, 1).tolist()):
        if row < 8:
            for whole, part in zip(together, case.alone(row).run(KERNEL, deterministic=True), strict=True):
                assert torch.equal(whole[start:end], part), f"row {row}"


@pytest.mark.parametrize("features", [set(), {"window", "keep", "slot_map"}], ids=["plain", "window"])
def test_a_recorded_launch_serves_other_lengths(features):
    """Lengths are read on the device: a CUDA graph of the longest batch replays shorter ones."""
    case = make_case(4, rows=texts(20, 4096), page=16, features=features, window=600, device="cuda", **GQA)
    ws = EagerWorkspace(TorchOps(), torch.device("cuda"), {})
    case.run(KERNEL, ws)
    launch = KERNEL.prepare(case.segment, case.layer, case.request(), ws)
    out = torch.empty(case.q.shape[0], case.layer.num_q_heads, case.layer.v_head_dim, dtype=BF16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        KERNEL.run(launch, case.q, case.k, case.v, out)
    lens = case.segment.kv_len.clone()
    for divisor in (1, 2, 7, 1):
        case.segment.kv_len.copy_(lens // divisor)
        out.fill_(math.nan)
        graph.replay()
        torch.testing.assert_close(out, case.run(KERNEL)[0], atol=2e-2, rtol=0)


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("features", [set(), {"int64", "tree"}, {"slot_map"}], ids=["plain", "tree", "slot_map"])
def test_pools_of_more_elements_than_32_bits_count(features, dtype):
    """The same tokens at the end of a pool of 2.4e9 elements give the same bits."""
    case = make_case(5, rows=texts(9, 2048), page=16, kv_dtype=dtype, features=features, device="cuda", **GQA)
    wanted = case.run(KERNEL)[0]
    heads, dim = case.k.shape[1:]
    slots = -(-2_400_000_000 // (heads * dim))
    offset = slots - case.k.shape[0]
    far = []
    for cache in (case.k, case.v):
        pool = torch.zeros((slots, heads, dim), dtype=dtype, device="cuda")
        as_bits(pool)[offset:] = as_bits(cache)
        far.append(pool)
    view, tail = case.segment.kv, case.segment.tail
    if view.slot_map is None:
        view = attrs.evolve(view, req_to_token=view.req_to_token + offset)
    else:
        view = attrs.evolve(view, slot_map=view.slot_map + offset)
    segment = attrs.evolve(case.segment, kv=view, tail=tail)
    found = attrs.evolve(case, segment=segment, k=far[0], v=far[1]).run(KERNEL)[0]
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=["bf16", "e4m3"])
def test_writes_to_pools_of_more_elements_than_32_bits_count(dtype):
    slots = -(-2_400_000_000 // 1024)
    pools = [torch.zeros((slots, 8, 128), dtype=dtype, device="cuda") for _ in range(2)]
    k, v = (torch.randn(300, 8, 128, device="cuda", dtype=BF16) for _ in range(2))
    at = slots - 1 - torch.randperm(3000, device="cuda")[:300]
    TritonOps().set_kv(k, v, *pools, KVWrite(at), None, None)
    for pool, new in zip(pools, (k, v), strict=True):
        assert torch.equal(as_bits(pool)[at], as_bits(new.to(dtype)))
        assert as_bits(pool).count_nonzero() == as_bits(new.to(dtype)).count_nonzero()


@pytest.mark.parametrize("dtype", [BF16, FP16, E4M3, E5M2], ids=str)
@pytest.mark.parametrize("scales", [(None, None), (0.25, 2.0), "heads"], ids=["none", "floats", "heads"])
@pytest.mark.parametrize("dims", [(128, 128), (192, 128), (576, 0)], ids=str)
def test_writes_are_those_of_torch(dims, scales, dtype):
    """Bit by bit: rounding, saturation and translation. By powers of two, every way of dividing gives the same."""
    heads, tokens, slots = (1 if dims[0] == 576 else 8), 1003, 2048
    if scales == "heads":
        scales = tuple(2.0 ** torch.randint(-3, 4, (heads,), device="cuda") for _ in range(2))
    k = torch.randn(tokens, heads, dims[0], device="cuda", dtype=BF16) * 200
    v = torch.randn(tokens, heads, dims[1], device="cuda", dtype=BF16) if dims[1] else None
    at = torch.randperm(slots - 1, device="cuda")[:tokens] + 1
    slot_map = torch.cat(
        [torch.zeros(1, dtype=torch.int64, device="cuda"), torch.randperm(slots - 1, device="cuda") + 1]
    )
    got, wanted = ([torch.zeros(slots, heads, d, device="cuda", dtype=dtype) for d in dims] for _ in range(2))
    write = KVWrite(at.int(), slot_map)
    TritonOps().set_kv(k, v, *got, write, *scales)
    TorchOps().set_kv(k, v, *wanted, write, *scales)
    for mine, theirs in zip(got, wanted, strict=True):
        assert torch.equal(as_bits(mine), as_bits(theirs))


@pytest.mark.parametrize("parts", [1, 2, 9])
@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32], ids=str)
def test_merges_are_those_of_torch(parts, dtype):
    outs = [torch.randn(500, 16, 128, device="cuda", dtype=dtype) for _ in range(parts)]
    lses = [torch.randn(500, 16, device="cuda") * 20 for _ in range(parts)]
    for out, lse in zip(outs, lses, strict=True):
        empty = torch.rand(500, device="cuda") < 0.3
        out[empty], lse[empty] = 0, -math.inf
    sinks = torch.randn(16, device="cuda") * 5
    found, wanted = ((torch.empty_like(outs[0]), torch.empty_like(lses[0])) for _ in range(2))
    TritonOps().merge(outs, lses, *found, sinks)
    TorchOps().merge(outs, lses, *wanted, sinks)
    torch.testing.assert_close(
        found[0].float(), wanted[0].float(), atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=0
    )
    torch.testing.assert_close(found[1], wanted[1], atol=1e-4, rtol=1e-6)
