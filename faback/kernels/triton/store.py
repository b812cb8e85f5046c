"""Writing new keys and values into the cache, merging partial results, clearing what nobody writes."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_one(
    source, cache, token, slot, exists, head, scale, factor, s_token, s_head, c_slot, c_head,
    PER_HEAD: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Tokens [T] of one head: source[token, head] / scale -> cache[slot, head], saturated at LIMIT if that is > 0."""
    d = tl.arange(0, BLOCK)
    mask = exists[:, None] & (d < DIM)
    value = tl.load(source + token[:, None] * s_token + head * s_head + d, mask=mask, other=0.0)
    if scale is not None:
        factor = tl.load(scale + head * PER_HEAD)
    value = value.to(tl.float32) / factor
    if LIMIT > 0:
        value = tl.minimum(tl.maximum(value, -LIMIT), LIMIT)
    tl.store(cache + slot[:, None] * c_slot + head * c_head + d, value.to(cache.dtype.element_ty), mask=mask)


@triton.jit
def store_tokens(
    k, v, k_cache, v_cache, slots, slot_map, k_scale, v_scale, token, exists, head,
    k_token, k_head, v_token, v_head, kc_slot, kc_head, vc_slot, vc_head, k_factor, v_factor,
    K_PER_HEAD: tl.constexpr, V_PER_HEAD: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Keys and values of one head, int64, of those tokens int64 [T] that exist and have a slot; see `store`."""
    slot = tl.load(slots + token, mask=exists, other=0).to(tl.int64)
    exists = exists & (slot > 0)
    if slot_map is not None:
        slot = tl.load(slot_map + slot, mask=exists, other=0).to(tl.int64)
        exists = exists & (slot > 0)
    store_one(
        k, k_cache, token, slot, exists, head, k_scale, k_factor, k_token, k_head, kc_slot, kc_head,
        K_PER_HEAD, DK, BLOCK_K, LIMIT,
    )  # fmt: skip
    if v is not None:
        store_one(
            v, v_cache, token, slot, exists, head, v_scale, v_factor, v_token, v_head, vc_slot, vc_head,
            V_PER_HEAD, DV, BLOCK_V, LIMIT,
        )  # fmt: skip


@triton.jit(do_not_specialize=("tokens",))
def store(
    k, v, k_cache, v_cache, slots, slot_map, k_scale, v_scale,
    K_PER_HEAD: tl.constexpr, V_PER_HEAD: tl.constexpr,
    k_token, k_head, v_token, v_head, kc_slot, kc_head, vc_slot, vc_head,
    k_factor, v_factor, tokens,
    DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, LIMIT: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of tokens, heads). k, v [tokens, heads, dim]; caches [slots, heads, dim]; slots [tokens].

    Slot 0 belongs to padding and is not written; `v` None writes the keys alone.
    """
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    store_tokens(
        k, v, k_cache, v_cache, slots, slot_map, k_scale, v_scale, token, token < tokens, head,
        k_token, k_head, v_token, v_head, kc_slot, kc_head, vc_slot, vc_head, k_factor, v_factor,
        K_PER_HEAD, V_PER_HEAD, DK, DV, BLOCK_K, BLOCK_V, LIMIT,
    )  # fmt: skip


@triton.jit(do_not_specialize=("rows", "tokens"))
def clear(
    out, lse, offsets, o_token, o_head, lse_token, rows, tokens,
    HEADS: tl.constexpr, DV: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Zeros, and -inf in lse, for the tokens behind the last row. Grid: (blocks of tokens,)."""
    end = tl.load(offsets + rows)
    first = tl.maximum(tl.program_id(0) * BLOCK_T, end)
    last = tl.minimum(tl.program_id(0) * BLOCK_T + BLOCK_T, tokens)
    h, d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK)
    for i in range(first, last):
        token = tl.zeros((BLOCK_H,), tl.int64) + i
        at = out + (token * o_token + h.to(tl.int64) * o_head)[:, None] + d[None, :]
        zeros = tl.zeros((BLOCK_H, BLOCK), out.dtype.element_ty)
        tl.store(at, zeros, mask=(h < HEADS)[:, None] & (d < DV)[None, :])
        if lse is not None:
            nothing = tl.full((BLOCK_H,), float("-inf"), tl.float32)
            tl.store(lse + token * lse_token + h, nothing, mask=h < HEADS)


@triton.jit(do_not_specialize=("parts", "tokens", "part_out", "part_lse"))
def merge(
    outs, lses, out, lse, sinks, p_token, p_head, l_token, o_token, o_head, lse_token,
    parts, tokens, part_out, part_lse,
    HEADS: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Merges partial results by log-sum-exp. Grid: (blocks of packed token-heads).

    outs [parts, tokens, heads, dim], lses [parts, tokens, heads] in base e. A part that saw nothing has weight 0; sinks
    [heads] enter here, once.
    """
    packed = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    token, head = (packed // HEADS).to(tl.int64), (packed % HEADS).to(tl.int64)
    exists = token < tokens
    d = tl.arange(0, BLOCK)
    highest = tl.full((BLOCK_T,), float("-inf"), tl.float32)
    at = lses + token * l_token + head
    for _ in range(0, parts):
        highest = tl.maximum(highest, tl.load(at, mask=exists, other=float("-inf")))
        at += part_lse
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.zeros((BLOCK_T,), tl.float32)
    acc = tl.zeros((BLOCK_T, BLOCK), tl.float32)
    at = lses + token * l_token + head
    value_at = outs + token * p_token + head * p_head
    for _ in range(0, parts):
        weight = tl.exp(tl.load(at, mask=exists, other=float("-inf")) - base)
        total += weight
        value = tl.load(value_at[:, None] + d, mask=exists[:, None] & (d < DV), other=0.0).to(tl.float32)
        acc += tl.where(weight[:, None] > 0, value * weight[:, None], 0.0)
        at += part_lse
        value_at += part_out
    denominator = total
    if sinks is not None:
        sink = tl.load(sinks + head, mask=exists, other=0.0).to(tl.float32)
        denominator = total + tl.exp(tl.minimum(sink - base, 87.0))
    result = acc / tl.where(denominator > 0, denominator, 1.0)[:, None]
    at = out + token * o_token + head * o_head
    tl.store(at[:, None] + d, result.to(out.dtype.element_ty), mask=exists[:, None] & (d < DV))
    if lse is not None:
        value = tl.where(total > 0, base + tl.log(total), float("-inf"))
        tl.store(lse + token * lse_token + head, value, mask=exists)
