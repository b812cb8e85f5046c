"""Paged attention: one kernel that sees whatever `Segment` can say.

Queries of a request and query heads of a KV head are packed into the M dimension, so that a key is loaded once for all
of them. The loop over committed keys loads no mask; the tail, with its mask or its slots per query, is a loop of its
own at the end of the last split. Partial results are merged by whichever program of a block arrives last, so a forward
pass is one launch.

Scores are kept in base 2 (scale * log2(e) folded in); log-sum-exps leave in base e.
"""

from __future__ import annotations

import triton
import triton.language as tl

from faback.kernels.triton.rules import near, slots_of
from faback.kernels.triton.schedule import find_work

LOG2E = tl.constexpr(1.4426950408889634)
COUNTS = (
    "table_row", "tail_row", "mask_row", "lse_token", "rows", "tokens", "target", "reach", "left", "right", "chunk",
    "shard", "shards",
)  # fmt: skip
"""Arguments that change with the traffic, for whose sake nothing is compiled anew."""
TAIL_TILES = tl.constexpr(3)
LN2 = tl.constexpr(0.6931471805599453)


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
def widened(x, dtype: tl.constexpr, UPCAST: tl.constexpr):
    """Cached numbers in the dtype they are multiplied in. 8-bit ones become float16 before they are laid out for that,
    because wider tiles can be transposed on their way from shared memory.
    """
    if x.dtype == tl.float8e4nv and dtype == tl.float16 and not UPCAST:
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
    if x.dtype == tl.float8e5 and dtype == tl.float16:
        return (x.to(tl.uint8, bitcast=True).to(tl.uint16) << 8).to(tl.float16, bitcast=True)
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
def score_tile(
    q_main, q_rest, peak, k_base, slot, exists, k_slot, d_main, d_rest, scale, softcap,
    DK: tl.constexpr, DR: tl.constexpr, HAS_SOFTCAP: tl.constexpr, FP32: tl.constexpr, UPCAST: tl.constexpr,
    FP8: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys [K_MAIN, N] at slots, and the raw scores [M, N] of the queries against them, capped if there is a cap."""
    k_ptr = k_base + slot.to(tl.int64)[None, :] * k_slot
    d = d_main[:, None]
    keys = fetched(k_ptr + d, exists[None, :], d, DK, DK >= d_main.shape[0], MASKED)
    keys = widened(keys, q_main.dtype, UPCAST)
    x = dot(q_main, keys, None, FP32, UPCAST)
    if DR > 0:
        d = d_rest[:, None]
        rest = fetched(k_ptr + d, exists[None, :], d, DK, DR == d_rest.shape[0], MASKED)
        x = dot(q_rest, widened(rest, q_main.dtype, UPCAST), x, FP32, UPCAST)
    if FP8:
        x = x * peak[:, None]
    if HAS_SOFTCAP:
        x = capped(x, scale, softcap)
    return keys, x


@triton.jit
def add_tile(
    x, factor, seen, keys, v_base, slot, exists, v_slot, d_value, m, total, acc,
    DV: tl.constexpr, SHARE_KV: tl.constexpr, FP32: tl.constexpr, UPCAST: tl.constexpr, MASKED: tl.constexpr,
    SPREAD: tl.constexpr,
):  # fmt: skip
    """Takes one tile's scores and its values into m, total and acc."""
    weights, m, total, acc = absorb(x, factor, seen, m, total, acc, MASKED, SPREAD)
    if SHARE_KV:
        values = tl.trans(keys)
    else:
        d = d_value[None, :]
        values = fetched(
            v_base + slot.to(tl.int64)[:, None] * v_slot + d, exists[:, None], d, DV, DV == d_value.shape[0], MASKED
        )
        values = widened(values, keys.dtype, UPCAST)
    return m, total, dot(weights.to(keys.dtype), values, acc, FP32, UPCAST)


@triton.jit
def slots_at(n, last, prefix, low, table, req_to_token, slot_map, BLOCK_N: tl.constexpr, HAS_KEEP: tl.constexpr):
    """int32 [BLOCK_N] slots of the keys from index n of the span on."""
    i = n + tl.arange(0, BLOCK_N)
    t = tl.where(i < prefix, i, i - prefix + low) if HAS_KEEP else i + low
    if req_to_token is None:
        return table + t  # keys come with the call, one after another
    else:
        return slots_of(t, i < last, table, slot_map)


@triton.jit
def committed_tile(
    n, slot, last, prefix, low, kept, shard, shards, p, left, right, chunk,
    q_main, q_rest, peak, k_base, v_base, k_slot, v_slot, d_main, d_rest, d_value, scale, softcap, factor,
    m, total, acc,
    BLOCK_N: tl.constexpr, DK: tl.constexpr, DR: tl.constexpr, DV: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_CHUNK: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_KEEP: tl.constexpr, SHARE_KV: tl.constexpr, FP32: tl.constexpr, UPCAST: tl.constexpr, FP8: tl.constexpr,
    MASKED: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """One tile of committed keys, from index n of the span. Without MASKED every query sees every key of it."""
    i = n + tl.arange(0, BLOCK_N)
    exists = i < last
    keys, x = score_tile(
        q_main, q_rest, peak, k_base, slot, exists, k_slot, d_main, d_rest, scale, softcap,
        DK, DR, HAS_SOFTCAP, FP32, UPCAST, FP8, MASKED,
    )  # fmt: skip
    seen = exists[None, :]
    if MASKED:
        t = tl.where(i < prefix, i, i - prefix + low) if HAS_KEEP else i + low
        at = t * shards + shard
        seen = near(p[:, None], at[None, :], left, right, chunk, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)
        if HAS_KEEP:
            seen = seen | (at < kept)[None, :]
        if CAUSAL:
            seen = seen & (at[None, :] <= p[:, None])
        seen = seen & exists[None, :]
    return add_tile(
        x, factor, seen, keys, v_base, slot, exists, v_slot, d_value, m, total, acc,
        DV, SHARE_KV, FP32, UPCAST, MASKED, SPREAD,
    )  # fmt: skip


@triton.jit(do_not_specialize=COUNTS)
def attend(
    q, k, v, out, lse, sinks, k_scale, v_scale,
    cu_seqlens_q, q_len, kv_len, positions,
    req_to_token, req_pool_indices, start, slot_map, cu_seqlens_k,
    keep, row_window,
    tail_lens, tail_slots, tail_mask, tail_positions,
    partial_acc, partial_ml, arrivals,
    q_token, q_head, k_slot, k_head, v_slot, v_head, o_token, o_head, lse_token,
    table_row, tail_row, mask_row,
    rows, tokens, target, reach,
    scale, softcap, left, right, chunk, shard, shards,
    GROUP: tl.constexpr, DK: tl.constexpr, DR: tl.constexpr, DV: tl.constexpr,
    K_MAIN: tl.constexpr, K_REST: tl.constexpr, V_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
    LINES: tl.constexpr, MERGE: tl.constexpr, HEADS: tl.constexpr, HEADS_FIRST: tl.constexpr, SPREAD: tl.constexpr,
    FIXED_SPLIT: tl.constexpr, KEY_ROWS: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_CHUNK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, COMMITTED: tl.constexpr, HAS_TAIL: tl.constexpr, PER_QUERY: tl.constexpr,
    SHARE_KV: tl.constexpr, SCALE_HEADS: tl.constexpr, FP32: tl.constexpr, UPCAST: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """One work item of one KV head. Grid: work items * KV heads. Shapes as in `Segment` and `KernelProvider.run`.

    With HEADS_FIRST neighbours read the same tokens, whose heads lie together in memory; otherwise they read one head,
    which then stays in the L2 cache while many blocks of queries pass over it.
    """
    pid = tl.program_id(0)
    if HEADS_FIRST:
        item, head = pid // HEADS, pid % HEADS
    else:
        items = tl.num_programs(0) // HEADS
        item, head = pid % items, pid // items
    row, block, split, splits, begin, end, committed, request = find_work(
        item, rows, tokens, cu_seqlens_q, kv_len, req_pool_indices, reach, target,
        GROUP, BLOCK_M, BLOCK_N, ROWS, KEY_ROWS, FIXED_SPLIT,
    )  # fmt: skip
    if row > rows:
        return  # more programs than work
    # ---- queries
    owned = row < rows
    live = end - begin
    if q_len is not None:
        live = tl.load(q_len + row, mask=owned, other=0).to(tl.int32)
    m_index = block * BLOCK_M + tl.arange(0, BLOCK_M)
    index, lane = m_index // GROUP, m_index % GROUP
    token = (begin + index).to(tl.int64)
    inside = index < end - begin
    queries = index < tl.where(owned, live, 0)
    q_heads = head * GROUP + lane
    q_ptr = q + token * q_token + q_heads * q_head
    d_main = tl.arange(0, K_MAIN)
    d_rest = K_MAIN + tl.arange(0, K_REST)
    d_value = tl.arange(0, V_BLOCK)
    q_main = tl.load(q_ptr[:, None] + d_main, mask=queries[:, None] & (d_main < DK), other=0.0)
    q_rest = q_main
    if DR > 0:
        q_rest = tl.load(q_ptr[:, None] + d_rest, mask=queries[:, None] & (d_rest < DK), other=0.0)
    peak = tl.zeros((BLOCK_M,), tl.float32)
    if FP8:
        # 8-bit floats become 16-bit ones in one instruction where those are float16, whose range q is brought into.
        peak = tl.max(tl.abs(q_main.to(tl.float32)), 1)
        if DR > 0:
            peak = tl.maximum(peak, tl.max(tl.abs(q_rest.to(tl.float32)), 1))
        peak = tl.where(peak > 0, peak, 1.0)
        q_main = (q_main.to(tl.float32) / peak[:, None]).to(tl.float16)
        q_rest = (q_rest.to(tl.float32) / peak[:, None]).to(tl.float16)
    # ---- keys of the row, and where the queries stand
    tail = 0
    if HAS_TAIL:
        tail = tl.load(tail_lens + row, mask=owned, other=0).to(tl.int32)
    if positions is not None:
        p = tl.load(positions + token, mask=queries, other=0).to(tl.int32)
    else:
        p = committed + tail - live + index
    begin_tail = committed
    if req_to_token is not None:
        table = req_to_token + request.to(tl.int64) * table_row
        if start is not None:
            table += tl.load(start + row, mask=owned, other=0)
        if KEY_ROWS:
            committed = tl.where(request != 0, committed, 0)
    else:
        table = tl.load(cu_seqlens_k + row, mask=owned, other=0)
    if not COMMITTED:
        committed = 0
    if row_window is not None:
        left = tl.load(row_window + row, mask=owned, other=0).to(tl.int32)
    kept = 0
    if keep is not None:
        kept = tl.load(keep + row, mask=owned, other=0).to(tl.int32)
    # ---- the span of keys that any of these queries sees: [0, prefix) and [low, high), as indices of the row
    lowest = tl.min(tl.where(queries, p, 2147483647), 0)
    highest = tl.max(tl.where(queries, p, -1), 0)
    any_query = lowest <= highest
    lowest = tl.where(any_query, lowest, 0)
    low = 0
    bound = committed * shards + shard
    if HAS_LEFT:
        low = tl.maximum(low, lowest - left)
    if HAS_CHUNK:
        low = tl.maximum(low, lowest // chunk * chunk)
        bound = tl.minimum(bound, (highest // chunk + 1) * chunk)
    if HAS_RIGHT:
        bound = tl.minimum(bound, highest + right + 1)
    reachable = committed
    if CAUSAL:
        bound = tl.minimum(bound, highest + 1)
        reachable = tl.minimum(committed, tl.maximum(0, tl.cdiv(highest + 1 - shard, shards)))
    high = tl.minimum(committed, tl.maximum(0, tl.cdiv(bound - shard, shards)))
    low = tl.minimum(reachable, tl.maximum(0, tl.cdiv(low - shard, shards)))
    if FIXED_SPLIT > 0:
        low = low // (FIXED_SPLIT * BLOCK_N) * (FIXED_SPLIT * BLOCK_N)
    prefix = 0
    if keep is not None:
        prefix = tl.minimum(tl.maximum(0, tl.cdiv(kept - shard, shards)), reachable)
        joined = (prefix >= low) | (FIXED_SPLIT > 0)  # one span
        high = tl.where(joined, tl.maximum(high, prefix), high)
        low = tl.where(joined, 0, low)
        prefix = tl.where(joined, 0, prefix)
    span = tl.where(any_query, prefix + tl.maximum(high - low, 0), 0)
    if FIXED_SPLIT > 0:
        per_split = FIXED_SPLIT * BLOCK_N
    else:
        # A tail is a loop of its own and starts cold: the split that has it gets fewer committed keys.
        burden = TAIL_TILES if HAS_TAIL else 0
        per_split = tl.cdiv(tl.cdiv(span, BLOCK_N) + burden, splits) * BLOCK_N
    first = split * per_split
    last = tl.minimum(span, first + per_split)
    # ---- committed keys
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_N) if SPREAD else (BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, V_BLOCK), tl.float32)
    key_scale, value_scale = 1.0, 1.0
    if k_scale is not None:
        key_scale = tl.load(k_scale + head * SCALE_HEADS)
        value_scale = tl.load(v_scale + head * SCALE_HEADS)
    k_base, v_base = k + head * k_head, v + head * v_head
    factor = LOG2E if HAS_SOFTCAP else scale * key_scale * LOG2E
    # Tiles that every query sees whole come first and need no mask; the ragged ones at both ends follow.
    clear_low, clear_high = low, high
    if HAS_LEFT:
        clear_low = tl.maximum(clear_low, tl.maximum(0, tl.cdiv(highest - left - shard, shards)))
    if HAS_CHUNK:
        border = highest // chunk * chunk
        clear_low = tl.maximum(clear_low, tl.maximum(0, tl.cdiv(border - shard, shards)))
        clear_high = tl.minimum(clear_high, tl.maximum(0, tl.cdiv((lowest // chunk + 1) * chunk - shard, shards)))
    if HAS_RIGHT:
        clear_high = tl.minimum(clear_high, tl.maximum(0, tl.cdiv(lowest + right + 1 - shard, shards)))
    if CAUSAL:
        clear_high = tl.minimum(clear_high, tl.maximum(0, tl.cdiv(lowest + 1 - shard, shards)))
    clear_from = first + tl.cdiv(tl.maximum(clear_low - low + prefix - first, 0), BLOCK_N) * BLOCK_N
    clear_till = (
        clear_from + tl.maximum(tl.minimum(clear_high - low + prefix, last) - clear_from, 0) // BLOCK_N * BLOCK_N
    )
    clear_from = tl.minimum(clear_from, clear_till)
    # Slots are looked up a tile ahead, by hand: as part of the pipeline they would cost keys and values a stage.
    slot = slots_at(clear_from, clear_till, prefix, low, table, req_to_token, slot_map, BLOCK_N, keep is not None)
    for n in range(clear_from, clear_till, BLOCK_N):
        upcoming = slots_at(
            n + BLOCK_N, clear_till, prefix, low, table, req_to_token, slot_map, BLOCK_N, keep is not None
        )
        m, total, acc = committed_tile(
            n, slot, last, prefix, low, kept, shard, shards, p, left, right, chunk,
            q_main, q_rest, peak, k_base, v_base, k_slot, v_slot, d_main, d_rest, d_value, scale * key_scale, softcap,
            factor, m, total, acc, BLOCK_N, DK, DR, DV, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_SOFTCAP,
            keep is not None, SHARE_KV, FP32, UPCAST, FP8, False, SPREAD,
        )  # fmt: skip
        slot = upcoming
    before = tl.cdiv(clear_from - first, BLOCK_N)
    for j in range(0, before + tl.cdiv(tl.maximum(last - clear_till, 0), BLOCK_N)):
        n = tl.where(j < before, first + j * BLOCK_N, clear_till + (j - before) * BLOCK_N)
        limit = tl.where(j < before, tl.minimum(last, clear_from), last)
        slot = slots_at(n, limit, prefix, low, table, req_to_token, slot_map, BLOCK_N, keep is not None)
        m, total, acc = committed_tile(
            n, slot, limit, prefix, low, kept, shard, shards, p, left, right, chunk,
            q_main, q_rest, peak, k_base, v_base, k_slot, v_slot, d_main, d_rest, d_value, scale * key_scale, softcap,
            factor, m, total, acc, BLOCK_N, DK, DR, DV, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_SOFTCAP,
            keep is not None, SHARE_KV, FP32, UPCAST, FP8, True, SPREAD,
        )  # fmt: skip
    columns = tl.arange(0, BLOCK_N)
    # ---- tail: the last split's
    if HAS_TAIL:
        if split == splits - 1:
            if PER_QUERY:
                for c in range(0, tail):
                    at = begin_tail + c
                    slot = tl.load(tail_slots + token * tail_row + c, mask=queries, other=0).to(tl.int64)
                    if slot_map is not None:
                        slot = tl.load(slot_map + slot, mask=queries, other=0).to(tl.int64)
                    k_ptr = k_base + slot[:, None] * k_slot
                    keys = tl.load(k_ptr + d_main, mask=queries[:, None] & (d_main < DK), other=0.0)
                    x1 = tl.sum(q_main.to(tl.float32) * keys.to(tl.float32), 1)
                    if DR > 0:
                        rest = tl.load(k_ptr + d_rest, mask=queries[:, None] & (d_rest < DK), other=0.0)
                        x1 += tl.sum(q_rest.to(tl.float32) * rest.to(tl.float32), 1)
                    if FP8:
                        x1 = x1 * peak
                    if HAS_SOFTCAP:
                        x1 = capped(x1, scale * key_scale, softcap)
                    seen1 = queries & near(p, at, left, right, chunk, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)
                    if CAUSAL:
                        seen1 = seen1 & (at <= p)
                    weights, m, total, acc = absorb(x1[:, None], factor, seen1[:, None], m, total, acc, True, False)
                    v_ptr = v_base + slot[:, None] * v_slot
                    values = tl.load(v_ptr + d_value, mask=queries[:, None] & (d_value < DV), other=0.0)
                    acc += weights * values.to(tl.float32)
            else:
                for n in range(0, tail, BLOCK_N):
                    c = n + columns
                    exists = c < tail
                    if tail_slots is not None:
                        slot = tl.load(tail_slots + row * tail_row + c, mask=exists, other=0).to(tl.int32)
                        if slot_map is not None:
                            slot = tl.load(slot_map + slot, mask=exists, other=0).to(tl.int32)
                    else:
                        slot = slots_of(begin_tail + c, exists, table, slot_map)
                    keys, x = score_tile(
                        q_main, q_rest, peak, k_base, slot, exists, k_slot, d_main, d_rest, scale * key_scale, softcap,
                        DK, DR, HAS_SOFTCAP, FP32, UPCAST, FP8, True,
                    )  # fmt: skip
                    at = begin_tail + c
                    if tail_positions is not None:
                        at = tl.load(tail_positions + begin + c, mask=exists, other=0).to(tl.int32)
                    seen = near(p[:, None], at[None, :], left, right, chunk, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)
                    if tail_mask is not None:
                        allowed = tl.load(
                            tail_mask + token[:, None] * mask_row + c[None, :],
                            mask=queries[:, None] & exists[None, :],
                            other=0,
                        )
                        seen = seen & (allowed != 0)
                    elif CAUSAL:
                        seen = seen & (at[None, :] <= p[:, None])
                    m, total, acc = add_tile(
                        x, factor, seen & exists[None, :], keys, v_base, slot, exists, v_slot, d_value, m, total, acc,
                        DV, SHARE_KV, FP32, UPCAST, True, SPREAD,
                    )  # fmt: skip
    if SPREAD:
        total = tl.sum(total, 1)
    # ---- out, or merge of the splits by the last to arrive
    if splits == 1:
        finish(
            m, total, acc, m_index, begin, end, live, owned, head, out, lse, sinks, value_scale,
            o_token, o_head, lse_token, d_value, GROUP, DV,
        )  # fmt: skip
        return
    place = (item * HEADS + head).to(tl.int64) * LINES + tl.arange(0, BLOCK_M)
    tl.store(partial_acc + place[:, None] * V_BLOCK + d_value, acc, mask=inside[:, None])
    tl.store(partial_ml + place * 2, m, mask=inside)
    tl.store(partial_ml + place * 2 + 1, total, mask=inside)
    tl.debug_barrier()
    group = item - split
    arrived = tl.atomic_add(arrivals + group * HEADS + head, 1, sem="acq_rel")
    if arrived == splits - 1:
        tl.store(arrivals + group * HEADS + head, 0)
        merge_splits(
            partial_acc, partial_ml, group, splits, block * BLOCK_M, begin, end, live, owned, head, out, lse, sinks,
            value_scale, o_token, o_head, lse_token, d_value, GROUP, DV, V_BLOCK, LINES, MERGE, HEADS,
        )  # fmt: skip


@triton.jit
def merge_splits(
    partial_acc, partial_ml, group, splits, first_line, begin, end, live, owned, head, out, lse, sinks, value_scale,
    o_token, o_head, lse_token, d_value,
    GROUP: tl.constexpr, DV: tl.constexpr, V_BLOCK: tl.constexpr, LINES: tl.constexpr, MERGE: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Merges the partial results of one block of queries, MERGE splits at a time, and writes it out."""
    lines = tl.arange(0, LINES)
    inside = (first_line + lines) // GROUP < end - begin
    m = tl.full((LINES,), float("-inf"), tl.float32)
    total = tl.zeros((LINES,), tl.float32)
    acc = tl.zeros((LINES, V_BLOCK), tl.float32)
    batch = tl.arange(0, MERGE)
    for s in range(0, splits, MERGE):
        present = s + batch < splits
        places = ((group + s + batch) * HEADS + head).to(tl.int64)[:, None] * LINES + lines[None, :]
        held = present[:, None] & inside[None, :]
        m_part = tl.load(partial_ml + places * 2, mask=held, other=float("-inf"), cache_modifier=".cg")
        total_part = tl.load(partial_ml + places * 2 + 1, mask=held, other=0.0, cache_modifier=".cg")
        part = tl.load(
            partial_acc + places[:, :, None] * V_BLOCK + d_value[None, None, :],
            mask=held[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        higher = tl.maximum(m, tl.max(m_part, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        old, new = tl.exp2(m - base), tl.exp2(m_part - base[None, :])
        total = total * old + tl.sum(total_part * new, 0)
        acc = acc * old[:, None] + tl.sum(part * new[:, :, None], 0)
        m = higher
    finish(
        m, total, acc, first_line + lines, begin, end, live, owned, head, out, lse, sinks, value_scale,
        o_token, o_head, lse_token, d_value, GROUP, DV,
    )  # fmt: skip


@triton.jit
def finish(
    m, total, acc, m_index, begin, end, live, owned, head, out, lse, sinks, value_scale,
    o_token, o_head, lse_token, d_value, GROUP: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Writes rows of packed queries out; those that are not live, or have seen nothing, become 0 and -inf."""
    index, q_heads = m_index // GROUP, head * GROUP + m_index % GROUP
    token = (begin + index).to(tl.int64)
    inside, queries = index < end - begin, index < tl.where(owned, live, 0)
    total = tl.where(queries, total, 0.0)  # a padded query has seen what it should not
    acc = tl.where(queries[:, None], acc, 0.0)
    denominator = total
    m = tl.where(total > 0, m, 0.0)
    if sinks is not None:
        sink = tl.load(sinks + q_heads, mask=inside, other=0.0).to(tl.float32) * LOG2E
        denominator = total + tl.exp2(tl.minimum(sink - m, 126.0))
    result = acc * (value_scale / tl.where(denominator > 0, denominator, 1.0))[:, None]
    o_ptr = out + token * o_token + q_heads * o_head
    tl.store(o_ptr[:, None] + d_value, result.to(out.dtype.element_ty), mask=inside[:, None] & (d_value < DV))
    if lse is not None:
        value = tl.where(total > 0, (m + tl.log2(total)) * LN2, float("-inf"))
        tl.store(lse + token * lse_token + q_heads, value, mask=inside)
