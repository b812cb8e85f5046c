"""Which program does what: the split plan, computed on the device from device lengths.

Every program of the attention kernel works it out for itself from the row lengths alone, so a plan costs no launch and
no host read, and one grid serves whatever lengths a replay brings.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def picked(mine, values):
    """The one value that is mine."""
    return tl.sum(tl.where(mine, values, 0), 0)


@triton.jit
def find_work(
    item,
    rows,
    tokens,
    cu_seqlens_q,
    kv_len,
    req_pool_indices,
    reach,
    target,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    KEY_ROWS: tl.constexpr,
    FIXED_SPLIT: tl.constexpr,
):
    """The row, block of queries and split of one work item.

    A row has ceil(queries * GROUP / BLOCK_M) blocks, each cut into as many splits as bring all rows' splits near
    `target`, or into splits of FIXED_SPLIT tiles where a result may depend on its request alone. Tokens behind the last
    row form a row of their own without keys, so that their output is written, too.

    Args:
        item: index of the item; its group of splits is consecutive.
        rows, tokens: rows of the segment, tokens of q.
        reach: a row sees no more than its queries plus this many keys (windows), or a huge number.
        target: work items that fill the device.
        ROWS: power of two above `rows`.
        KEY_ROWS: request row 0 has no keys.

    Returns:
        row, block, split, splits, number among the items of blocks that are split, and the row's own begin, end (of
        its queries), committed keys and request row; `row` is above `rows` where there is nothing left to do.
    """
    r = tl.arange(0, ROWS)
    begin = tl.load(cu_seqlens_q + r, mask=r <= rows, other=0)
    end = tl.load(cu_seqlens_q + r + 1, mask=r < rows, other=0)
    end = tl.where(r == rows, tokens, end)
    queries = tl.maximum(end - begin, 0)
    committed = tl.load(kv_len + r, mask=r < rows, other=0).to(tl.int32)
    request = tl.zeros_like(committed)
    if req_pool_indices is not None:
        request = tl.load(req_pool_indices + r, mask=r < rows, other=0).to(tl.int32)
    keys = committed
    if KEY_ROWS:
        keys = tl.where(request != 0, keys, 0)
    keys = tl.minimum(keys, queries + reach)
    blocks = tl.cdiv(queries * GROUP, BLOCK_M)
    tiles = tl.maximum(tl.cdiv(keys, BLOCK_N), 1)
    if FIXED_SPLIT > 0:
        # One more where a window may begin within a split, which always begin at multiples of their length.
        splits = tl.minimum(tl.cdiv(tiles, FIXED_SPLIT) + 1, tl.maximum(tl.cdiv(committed, FIXED_SPLIT * BLOCK_N), 1))
    else:
        # A million queries against a million keys are more tiles than 32 bits count; so many need no splits.
        work = tl.minimum(tl.sum(blocks.to(tl.int64) * tiles, 0), 1 << 30).to(tl.int32)
        per_split = tl.maximum(tl.cdiv(work, target), 2)
        splits = tl.maximum((tiles + per_split // 2) // per_split, 1)
    items = blocks * splits
    ends = tl.cumsum(items, 0)
    row = tl.sum((ends <= item).to(tl.int32), 0)
    mine = r == row
    place = item - tl.sum(tl.where((r < row) & (splits == 1), items, 0), 0)
    splits = tl.maximum(picked(mine, splits), 1)
    within = item - picked(mine, ends - items)
    # The last queries see the most keys: they go first, so that the short work comes at the end.
    block = picked(mine, blocks) - 1 - within // splits
    own = picked(mine, begin), picked(mine, end), picked(mine, committed), picked(mine, request)
    return row, block, within % splits, splits, place, own[0], own[1], own[2], own[3]
