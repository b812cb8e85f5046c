"""Scores, weights and sums of one tile of keys.

Scores are kept in base 2 (scale * log2(e) folded in); log-sum-exps leave in base e.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def capped(x, scale, softcap):
    """Raw dot products -> softcap * tanh(scale * x / softcap), by exp, safe at both ends."""
    y = tl.exp2(x * (scale * 2.0 * LOG2E / softcap))
    return softcap - 2.0 * softcap / (y + 1.0)


@triton.jit
def absorb(x, factor, seen, m, total, acc, MASKED: tl.constexpr, SPREAD: tl.constexpr):
    """Online softmax: takes scores factor * x [M, N] in; returns weights [M, N], and m, total, acc rescaled.

    With SPREAD the sums stay spread over N until the end: where a row belongs to several warps, each sum would cost
    them a round through shared memory.

    `factor` is positive and includes log2(e): everything here is in base 2.
    """
    if MASKED:
        x = tl.where(seen, x, float("-inf"))
    highest = tl.maximum(m, tl.max(x, 1) * factor)
    # A query that has seen nothing yet keeps -inf, from which nothing may be subtracted.
    base = tl.where(highest == float("-inf"), 0.0, highest) if MASKED else highest
    p = tl.exp2(x * factor - base[:, None])
    shrink = tl.exp2(m - base)
    total = total * shrink[:, None] + p if SPREAD else total * shrink + tl.sum(p, 1)
    return p, highest, total, acc * shrink[:, None]


@triton.jit
def dot(a, b, acc, FP32: tl.constexpr, UPCAST: tl.constexpr):
    """acc + a @ b; exact float32 where the inputs are, and where the interpreter cannot multiply 16-bit types."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    if FP32 or UPCAST:
        return tl.dot(a, b, acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def widened(x, dtype: tl.constexpr, TURNED: tl.constexpr):
    """Cached numbers in the dtype they are multiplied in.

    Matrix units want values turned, which takes elements of 16 bits: TURNED, 8-bit floats become float16 at once, by an
    instruction that the compiler may not move behind the turn, where it would load byte by byte.
    """
    if TURNED and x.dtype == tl.float8e4nv and dtype == tl.float16:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b16 low, high;
            mov.b32 {low, high}, $2;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }
            """,
            "=r,=r,r",
            args=[x.to(tl.uint8, bitcast=True)],
            dtype=tl.float16,
            is_pure=False,
            pack=4,
        )
    return x.to(dtype)


@triton.jit
def fetched(ptr, exists, d, D: tl.constexpr, WHOLE: tl.constexpr, MASKED: tl.constexpr):
    """Loads a tile; 0 where a key does not exist or a dimension is behind the last. Without need, no mask is made."""
    if MASKED and WHOLE:
        return tl.load(ptr, mask=exists, other=0.0)
    if MASKED:
        return tl.load(ptr, mask=exists & (d < D), other=0.0)
    if WHOLE:
        return tl.load(ptr)
    return tl.load(ptr, mask=d < D, other=0.0)


@triton.jit
def offset(slot, stride, FAR: tl.constexpr):
    """Where slots begin, in 64 bits if the cache is that large: in 32 they take a third of the instructions."""
    return (slot.to(tl.int64) if FAR else slot) * stride


@triton.jit
def score_tile(
    q_main, q_rest, peak, k_base, slot, exists, k_slot, d_main, d_rest, scale, softcap,
    DK: tl.constexpr, DR: tl.constexpr, HAS_SOFTCAP: tl.constexpr, FP32: tl.constexpr, UPCAST: tl.constexpr,
    FP8: tl.constexpr, SHARE_KV: tl.constexpr, MASKED: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Keys [K_MAIN, N] at slots, and the raw scores [M, N] of the queries against them, capped if there is a cap."""
    k_ptr = k_base + offset(slot, k_slot, FAR)[None, :]
    d = d_main[:, None]
    keys = fetched(k_ptr + d, exists[None, :], d, DK, DK >= d_main.shape[0], MASKED)
    keys = widened(keys, q_main.dtype, SHARE_KV and not UPCAST)
    x = dot(q_main, keys, None, FP32, UPCAST)
    if DR > 0:
        d = d_rest[:, None]
        rest = fetched(k_ptr + d, exists[None, :], d, DK, DR == d_rest.shape[0], MASKED)
        x = dot(q_rest, widened(rest, q_main.dtype, False), x, FP32, UPCAST)
    if FP8:
        x = x * peak[:, None]
    if HAS_SOFTCAP:
        x = capped(x, scale, softcap)
    return keys, x


@triton.jit
def add_tile(
    x, factor, seen, keys, v_base, slot, exists, v_slot, d_value, m, total, acc,
    DV: tl.constexpr, SHARE_KV: tl.constexpr, FP32: tl.constexpr, UPCAST: tl.constexpr, MASKED: tl.constexpr,
    SPREAD: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Takes one tile's scores and its values into m, total and acc."""
    weights, m, total, acc = absorb(x, factor, seen, m, total, acc, MASKED, SPREAD)
    if SHARE_KV:
        values = tl.trans(keys)
    else:
        d = d_value[None, :]
        values = fetched(
            v_base + offset(slot, v_slot, FAR)[:, None] + d, exists[:, None], d, DV, DV == d_value.shape[0], MASKED
        )
        values = widened(values, keys.dtype, not UPCAST)
    return m, total, dot(weights.to(keys.dtype), values, acc, FP32, UPCAST)
