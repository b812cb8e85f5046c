"""Metadata fills in torch. None waits for the device, and all shapes are known on the host."""

from __future__ import annotations

import torch

from faback.core.segment import Segment
from faback.kernels.definition import query_lens, slots_at
from faback_block_sparse.segment import Choice

Tensor = torch.Tensor
NOBODY = 2**30
"""A block number beyond all others."""


def known(out: Tensor, done: Tensor, *, segment: Segment, page: int, pages: int) -> None:
    """out [2, rows]: the page at which a plan begins to take in, and the tokens that have summaries afterwards.

    Args:
        done: [request rows] tokens that have summaries.
        segment: what is planned; its queries' keys are not in the cache yet, those before them are.
        page: tokens per page.
        pages: most pages that are taken in.
    """
    assert segment.kv is not None
    rows = segment.kv.req_pool_indices.long()
    cached = (segment.kv_len.long() - query_lens(segment)).clamp(min=0) * (rows != 0)
    first = torch.minimum(done[rows].long(), cached) // page
    out[0] = first
    out[1] = torch.minimum(cached, (first + pages) * page)


def remember(done: Tensor, rows: Tensor, reached: Tensor) -> None:
    """done[rows[b]] = reached[b], which is 0 in rows of padding."""
    done[rows.long()] = reached


def pieces(out: Tensor, *, segment: Segment, block: int) -> None:
    """out [4, n + 1]: `Choice.pieces` of a segment."""
    out.zero_()
    if segment.rows == 0 or out.shape[1] == 1:
        return
    assert segment.kv is not None
    counts, length = query_lens(segment), segment.kv_len.long()
    first = length - counts
    each = torch.where(counts > 0, (length - 1) // block - first // block + 1, 0)
    ends = each.cumsum(0)
    piece = torch.arange(out.shape[1] - 1, device=out.device)
    row = torch.searchsorted(ends, piece, right=True)
    exists = row < segment.rows
    row = row.clamp(max=segment.rows - 1)
    own = first[row] // block + piece - (ends - each)[row]
    low, high = torch.maximum(first[row], own * block), torch.minimum(length[row], (own + 1) * block)
    live = exists & (segment.kv.req_pool_indices[row] != 0) & (high > 0)
    out[0, 1:] = torch.where(exists, high - low, 0).cumsum(0)
    out[1, :-1] = torch.where(exists, row, 0)
    out[2, :-1] = torch.where(live, own, 0)
    out[3, :-1] = torch.where(live, high, 0)


def chosen(out: Tensor, scores: Tensor, parts: Tensor, ends: Tensor, *, block: int, local: int, recent: bool) -> None:
    """out [n, k]: the best blocks of each piece among those that it does not see anyway; ties go to the earlier one.

    Args:
        scores: [rows, blocks].
        parts: `Choice.pieces` [4, n + 1].
        ends: [rows] tokens that have summaries.
        block: tokens per block.
        local: blocks that are seen up to a piece's own.
        recent: blocks without full summaries are seen anyway.
    """
    row, own = parts[1, :-1].long(), parts[2, :-1].long()
    summarised = ends.long()[row] // block if recent else -(-ends.long()[row] // block)
    number = torch.arange(scores.shape[1], device=out.device)
    choice = (number >= 1) & (number < torch.minimum(own - local + 1, summarised)[:, None])
    ranked = torch.where(choice, scores[row], -torch.inf).sort(dim=1, descending=True, stable=True).indices
    best = ranked[:, : out.shape[1]]
    numbers = torch.where(choice.gather(1, best), best, NOBODY).sort(dim=1).values
    out.copy_(torch.where(numbers == NOBODY, -1, numbers))


def block_table(out: Tensor, *, segment: Segment, choice: Choice) -> None:
    """out [n * (1 + width)]: how many keys each piece sees, then [n, width] their slots in the order of the text."""
    view, options, parts = segment.kv, choice.options, choice.pieces
    assert view is not None
    if choice.count == 0:
        return
    size, listed = options.block_size, choice.chosen.long()
    row, own, end = parts[1, :-1].long(), parts[2, :-1].long(), parts[3, :-1].long()
    start = own - options.local_blocks + 1
    if options.all_recent:
        start = torch.minimum(start, choice.known[1].long()[row] // size)
    start = start.clamp(min=0)
    head = (start > 0) + (listed >= 0).sum(1)  # blocks before the run: the sink, then the chosen ones
    lens = head * size + end - start * size
    column = torch.arange(choice.width, device=out.device)
    ordinal = (column // size).expand(choice.count, -1)
    before = torch.cat([torch.zeros_like(own)[:, None], listed], dim=1)
    picked = before.gather(1, ordinal.clamp(max=before.shape[1] - 1))
    number = torch.where(ordinal < head[:, None], picked, start[:, None] + ordinal - head[:, None])
    live = column < lens[:, None]
    token = torch.where(live, number * size + column % size, 0)
    slots = torch.where(live, slots_at(view, row[:, None], token), 0)
    out[: choice.count] = lens
    out[choice.count :].view(choice.count, -1).copy_(slots)
