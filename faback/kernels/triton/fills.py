"""Metadata fills on the device: one launch each, no host read. What they mean: `faback.core.workspace.DeviceOps`."""

from __future__ import annotations

import triton
import triton.language as tl

from faback.kernels.triton.rules import chunk_start
from faback.kernels.triton.schedule import picked


@triton.jit(do_not_specialize=("n", "value", "step"))
def count(out, source, other, active, each, n, value, step, BLOCK: tl.constexpr):
    """out[s, i] = source[i // each] + other[i] + value + s * step, or 0 where active[i] is 0.

    Grid: (blocks of n, steps).
    """
    s = tl.program_id(1)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = i < n
    x = tl.zeros((BLOCK,), tl.int32) + value + s * step
    if source is not None:
        x += tl.load(source + i // each, mask=exists, other=0).to(tl.int32)
    if other is not None:
        x += tl.load(other + i, mask=exists, other=0).to(tl.int32)
    if active is not None:
        x = tl.where(tl.load(active + i, mask=exists, other=0) != 0, x, 0)
    tl.store(out + s.to(tl.int64) * n + i, x, mask=exists)


@triton.jit(do_not_specialize=("n",))
def offsets(out, lens, n, BLOCK: tl.constexpr):
    """out [n + 1] = running sum of lens [n]. Grid: one program."""
    i = tl.arange(0, BLOCK)
    total = tl.sum(tl.zeros((BLOCK,), tl.int32), 0)
    tl.store(out, total)
    for first in range(0, n, BLOCK):
        length = tl.load(lens + first + i, mask=first + i < n, other=0).to(tl.int32)
        tl.store(out + 1 + first + i, total + tl.cumsum(length, 0), mask=first + i < n)
        total += tl.sum(length, 0)


@triton.jit(do_not_specialize=("rows", "size", "mask_size"))
def tree(
    positions, mask, bits, custom_mask, seq_lens, cu_seqlens_q, mask_row, words, rows, size, mask_size,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """positions [tokens], mask [tokens, mask_row bytes], bits [tokens, words] of a flat tree mask. Grid: (tokens,)."""
    token = tl.program_id(0)
    r = tl.arange(0, ROWS)
    begin = tl.load(cu_seqlens_q + r, mask=r < rows, other=0)
    end = tl.load(cu_seqlens_q + r + 1, mask=r < rows, other=0)
    length = tl.load(seq_lens + r, mask=r < rows, other=0).to(tl.int64)
    row = tl.minimum(tl.sum(((end <= token) & (r < rows)).to(tl.int32), 0), rows - 1)
    counts = (end - begin).to(tl.int64)
    block = tl.sum(tl.where(r < row, counts * (length + counts), 0), 0)
    mine = r == row
    count, length, index = picked(mine, counts), picked(mine, length), token - picked(mine, begin)
    column = tl.arange(0, COLUMNS)
    flat = block + index * (length + count) + length + column
    inside = (column < count) & (column < size) & (flat < mask_size)
    seen = tl.load(custom_mask + flat, mask=inside, other=0)
    tl.store(mask + token.to(tl.int64) * mask_row + column, seen, mask=column < mask_row)
    word = tl.arange(0, COLUMNS // 32)
    packed = tl.sum(tl.reshape((seen != 0).to(tl.int32) << (column % 32), (COLUMNS // 32, 32)), 1)
    tl.store(bits + token.to(tl.int64) * words + word, packed, mask=word < words)
    ancestors = tl.sum(((seen != 0) & (column != index)).to(tl.int32), 0)
    tl.store(positions + token, length.to(tl.int32) + ancestors)


@triton.jit(do_not_specialize=("table_row", "table_width", "width"))
def table(
    out, req_to_token, req_pool_indices, start, slot_map, cu_seqlens_k, lens, tail_lens, page_size, divisor,
    table_row, table_width, width, COMMITTED: tl.constexpr, KEY_ROWS: tl.constexpr,
    PAGE: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [rows, width]: slots of each row's keys, or of every page_size-th one, translated, divided; 0 past the last.

    With STRIDE > 0 the row holds pages of PAGE tokens, STRIDE slots apart.
    Keys that come with the call (req_to_token None) lie one after another from cu_seqlens_k on. Grid: (rows, blocks).
    """
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = column * page_size
    total = tl.load(lens + row).to(tl.int32) if COMMITTED else 0
    if req_to_token is not None:
        request = tl.load(req_pool_indices + row).to(tl.int64)
        if KEY_ROWS:
            total = tl.where(request != 0, total, 0)
    if tail_lens is not None:
        total += tl.load(tail_lens + row).to(tl.int32)
    live = (column < width) & (token < total)
    if req_to_token is None:
        slot = tl.load(cu_seqlens_k + row) + token
    else:
        if start is not None:
            token += tl.load(start + row).to(tl.int32)
        place = token // PAGE if STRIDE > 0 else token
        place = tl.minimum(tl.maximum(place, 0), table_width - 1)
        slot = tl.load(req_to_token + request * table_row + place, mask=live, other=0).to(tl.int32)
        if STRIDE > 0:
            slot = tl.where(live, slot * STRIDE + token % PAGE, 0)
        if slot_map is not None:
            slot = tl.load(slot_map + slot, mask=live, other=0).to(tl.int32)
    tl.store(out + row.to(tl.int64) * width + column, tl.where(live, slot // divisor, 0), mask=column < width)


@triton.jit(do_not_specialize=("rows", "pieces", "chunk"))
def virtual_batches(
    out, cu_seqlens_q, q_len, kv_len, start, req_pool_indices, rows, pieces, chunk,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [4, pieces + 1]: rows cut at chunk borders. Grid: (blocks of pieces,)."""
    r = tl.arange(0, ROWS)
    begin = tl.load(cu_seqlens_q + r, mask=r < rows, other=0)
    queries = tl.load(cu_seqlens_q + r + 1, mask=r < rows, other=0) - begin
    if q_len is not None:
        queries = tl.load(q_len + r, mask=r < rows, other=0).to(tl.int32)
    length = tl.load(kv_len + r, mask=r < rows, other=0).to(tl.int32)
    first = length - queries
    cuts = tl.where(queries > 0, (chunk_start(length - 1, chunk) - chunk_start(first, chunk)) // chunk + 1, 0)
    ends = tl.cumsum(cuts, 0)
    before = tl.cumsum(tl.where(queries > 0, queries, 0), 0) - tl.where(queries > 0, queries, 0)
    piece = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.sum(((ends[None, :] <= piece[:, None]) & (r < rows)[None, :]).to(tl.int32), 1)
    mine = row[:, None] == r[None, :]
    exists = row < rows
    own_first = tl.sum(tl.where(mine, first[None, :], 0), 1)
    own_length = tl.sum(tl.where(mine, length[None, :], 0), 1)
    own_before = tl.sum(tl.where(mine, before[None, :], 0), 1)
    within = piece - tl.sum(tl.where(mine, (ends - cuts)[None, :], 0), 1)
    border = chunk_start(own_first, chunk) + within * chunk
    high = tl.minimum(own_length, border + chunk)
    total = tl.sum(tl.where(queries > 0, queries, 0), 0)
    border = tl.maximum(border, 0)
    starts = border
    if start is not None:
        starts += tl.load(start + row, mask=exists, other=0).to(tl.int32)
    request = tl.load(req_pool_indices + row, mask=exists, other=0).to(tl.int32)
    inside, columns = piece < pieces, pieces + 1
    tl.store(out + 1 + piece, tl.where(exists, own_before + high - own_first, total), mask=inside)
    tl.store(out + piece, 0 * piece, mask=piece == 0)
    last = piece <= pieces
    real = exists & inside
    tl.store(out + columns + piece, tl.where(real, tl.maximum(high - border, 0), 0), mask=last)
    tl.store(out + 2 * columns + piece, tl.where(real, starts, 0), mask=last)
    tl.store(out + 3 * columns + piece, tl.where(real, request, 0), mask=last)


@triton.jit(do_not_specialize=("n", "later", "prompt"))
def prompt_reach(
    out, prompts, rows, seq_lens, extend_seq_lens, prompt_lens, n, later, prompt, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [3, n]: kept prompt, window, whether a row comes after its prompt. Grid: (blocks of n,)."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = i < n
    known = tl.load(prompts + tl.load(rows + i, mask=exists, other=0).to(tl.int64), mask=exists, other=0)
    behind = exists
    if extend_seq_lens is not None:
        length = tl.load(seq_lens + i, mask=exists, other=0).to(tl.int32)
        if prompt_lens is not None:
            behind = length > tl.load(prompt_lens + i, mask=exists, other=0).to(tl.int32)
        else:
            new = tl.load(extend_seq_lens + i, mask=exists, other=0).to(tl.int32)
            behind = (new == 1) & (known > 0) & (length > known)
    tl.store(out + i, tl.where(behind, known, 0), mask=exists)
    tl.store(out + n + i, tl.where(behind, later, prompt), mask=exists)
    tl.store(out + 2 * n + i, behind.to(tl.int32), mask=exists)


@triton.jit(do_not_specialize=("n", "left"))
def near_keys(out, lens, offsets, active, page_size, n, left, BLOCK: tl.constexpr):
    """out [2, n]: first key that a row's queries may see, at a page border, and how many there are. Grid: (blocks,)."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = i < n
    total = tl.load(lens + i, mask=exists, other=0).to(tl.int32)
    if active is not None:
        total = tl.where(tl.load(active + i, mask=exists, other=0) != 0, total, 0)
    queries = tl.load(offsets + i + 1, mask=exists, other=0) - tl.load(offsets + i, mask=exists, other=0)
    begin = tl.minimum(tl.maximum(total - queries - left, 0) // page_size * page_size, total)
    tl.store(out + i, begin, mask=exists)
    tl.store(out + n + i, total - begin, mask=exists)


@triton.jit(do_not_specialize=("n",))
def remember(prompts, rows, seq_lens, later, n, BLOCK: tl.constexpr):
    """prompts[rows] = seq_lens, but in later rows and in row 0. Grid: (blocks of n,)."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + i, mask=i < n, other=0).to(tl.int64)
    told = (i < n) & (row != 0)
    if later is not None:
        told = told & (tl.load(later + i, mask=i < n, other=0) == 0)
    tl.store(prompts + row, tl.load(seq_lens + i, mask=i < n, other=0).to(tl.int32), mask=told)
