"""Paged attention: one kernel that sees whatever `Segment` can say.

Queries of a request and query heads of a KV head are packed into the M dimension, so that a key is loaded once for all
of them. Committed keys that every query of a block sees whole are read by a loop without masks; what is ragged, and the
tail with its tree, by a second one. Partial results are merged by whichever program of a block arrives last, so a
forward pass is one launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from faback.kernels.triton.finish import finish, merge_splits
from faback.kernels.triton.rules import clear_of, near, slots_of, span_of
from faback.kernels.triton.schedule import find_work
from faback.kernels.triton.softmax import LOG2E, absorb, add_tile, capped, score_tile
from faback.kernels.triton.store import store_tokens

COUNTS = (
    "table_row", "tail_row", "words", "lse_token", "rows", "tokens", "target", "reach", "left", "right", "chunk",
    "shard", "shards",
)  # fmt: skip
"""Arguments that change with the traffic, for whose sake nothing is compiled anew."""
INDEX_TENSORS = (
    "cu_seqlens_q", "q_len", "kv_len", "positions", "req_to_token", "req_pool_indices", "start", "slot_map",
    "cu_seqlens_k", "keep", "row_window", "tail_lens", "tail_slots", "tail_bits", "tail_positions", "write_slots",
    "write_map",
)  # fmt: skip
"""Tensors that may be parts of an engine's own, wherever those begin."""
TAIL_TILES = tl.constexpr(3)
"""What a tail costs, in tiles of committed keys: its loads wait for one another."""


@triton.jit
def token_at(i, prefix, low, HAS_KEEP: tl.constexpr):
    """Index of a row's key -> from its index in the span."""
    return tl.where(i < prefix, i, i - prefix + low) if HAS_KEEP else i + low


