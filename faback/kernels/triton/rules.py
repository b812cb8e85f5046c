"""`Visibility` and `KVView` inside a kernel."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def slots_of(t, exists, table, skipped, slot_map, PAGE: tl.constexpr, STRIDE: tl.constexpr):
    """int32 slots of a row's tokens from `skipped` on, translated, 0 where none exists.

    `table` points at the row's slots; at its pages of PAGE tokens, STRIDE slots apart, if STRIDE > 0.
    """
    t += skipped
    if STRIDE > 0:
        page = tl.load(table + t // PAGE, mask=exists, other=0).to(tl.int32)
        slot = tl.where(exists, page * STRIDE + t % PAGE, 0)
    else:
        slot = tl.load(table + t, mask=exists, other=0).to(tl.int32)
    if slot_map is not None:
        slot = tl.load(slot_map + slot, mask=exists, other=0).to(tl.int32)
    return slot


@triton.jit
def chunk_start(p, chunk):
    """First token of the chunk that p is in; p may be negative, where integer division would round the wrong way."""
    return (p - tl.where(p < 0, chunk - 1, 0)) // chunk * chunk


@triton.jit
def near(p, t, left, right, chunk, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_CHUNK: tl.constexpr):
    """Whether window and chunk let a query at p see a key at t; both broadcast."""
    seen = (p == p) & (t == t)
    if HAS_LEFT:
        seen = seen & (t >= p - left)
    if HAS_RIGHT:
        seen = seen & (t <= p + right)
    if HAS_CHUNK:
        begin = chunk_start(p, chunk)
        seen = seen & (t >= begin) & (t < begin + chunk)
    return seen


@triton.jit
def held(t, shard, shards):
    """How many tokens before t a rank holds that has every `shards`-th one, from token `shard` on."""
    return tl.maximum(0, tl.cdiv(t - shard, shards))


@triton.jit
def span_of(
    lowest, highest, committed, kept, left, right, chunk, shard, shards,
    ALIGN: tl.constexpr, CAUSAL: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_CHUNK: tl.constexpr, HAS_KEEP: tl.constexpr,
):  # fmt: skip
    """Committed keys that any query between positions `lowest` and `highest` sees: [0, prefix) and [low, high).

    All are indices of keys that the row holds. With ALIGN > 0, `low` is a multiple of it, and nothing is left out.
    """
    low = 0
    bound = committed * shards + shard
    reachable = committed
    if HAS_LEFT:
        low = tl.maximum(low, lowest - left)
    if HAS_CHUNK:
        low = tl.maximum(low, chunk_start(lowest, chunk))
        bound = tl.minimum(bound, chunk_start(highest, chunk) + chunk)
    if HAS_RIGHT:
        bound = tl.minimum(bound, highest + right + 1)
    if CAUSAL:
        bound = tl.minimum(bound, highest + 1)
        reachable = tl.minimum(committed, held(highest + 1, shard, shards))
    high = tl.minimum(committed, held(bound, shard, shards))
    low = tl.minimum(reachable, held(low, shard, shards))
    if ALIGN > 0:
        low = low // ALIGN * ALIGN
    prefix = 0
    if HAS_KEEP:
        prefix = tl.minimum(held(kept, shard, shards), reachable)
        joined = (prefix >= low) | (ALIGN > 0)
        high = tl.where(joined, tl.maximum(high, prefix), high)
        low = tl.where(joined, 0, low)
        prefix = tl.where(joined, 0, prefix)
    return prefix, low, high


@triton.jit
def clear_of(
    lowest, highest, low, high, left, right, chunk, shard, shards,
    CAUSAL: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_CHUNK: tl.constexpr,
):  # fmt: skip
    """The part of [low, high) that every query between `lowest` and `highest` sees whole."""
    if HAS_LEFT:
        low = tl.maximum(low, held(highest - left, shard, shards))
    if HAS_CHUNK:
        low = tl.maximum(low, held(chunk_start(highest, chunk), shard, shards))
        high = tl.minimum(high, held(chunk_start(lowest, chunk) + chunk, shard, shards))
    if HAS_RIGHT:
        high = tl.minimum(high, held(lowest + right + 1, shard, shards))
    if CAUSAL:
        high = tl.minimum(high, held(lowest + 1, shard, shards))
    return low, high
