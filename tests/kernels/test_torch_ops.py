"""The torch operations: merging partial results and storing keys and values."""

import itertools
import math

import pytest
import torch

from faback.core.segment import KVWrite
from faback.kernels.torch_ops import TorchOps

OPS = TorchOps()


def parts_of(present, dtype, heads=3, tokens=2, seed=0):
    """Scores and values of some parts, their partial results, and the merged result in float64."""
    generator = torch.Generator().manual_seed(seed)
    outs, lses, scores, values = [], [], [], []
    for there in present:
        count = 4 if there else 0
        s = torch.randn(tokens, heads, count, generator=generator).double() * 3
        v = torch.randn(tokens, heads, count, 8, generator=generator).double()
        lses.append(s.logsumexp(-1).float())
        outs.append(torch.einsum("thk,thkd->thd", s.softmax(-1), v).to(dtype))
        scores.append(s)
        values.append(v)
    return outs, lses, torch.cat(scores, -1), torch.cat(values, -2)


COMBINATIONS = [*itertools.product([True, False], repeat=2), *itertools.product([True, False], repeat=5)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("present", COMBINATIONS, ids=lambda p: "".join("01"[x] for x in p))
def test_merge(present, with_sinks, dtype):
    outs, lses, scores, values = parts_of(present, dtype)
    before = [t.clone() for t in (*outs, *lses)]
    sinks = torch.tensor([-2.0, 0.5, 4.0]) if with_sinks else None
    out, lse = torch.full((2, 3, 8), math.nan, dtype=dtype), torch.full((2, 3), math.nan)
    OPS.merge(outs, lses, out, lse, sinks)
    total = scores.logsumexp(-1)
    torch.testing.assert_close(lse.double(), total, atol=1e-5, rtol=0)
    bottom = total if sinks is None else torch.logaddexp(total, sinks.double())
    weights = (scores - bottom[..., None]).exp().nan_to_num()
    wanted = torch.einsum("thk,thkd->thd", weights, values)
    torch.testing.assert_close(out.double(), wanted, atol=2e-2 if dtype == torch.bfloat16 else 3e-3, rtol=0)
    assert all(map(torch.equal, before, (*outs, *lses)))
    if sum(present) == 1 and not with_sinks:
        assert torch.equal(out, outs[present.index(True)])
        assert torch.equal(lse, lses[present.index(True)])


def test_merge_into_a_view_and_without_lse():
    outs, lses, _, _ = parts_of((True, True), torch.float32)
    wide, plain = torch.full((4, 3, 16), math.nan), torch.empty(2, 3, 8)
    OPS.merge(outs, lses, wide[1:3, :, 4:12], None, None)
    OPS.merge(outs, lses, plain, None, None)
    assert torch.equal(wide[1:3, :, 4:12], plain)
    assert wide.isnan().sum() == wide.numel() - plain.numel()


def store(k, v, dtype=torch.float32, slots=(3, 1), slot_map=None, k_scale=None, v_scale=None):
    caches = torch.zeros(6, *k.shape[1:]).to(dtype), torch.zeros(6, *v.shape[1:]).to(dtype)
    OPS.set_kv(k, v, *caches, KVWrite(torch.tensor(slots, dtype=torch.int32), slot_map), k_scale, v_scale)
    return caches


def test_set_kv_writes_its_slots_only():
    k, v = torch.randn(2, 2, 4), torch.randn(2, 2, 3)
    for cache, new in zip(store(k, v), (k, v), strict=True):
        assert torch.equal(cache[[3, 1]], new)
        assert cache[[0, 2, 4, 5]].eq(0).all()


def test_negative_slots_are_padding():
    k = torch.randn(3, 1, 4)
    cache, _ = store(k, k, slots=(-1, 2, -1))
    assert torch.equal(cache[2], k[1])
    assert cache[[1, 3, 4, 5]].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_set_kv_translates(dtype):
    k = torch.randn(2, 1, 4)
    cache, _ = store(k, k, slot_map=torch.tensor([0, 5, 0, 2], dtype=dtype))
    assert torch.equal(cache[[2, 5]], k)
    assert cache[[0, 1, 3, 4]].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_saturates(dtype):
    top = torch.finfo(dtype).max
    k = torch.tensor([[[1e9, -1e9, math.inf, -math.inf]], [[1.0, -2.0, 0.0, top]]])
    cache, _ = store(k, k, dtype)
    assert cache[3, 0].float().tolist() == [top, -top, top, -top]
    assert cache[1, 0].float().tolist() == [1.0, -2.0, 0.0, top]


@pytest.mark.parametrize(
    "scale", [0.25, torch.tensor([0.25, 4.0]), torch.tensor([0.25]), torch.tensor([[0.25], [4.0]])]
)
def test_scales_divide_by_kv_head(scale):
    k = torch.ones(2, 2, 4)
    cache, other = store(k, k, torch.float8_e4m3fn, k_scale=scale)
    second = 0.25 if isinstance(scale, torch.Tensor) and scale.numel() == 2 else 4.0
    assert cache[3].float()[:, 0].tolist() == [4.0, second]
    assert other[3].float().eq(1).all()


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 64, 70])
def test_masks_are_packed_bit_by_bit(columns):
    mask = torch.rand(5, columns, generator=torch.Generator().manual_seed(columns)) < 0.5
    words = torch.empty((5, -(-columns // 32)), dtype=torch.int32)
    TorchOps().pack(words, mask)
    for line, seen in zip(words.tolist(), mask.tolist(), strict=True):
        assert [bool(line[c // 32] >> c % 32 & 1) for c in range(32 * len(line))] == seen + [False] * (-columns % 32)
