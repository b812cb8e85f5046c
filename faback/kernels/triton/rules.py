"""`Visibility` and `KVView` inside a kernel."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def slots_of(t, exists, table, slot_map):
    """int32 slots of a row's tokens, translated; `table` points at the row's first token."""
    slot = tl.load(table + t, mask=exists, other=0).to(tl.int32)
    if slot_map is not None:
        slot = tl.load(slot_map + slot, mask=exists, other=0).to(tl.int32)
    return slot


@triton.jit
def near(p, t, left, right, chunk, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_CHUNK: tl.constexpr):
    """Whether window and chunk let a query at p see a key at t; both broadcast."""
    seen = (p == p) & (t == t)
    if HAS_LEFT:
        seen = seen & (t >= p - left)
    if HAS_RIGHT:
        seen = seen & (t <= p + right)
    if HAS_CHUNK:
        seen = seen & (t >= p // chunk * chunk) & (t < p // chunk * chunk + chunk)
    return seen
