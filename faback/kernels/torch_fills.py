"""Metadata fills in plain torch: the definition of each, and what runs on a CPU."""

from __future__ import annotations

import torch

from faback.core.segment import KVView, Segment
from faback.core.workspace import tree_parts
from faback.kernels.definition import (
    key_lens,
    owners,
    per_query,
    query_lens,
    query_positions,
    slots_at,
    tail_slots,
    translated,
)

Tensor = torch.Tensor


class TorchFills:
    """The fills of `faback.core.workspace.DeviceOps`, on any device."""

    def lens(self, out: Tensor, source: Tensor, *, add: int, active: Tensor | None) -> None:
        total = source + add
        out.copy_(total if active is None else total * (active != 0))

    def offsets(self, out: Tensor, lens: Tensor) -> None:
        out[:1] = 0
        torch.cumsum(lens, 0, dtype=torch.int32, out=out[1:])

    def step_lens(self, out: Tensor, source: Tensor | None, *, active: Tensor) -> None:
        steps = torch.arange(1, out.shape[0] + 1, device=out.device)[:, None]
        out.copy_((steps if source is None else source + steps) * (active != 0))

    def row_lens(self, out: Tensor, *, value: int, active: Tensor) -> None:
        out.copy_((active != 0) * value)

    def tree(self, out: Tensor, custom_mask: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, *, size: int) -> None:
        bits, mask, positions = tree_parts(out, size)
        offsets = cu_seqlens_q.long()
        counts = offsets.diff()
        width = seq_lens.long() + counts
        blocks = (counts * width).cumsum(0) - counts * width
        request, index = owners(offsets, out.shape[1])
        column = torch.arange(mask.shape[1], device=out.device)
        flat = (blocks[request] + index * width[request] + seq_lens.long()[request])[:, None] + column
        inside = (column < counts[request][:, None]) & (column < size) & (flat < custom_mask.shape[0])
        mask.copy_(custom_mask[torch.where(inside, flat, 0)] & inside)
        positions.copy_(seq_lens[request] + (mask & (column != index[:, None])).sum(1))
        self.pack(bits, mask)

    def pack(self, out: Tensor, mask: Tensor) -> None:
        whole = torch.zeros((mask.shape[0], out.shape[1] * 32), dtype=torch.int32, device=out.device)
        whole[:, : mask.shape[1]] = mask
        powers = torch.ones(32, dtype=torch.int32, device=out.device) << torch.arange(32, device=out.device)
        out.copy_((whole.view(*out.shape, 32) * powers).sum(2, dtype=torch.int32))

    def branch_positions(self, out: Tensor, source: Tensor, *, each: int) -> None:
        steps = torch.arange(out.shape[0], device=out.device)
        out.copy_(source.repeat_interleave(each) + steps[:, None])

    def sum(self, out: Tensor, source: Tensor, lens: Tensor) -> None:
        out.copy_((source + lens) * (lens != 0))

    def positions(self, out: Tensor, segment: Segment) -> None:
        out.copy_(query_positions(segment))

    def page_table(self, out: Tensor, view: KVView, lens: Tensor) -> None:
        first = torch.arange(out.shape[1], device=out.device) * view.page_size
        row = torch.arange(out.shape[0], device=out.device)[:, None]
        live = first < lens[:, None]
        slots = torch.where(live, slots_at(view, row, first), 0)
        out.copy_(torch.where(live, translated(view, slots) // view.slots_per_page, 0))

    def slot_table(self, out: Tensor, segment: Segment) -> None:
        if segment.rows == 0:
            out.zero_()
            return
        view, width = segment.kv, out.shape[1]
        row = torch.arange(segment.rows, device=out.device)[:, None]
        token = torch.arange(width, device=out.device)
        total = key_lens(segment)
        if segment.tail is not None and segment.tail.slots is None:
            total = total + segment.tail.lens
        live = token < total[:, None]
        if view is None:
            offsets = segment.cu_seqlens_q if segment.cu_seqlens_k is None else segment.cu_seqlens_k
            slots = offsets.long()[:-1, None] + token
        else:
            slots = translated(view, torch.where(live, slots_at(view, row, token), 0))
        out.copy_(torch.where(live, slots, 0))

    def near_keys(
        self,
        out: Tensor,
        lens: Tensor,
        offsets: Tensor,
        active: Tensor | None,
        *,
        left: int,
        page_size: int,
    ) -> None:
        total = lens if active is None else lens * (active != 0)
        first = (total - offsets.diff() - left).clamp(min=0)
        begin = torch.minimum(first // page_size * page_size, total)
        out[0] = begin
        out[1] = total - begin

    def clear(self, out: Tensor, lse: Tensor | None, offsets: Tensor) -> None:
        nobodys = torch.arange(out.shape[0], device=out.device) >= offsets[-1]
        out.masked_fill_(nobodys[:, None, None], 0)
        if lse is not None:
            lse.masked_fill_(nobodys[:, None], -torch.inf)

    def prompt_reach(
        self,
        out: Tensor,
        prompts: Tensor,
        rows: Tensor,
        seq_lens: Tensor,
        extend_seq_lens: Tensor | None,
        prompt_lens: Tensor | None,
        *,
        later: int,
        prompt: int,
    ) -> None:
        known = prompts[rows.long()]
        if extend_seq_lens is None:
            behind = torch.ones_like(rows, dtype=torch.bool)
        elif prompt_lens is not None:
            behind = seq_lens > prompt_lens
        else:
            behind = (extend_seq_lens == 1) & (known > 0) & (seq_lens > known)
        out[0] = known * behind
        out[1] = torch.where(behind, later, prompt)
        out[2] = behind

    def remember(self, prompts: Tensor, rows: Tensor, seq_lens: Tensor, later: Tensor | None) -> None:
        index = rows.long()
        new = seq_lens.to(prompts.dtype) * (rows != 0)
        prompts[index] = new if later is None else torch.where(later != 0, prompts[index], new)

    def translate(self, out: Tensor, slots: Tensor, slot_map: Tensor) -> None:
        out.copy_(slot_map[slots.long().clamp(0, slot_map.shape[0] - 1)])

    def virtual_batches(self, out: Tensor, segment: Segment) -> None:
        chunk, view = segment.visibility.chunk, segment.kv
        assert chunk is not None and view is not None
        if segment.rows == 0:
            out.zero_()
            return
        counts, length = query_lens(segment), segment.kv_len.long()
        first = length - counts
        # Chunks are counted below 0 too: with more queries than keys the first ones stand there and see nothing.
        pieces = torch.where(counts > 0, (length - 1) // chunk - first // chunk + 1, 0)
        ends = pieces.cumsum(0)
        piece = torch.arange(out.shape[1] - 1, device=out.device)
        row = torch.searchsorted(ends, piece, right=True)
        exists = row < segment.rows
        row = row.clamp(max=max(0, segment.rows - 1))
        border = (first[row] // chunk + piece - (ends - pieces)[row]) * chunk
        low, high = torch.maximum(first[row], border), torch.minimum(length[row], border + chunk)
        border = border.clamp(min=0)
        starts = border if view.start is None else border + view.start.long()[row]
        out[0, 0] = 0
        out[0, 1:] = torch.where(exists, high - low, 0).cumsum(0)
        out[1, :-1] = torch.where(exists, high - border, 0).clamp(min=0)
        out[2, :-1] = torch.where(exists, starts, 0)
        out[3, :-1] = torch.where(exists, view.req_pool_indices.long()[row], 0)
        out[1:, -1] = 0

    def query_rows(self, out: Tensor, segment: Segment) -> None:
        rule, view = segment.visibility, segment.kv
        assert view is not None
        if segment.rows == 0:
            out.zero_()
            return
        row, index = owners(segment.cu_seqlens_q, segment.tokens)
        live = index < query_lens(segment)[row]
        position = query_positions(segment)
        low, high = torch.zeros_like(position), key_lens(segment)[row]
        left = rule.window[0] if rule.row_window is None else rule.row_window.long()[row]
        if left is not None:
            low = torch.maximum(low, position - left)
        if rule.chunk is not None:
            low = torch.maximum(low, position // rule.chunk * rule.chunk)
            high = torch.minimum(high, (position // rule.chunk + 1) * rule.chunk)
        if rule.causal:
            high = torch.minimum(high, position + 1)
        if rule.window[1] is not None:
            high = torch.minimum(high, position + rule.window[1] + 1)
        lens = torch.where(live, high - low, 0).clamp(min=0)
        starts = low if view.start is None else low + view.start.long()[row]
        out[0] = lens
        out[1] = torch.where(lens > 0, starts, 0)
        out[2] = torch.where(live, view.req_pool_indices.long()[row], 0)

    def compact(self, out: Tensor, segment: Segment) -> None:
        view = segment.kv
        assert view is not None
        if segment.rows == 0 or segment.tokens == 0:
            out.zero_()
            return
        visible, row, _ = per_query(segment)
        token = torch.arange(segment.max_kv_len, device=out.device)
        slots = slots_at(view, row[:, None], token)
        if segment.tail is not None:
            slots = torch.cat([slots, tail_slots(segment)], dim=1)
        slots = translated(view, torch.where(visible, slots, 0))
        order = torch.where(visible, visible.cumsum(1), 0)
        table = torch.zeros((segment.tokens, 1 + visible.shape[1]), dtype=torch.int64, device=out.device)
        table.scatter_(1, order, slots)
        out.zero_()
        out[: segment.tokens] = visible.sum(1)
        out[segment.tokens :].view(segment.tokens, -1)[:, : visible.shape[1]] = table[:, 1:]