@triton.jit
def slots_at(
    n, last, prefix, low, table, skipped, req_to_token, slot_map,
    BLOCK_N: tl.constexpr, HAS_KEEP: tl.constexpr, PAGE: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """int32 [BLOCK_N] slots of the keys from index n of the span on."""
    i = n + tl.arange(0, BLOCK_N)
    t = token_at(i, prefix, low, HAS_KEEP)
    if req_to_token is None:
        return table + t  # keys come with the call, one after another
    else:
        return slots_of(t, i < last, table, skipped, slot_map, PAGE, STRIDE)


@triton.jit
def tree_tile(tail_bits, token, queries, words, first, BLOCK_N: tl.constexpr):
    """bool [M, BLOCK_N]: which of the drafted tokens from `first` on each query may see; none before the first."""
    columns = tl.arange(0, BLOCK_N)
    word = tl.zeros_like(token) + first // 32
    asked = queries & (word >= 0)
    mine = tl.load(tail_bits + token * words + word, mask=asked, other=0)[:, None]
    for more in tl.static_range(1, BLOCK_N // 32):
        later = tl.load(tail_bits + token * words + word + more, mask=asked & (word + more < words), other=0)
        mine = tl.where((columns >= more * 32)[None, :], later[:, None], mine)
    shift = columns % 32 if BLOCK_N >= 32 else (first + columns) % 32
    return ((mine >> shift[None, :]) & 1) != 0


@triton.jit
def tail_per_query(
    tail, begin_tail, tail_slots, tail_row, slot_map, token, queries, p, left, right, chunk,
    q_main, q_rest, peak, k_base, v_base, k_slot, v_slot, d_main, d_rest, d_value, scale, softcap, factor,
    m, total, acc,
    DK: tl.constexpr, DR: tl.constexpr, DV: tl.constexpr, CAUSAL: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, HAS_CHUNK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """A tail of its own for each query (draft branches): a few keys that no two queries share, one after another."""
    for c in range(0, tail):
        at = begin_tail + c
        mine = tl.load(tail_slots + token * tail_row + c, mask=queries, other=0).to(tl.int64)
        if slot_map is not None:
            mine = tl.load(slot_map + mine, mask=queries, other=0).to(tl.int64)
        k_ptr = k_base + mine[:, None] * k_slot
        key = tl.load(k_ptr + d_main, mask=queries[:, None] & (d_main < DK), other=0.0)
        x = tl.sum(q_main.to(tl.float32) * key.to(tl.float32), 1)
        if DR > 0:
            rest = tl.load(k_ptr + d_rest, mask=queries[:, None] & (d_rest < DK), other=0.0)
            x += tl.sum(q_rest.to(tl.float32) * rest.to(tl.float32), 1)
        if FP8:
            x = x * peak
        if HAS_SOFTCAP:
            x = capped(x, scale, softcap)
        seen = queries & near(p, at, left, right, chunk, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)
        if CAUSAL:
            seen = seen & (at <= p)
        weight, m, total, acc = absorb(x[:, None], factor, seen[:, None], m, total, acc, True, False)
        value = tl.load(v_base + mine[:, None] * v_slot + d_value, mask=queries[:, None] & (d_value < DV), other=0.0)
        acc += weight * value.to(tl.float32)
    return m, total, acc


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=INDEX_TENSORS)
def attend(
    q, k, v, out, lse, sinks, k_scale, v_scale, new_k, new_v,
    K_PER_HEAD: tl.constexpr, V_PER_HEAD: tl.constexpr, FAR: tl.constexpr,
    q_token, q_head, k_slot, k_head, v_slot, v_head, o_token, o_head,
    nk_token, nk_head, nv_token, nv_head, lse_token,
    k_factor, v_factor,
    cu_seqlens_q, q_len, kv_len, positions,
    req_to_token, req_pool_indices, start, slot_map, cu_seqlens_k,
    keep, row_window,
    tail_lens, tail_slots, tail_bits, tail_positions, write_slots, write_map,
    partial_acc, partial_ml, arrivals,
    table_row, tail_row, words,
    rows, tokens, target, reach,
    scale, softcap, left, right, chunk, shard, shards,
    GROUP: tl.constexpr, DK: tl.constexpr, DR: tl.constexpr, DV: tl.constexpr,
    K_MAIN: tl.constexpr, K_REST: tl.constexpr, V_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
    LINES: tl.constexpr, MERGE: tl.constexpr, HEADS: tl.constexpr, HEADS_FIRST: tl.constexpr, SPREAD: tl.constexpr,
    FIXED_SPLIT: tl.constexpr, KEY_ROWS: tl.constexpr, PAGE: tl.constexpr, STRIDE: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_CHUNK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, COMMITTED: tl.constexpr, HAS_TAIL: tl.constexpr, PER_QUERY: tl.constexpr,
    SHARE_KV: tl.constexpr, FP32: tl.constexpr, UPCAST: tl.constexpr, FP8: tl.constexpr, LIMIT: tl.constexpr,
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
    row, block, split, splits, nth, begin, end, committed, request = find_work(
        item, rows, tokens, cu_seqlens_q, kv_len, req_pool_indices, reach, target,
        GROUP, BLOCK_M, BLOCK_N, ROWS, KEY_ROWS, FIXED_SPLIT,
    )  # fmt: skip
    if row > rows:
        return  # more programs than work
    HAS_KEEP: tl.constexpr = keep is not None
    SHARED_TAIL: tl.constexpr = HAS_TAIL and not PER_QUERY
    # ---- queries
    owned = row < rows
    live = end - begin
    if q_len is not None:
        live = tl.load(q_len + row, mask=owned, other=0).to(tl.int32)
    m_index = block * BLOCK_M + tl.arange(0, BLOCK_M)
    index = m_index // GROUP
    token = (begin + index).to(tl.int64)
    queries = index < tl.where(owned, live, 0)
    q_ptr = q + token * q_token + (head * GROUP + m_index % GROUP).to(tl.int64) * q_head
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
    begin_tail, skipped = committed, 0
    if req_to_token is not None:
        table = req_to_token + request.to(tl.int64) * table_row
        if start is not None:
            skipped = tl.load(start + row, mask=owned, other=0).to(tl.int32)
        if KEY_ROWS:
            committed = tl.where(request != 0, committed, 0)
    else:
        table = tl.load(cu_seqlens_k + row, mask=owned, other=0)
    if not COMMITTED:
        committed = 0
    if row_window is not None:
        left = tl.load(row_window + row, mask=owned, other=0).to(tl.int32)
    kept = 0
    if HAS_KEEP:
        kept = tl.load(keep + row, mask=owned, other=0).to(tl.int32)
    # ---- the span of keys that any of these queries sees, and this split's part of it
    lowest = tl.min(tl.where(queries, p, 2147483647), 0)
    highest = tl.max(tl.where(queries, p, -2147483648), 0)
    any_query = lowest <= highest
    lowest = tl.where(any_query, lowest, 0)
    highest = tl.where(any_query, highest, -1)
    prefix, low, high = span_of(
        lowest, highest, committed, kept, left, right, chunk, shard, shards,
        FIXED_SPLIT * BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_KEEP,
    )  # fmt: skip
    span = tl.where(any_query, prefix + tl.maximum(high - low, 0), 0)
    if FIXED_SPLIT > 0:
        per_split = FIXED_SPLIT * BLOCK_N
    else:
        burden = TAIL_TILES if HAS_TAIL else 0  # the split that has the tail gets fewer committed keys
        per_split = tl.cdiv(tl.cdiv(span, BLOCK_N) + burden, splits) * BLOCK_N
    first = split * per_split
    last = tl.minimum(span, first + per_split)
    clear_low, clear_high = clear_of(
        lowest, highest, low, high, left, right, chunk, shard, shards, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK
    )
    clear_from = first + tl.cdiv(tl.maximum(clear_low - low + prefix - first, 0), BLOCK_N) * BLOCK_N
    clear_tiles = tl.maximum(tl.minimum(clear_high - low + prefix, last) - clear_from, 0) // BLOCK_N
    if FIXED_SPLIT > 0 and (HAS_LEFT or HAS_CHUNK):
        # In ascending order, whichever of them the other queries of the block see whole.
        clear_from, clear_tiles = first, 0
    clear_till = clear_from + clear_tiles * BLOCK_N
    # ---- the new token of a row that decodes, written by the one program that reads it
    if new_k is not None:
        reads_it = ((first < span) & (last == span)) | ((span == 0) & (split == 0))
        K_BLOCK: tl.constexpr = triton.next_power_of_2(DK)
        store_tokens(
            new_k, new_v, k, v, write_slots, write_map, k_scale, v_scale, tl.zeros((1,), tl.int64) + begin,
            tl.zeros((1,), tl.int1) | (reads_it & owned), head.to(tl.int64),
            nk_token, nk_head, nv_token, nv_head, k_slot, k_head, v_slot, v_head, k_factor, v_factor,
            K_PER_HEAD, V_PER_HEAD, DK, DV, K_BLOCK, V_BLOCK, LIMIT,
        )  # fmt: skip
        tl.debug_barrier()
    # ---- clear tiles
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_N) if SPREAD else (BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, V_BLOCK), tl.float32)
    key_scale, value_scale = k_factor, v_factor
    if k_scale is not None:
        key_scale = tl.load(k_scale + head * K_PER_HEAD)
    if v_scale is not None:
        value_scale = tl.load(v_scale + head * V_PER_HEAD)
    far = head.to(tl.int64) if FAR else head
    k_base, v_base = k + far * k_head, v + far * v_head
    factor = LOG2E if HAS_SOFTCAP else scale * key_scale * LOG2E
    columns = tl.arange(0, BLOCK_N)
    # Slots are looked up a tile ahead, by hand: as part of the pipeline they would cost keys and values a stage.
    slot = slots_at(
        clear_from, clear_till, prefix, low, table, skipped, req_to_token, slot_map, BLOCK_N, HAS_KEEP, PAGE, STRIDE
    )
    for n in range(clear_from, clear_till, BLOCK_N):
        upcoming = slots_at(
            n + BLOCK_N, clear_till, prefix, low, table, skipped, req_to_token, slot_map,
            BLOCK_N, HAS_KEEP, PAGE, STRIDE,
        )  # fmt: skip
        exists = columns >= 0
        keys, x = score_tile(
            q_main, q_rest, peak, k_base, slot, exists, k_slot, d_main, d_rest, scale * key_scale, softcap,
            DK, DR, HAS_SOFTCAP, FP32, UPCAST, FP8, SHARE_KV, False, FAR,
        )  # fmt: skip
        m, total, acc = add_tile(
            x, factor, exists[None, :], keys, v_base, slot, exists, v_slot, d_value, m, total, acc,
            DV, SHARE_KV, FP32, UPCAST, False, SPREAD, FAR,
        )  # fmt: skip
        slot = upcoming
    # ---- ragged tiles before and behind them, and the tail in the last split
    before = tl.cdiv(tl.maximum(tl.minimum(clear_from, last) - first, 0), BLOCK_N)
    ragged = before + tl.cdiv(tl.maximum(last - clear_till, 0), BLOCK_N)
    tiles = ragged
    if SHARED_TAIL:
        tiles += tl.where(split == splits - 1, tl.cdiv(tail, BLOCK_N), 0)
    for j in range(0, tiles):
        i = tl.where(j < before, first + j * BLOCK_N, clear_till + (j - before) * BLOCK_N) + columns
        cached = i < tl.where(j < before, tl.minimum(last, clear_from), last)
        exists = cached
        t = token_at(i, prefix, low, HAS_KEEP)
        at = t * shards + shard
        c = (j - ragged) * BLOCK_N + columns
        drafted = (c >= 0) & (c < tail)
        if SHARED_TAIL:
            exists = cached | drafted
            stands = begin_tail + c
            if tail_positions is not None:
                stands = tl.load(tail_positions + begin + c, mask=drafted, other=0).to(tl.int32)
            at = tl.where(drafted, stands, at)
        if SHARED_TAIL and tail_slots is not None:
            slot = slots_of(t, cached, table, skipped, None, PAGE, STRIDE)
            slot += tl.load(tail_slots + row.to(tl.int64) * tail_row + c, mask=drafted, other=0).to(tl.int32)
            if slot_map is not None:
                slot = tl.load(slot_map + slot, mask=exists, other=0).to(tl.int32)
        elif req_to_token is None:
            slot = table + t
        else:
            if SHARED_TAIL:
                t = tl.where(drafted, begin_tail + c, t)
            slot = slots_of(t, exists, table, skipped, slot_map, PAGE, STRIDE)
        seen = near(p[:, None], at[None, :], left, right, chunk, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)
        if HAS_KEEP:
            seen = seen | (cached & (at < kept))[None, :]
        if CAUSAL:
            past = at[None, :] <= p[:, None]
            if tail_bits is not None:
                past = past | drafted[None, :]
            seen = seen & past
        if tail_bits is not None:
            allowed = tree_tile(tail_bits, token, queries, words, (j - ragged) * BLOCK_N, BLOCK_N)
            seen = seen & (cached[None, :] | allowed)
        keys, x = score_tile(
            q_main, q_rest, peak, k_base, slot, exists, k_slot, d_main, d_rest, scale * key_scale, softcap,
            DK, DR, HAS_SOFTCAP, FP32, UPCAST, FP8, SHARE_KV, True, FAR,
        )  # fmt: skip
        m, total, acc = add_tile(
            x, factor, seen & exists[None, :], keys, v_base, slot, exists, v_slot, d_value, m, total, acc,
            DV, SHARE_KV, FP32, UPCAST, True, SPREAD, FAR,
        )  # fmt: skip
    if SPREAD:
        total = tl.sum(total, 1)
    if PER_QUERY:
        m, total, acc = tail_per_query(
            tl.where(split == splits - 1, tail, 0), begin_tail, tail_slots, tail_row, slot_map, token, queries, p,
            left, right, chunk, q_main, q_rest, peak, k_base, v_base, k_slot, v_slot, d_main, d_rest, d_value,
            scale * key_scale, softcap, factor, m, total, acc,
            DK, DR, DV, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_SOFTCAP, FP8,
        )  # fmt: skip
    # ---- out, or merge of the splits by the last to arrive
    if splits == 1:
        finish(
            m, total, acc, m_index, begin, end, live, owned, head, out, lse, sinks, value_scale,
            o_token, o_head, lse_token, d_value, GROUP, DV,
        )  # fmt: skip
        return
    inside = index < end - begin
    place = (nth * HEADS + head).to(tl.int64) * LINES + tl.arange(0, BLOCK_M)
    tl.store(partial_acc + place[:, None] * V_BLOCK + d_value, acc, mask=inside[:, None])
    tl.store(partial_ml + place * 2, m, mask=inside)
    tl.store(partial_ml + place * 2 + 1, total, mask=inside)
    tl.debug_barrier()
    group = nth - split
    arrived = tl.atomic_add(arrivals + group * HEADS + head, 1, sem="acq_rel")
    if arrived == splits - 1:
        tl.store(arrivals + group * HEADS + head, 0)
        merge_splits(
            partial_acc, partial_ml, group, splits, block * BLOCK_M, begin, end, live, owned, head, out, lse, sinks,
            value_scale, o_token, o_head, lse_token, d_value, GROUP, DV, V_BLOCK, LINES, MERGE, HEADS,
        )  # fmt: skip
