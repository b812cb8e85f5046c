"""KV writes and merges of partial results in Triton's interpreter, against torch."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from faback.core.segment import KVWrite
from faback.kernels.torch_ops import TorchOps
from faback.kernels.triton.ops import TritonOps
from faback.testing.layers import as_bits
from kernels.triton.interpreter import needs_interpreter

needs_interpreter()

OPS = TritonOps()
SLOTS = 40
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def some_slots(tokens, dtype=torch.int32):
    order = torch.randperm(SLOTS - 1, generator=torch.Generator().manual_seed(1)) + 1
    return order[:tokens].to(dtype)


def same_as_torch(k, v, caches, write, k_scale=None, v_scale=None):
    """Every slot but 0 holds what torch writes there; slot 0, which torch may write, is left alone. v None: k alone."""
    wanted = [cache.clone() for cache in caches]
    padding = [as_bits(cache[:1]).clone() for cache in caches]
    TorchOps().set_kv(k, v, *wanted, write, k_scale, v_scale)
    OPS.set_kv(k, v, *caches, write, k_scale, v_scale)
    for got, right, before in list(zip(caches, wanted, padding, strict=True))[: 1 if v is None else 2]:
        assert torch.equal(as_bits(got)[1:], as_bits(right)[1:])
        assert torch.equal(as_bits(got)[:1], before)


def caches_of(heads, dims, dtype, fill=math.nan):
    return [torch.full((SLOTS, heads, dim), fill).to(dtype) for dim in dims]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dims", [(16, 16), (24, 8), (7, 5), (192, 128)], ids=str)
@pytest.mark.parametrize("tokens", [1, 19])
def test_plain_writes_are_copies(tokens, dims, dtype):
    k, v = (draw(tokens, 3, dim, dtype=dtype) for dim in dims)
    same_as_torch(k, v, caches_of(3, dims, dtype), KVWrite(some_slots(tokens)))


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("map_index", [torch.int32, torch.int64])
def test_slots_are_translated_and_padding_is_skipped(index, map_index):
    slots = some_slots(9, index)
    slots[[2, 5, 8]] = torch.tensor([0, -1, -(2**30)], dtype=index)
    slot_map = torch.zeros(SLOTS, dtype=map_index)
    slot_map[1:] = torch.randperm(SLOTS - 1).to(map_index) + 1
    slot_map[slots[3].long()] = 0  # a token that the pool does not keep
    k, v = draw(9, 2, 8), draw(9, 2, 8, seed=1)
    k[2], v[5] = math.nan, math.inf
    same_as_torch(k, v, caches_of(2, (8, 8), torch.float32), KVWrite(slots, slot_map))


PER_HEAD = torch.tensor([0.5, 2.0, 8.0])
SCALES = {
    "floats": (0.5, 4.0),
    "one": (None, 0.25),
    "heads": (PER_HEAD, torch.tensor([4.0, 1.0, 0.25])),
    "single": (0.3, torch.tensor([7.0])),
    "mixed heads": (PER_HEAD, 0.25),
    "mixed heads, one": (None, PER_HEAD),
    "mixed heads, single": (torch.tensor([7.0]), PER_HEAD),
}


@pytest.mark.parametrize("scales", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_scales_divide(dtype, scales):
    k, v = draw(5, 3, 16), draw(5, 3, 16, seed=1)
    same_as_torch(k, v, caches_of(3, (16, 16), dtype), KVWrite(some_slots(5)), *scales)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_8_bit_floats(dtype):
    """Of numbers that the interpreter can convert: those that the format has, and those beyond its ends."""
    top = torch.finfo(dtype).max
    exact = draw(6, 2, 16).to(dtype).float()
    exact[0, 0, :4] = torch.tensor([top, -top, 1e9, -math.inf])
    caches = caches_of(2, (16, 16), dtype)
    k_scale, v_scale = torch.tensor([2.0, 4.0]), torch.tensor([0.5, 1.0])
    k, v = exact * k_scale[:, None], exact * v_scale[:, None]
    same_as_torch(k, v, caches, KVWrite(some_slots(6)), k_scale, v_scale)
    assert caches[0][some_slots(6)[0].long(), 0, :4].float().tolist() == [top, -top, top, -top]


def test_latents_are_written_once():
    k = draw(7, 1, 40)
    latent = torch.full((SLOTS, 1, 48), math.nan)
    same_as_torch(k, None, [latent[..., :40], latent[..., :32]], KVWrite(some_slots(7)))
    assert latent[..., 40:].isnan().all()


def test_strides_of_every_kind():
    fused = draw(6, 2 * 2 * 8 + 4)
    k, v = fused[:, :16].view(6, 2, 8), fused[:, 16:32].view(6, 2, 8)
    both = torch.full((SLOTS, 2, 20), math.nan)
    slots = torch.stack([some_slots(6), torch.zeros(6, dtype=torch.int32)], 1)[:, 0]
    assert not slots.is_contiguous()
    same_as_torch(k, v, [both[..., :8], both[..., 10:18]], KVWrite(slots))
    assert both[..., 8:10].isnan().all() and both[..., 18:].isnan().all()
    lanes = draw(6, 8, 2).transpose(1, 2)
    same_as_torch(lanes, lanes, caches_of(2, (8, 8), torch.float32), KVWrite(some_slots(6)))


def test_no_token_is_written():
    cache = caches_of(1, (8, 8), torch.float32)
    same_as_torch(draw(0, 1, 8), draw(0, 1, 8), cache, KVWrite(some_slots(0)))


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_merge(parts, with_sinks, dtype):
    """Every token has another set of parts that saw something, the empty set and the full one among them."""
    sets = list(product([False, True], repeat=parts))
    outs = [draw(len(sets), 3, 12, seed=part, dtype=dtype) for part in range(parts)]
    lses = [draw(len(sets), 3, seed=9 + part) * 30 for part in range(parts)]
    for token, seen in enumerate(sets):
        for out, lse, there in zip(outs, lses, seen, strict=True):
            if not there:
                out[token], lse[token] = 0, -math.inf
    sinks = torch.tensor([-3.0, 0.5, 40.0]) if with_sinks else None
    wanted, wanted_lse = torch.empty(len(sets), 3, 12), torch.empty(len(sets), 3)
    TorchOps().merge([o.float() for o in outs], lses, wanted, wanted_lse, sinks)
    wide = torch.full((len(sets) + 2, 4, 20), math.nan, dtype=dtype)
    out, lse = wide[1:-1, :3, 4:16], torch.full((len(sets), 3), math.nan)
    OPS.merge(outs, lses, out, lse, sinks)
    torch.testing.assert_close(out.float(), wanted, atol=2e-3 if dtype == torch.float16 else 1e-5, rtol=0)
    torch.testing.assert_close(lse, wanted_lse, atol=1e-5, rtol=1e-6)
    assert out[0].eq(0).all() and lse[0].eq(-math.inf).all()
    result = out.clone()
    out.fill_(math.nan)
    assert wide.isnan().all()
    OPS.merge(outs, lses, out, None, sinks)
    assert torch.equal(out, result)


def test_merge_of_bfloat16_and_of_nothing():
    outs, lses = [draw(2, 1, 16, seed=n, dtype=torch.bfloat16) for n in range(2)], [draw(2, 1), draw(2, 1, seed=1)]
    out, wanted = torch.empty_like(outs[0]), torch.empty_like(outs[0])
    OPS.merge(outs, lses, out, None, None)
    TorchOps().merge(outs, lses, wanted, None, None)
    torch.testing.assert_close(out.float(), wanted.float(), atol=1e-2, rtol=0)
    OPS.merge([o[:0] for o in outs], [x[:0] for x in lses], out[:0], None, None)


@pytest.mark.parametrize("end", [0, 3, 17, 40])
@pytest.mark.parametrize("with_lse", [True, False])
def test_tokens_that_no_row_owns_are_cleared_and_no_others(end, with_lse):
    whole = torch.randn(40, 5, 30, dtype=torch.float16)
    out, lse = whole[:, :3, :24], torch.randn(40, 3) if with_lse else None
    before = whole.clone(), None if lse is None else lse.clone()
    OPS.clear(out, lse, torch.tensor([0, end // 2, end], dtype=torch.int32))
    assert not out[end:].any()
    assert torch.equal(whole[:end], before[0][:end])
    assert torch.equal(whole[:, 3:], before[0][:, 3:]) and torch.equal(whole[..., 24:], before[0][..., 24:])
    if lse is not None:
        assert torch.equal(lse[:end], before[1][:end]) and lse[end:].eq(-torch.inf).all()
    mine, theirs = out.clone(), before[0][:, :3, :24].clone()
    TorchOps().clear(theirs, None, torch.tensor([0, end], dtype=torch.int32))
    assert torch.equal(mine, theirs)
