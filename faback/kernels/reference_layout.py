"""How the reference kernel cuts a segment into padded batches.

The work is cut into items (some queries of one row, and the span of keys that they can see at all); items of similar
size run as one padded batch, and a key outside every span is never touched.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import torch

from faback.core.segment import Segment, Visibility
from faback.kernels.definition import Seen, key_lens, query_lens, query_positions, slots_at, translated

Tensor = torch.Tensor

QUERY_BLOCK = 128
"""Queries of one item: bounds the score matrix and skips the keys above a block's diagonal."""
BATCH_SCORES = 1 << 22
"""Scores (queries x keys x heads) of one padded batch."""
CACHED_MASK = 1 << 22
"""Mask elements of one batch that are kept between layers; larger masks are made again for each."""


@attrs.frozen
class Item:
    """Queries of a row and their span: a kept prefix, then committed keys, then the tail.

    Attributes:
        row: index of the row.
        token: index of the first query in q.
        queries: number of queries.
        kept: keys [0, kept) of the row that stay visible; they end before `low`.
        low: first committed key behind them.
        committed: number of committed keys from `low`.
        tail: number of tail keys.
    """

    row: int
    token: int
    queries: int
    kept: int
    low: int
    committed: int
    tail: int

    @property
    def keys(self) -> int:
        """Keys in the span."""
        return self.kept + self.committed + self.tail


@attrs.frozen(eq=False)
class Batch:
    """Items of one number of queries, their keys padded to one number. B items, Q queries, K keys.

    Attributes:
        tokens: int64 [B, Q] index in q.
        slots: int64 [B, K] index in k and v; padding repeats a key of the same row.
        mask: bool [B, Q, K] what sees what, None if everything sees everything or `remake` is there.
        remake: the mask's inputs and bool [B, 1, K] which keys exist, where the mask is too large to keep.
    """

    tokens: Tensor
    slots: Tensor
    mask: Tensor | None
    remake: tuple[Seen, Tensor] | None

    def visible(self, rule: Visibility) -> Tensor | None:
        """bool [B, Q, K], None if everything sees everything."""
        if self.remake is None:
            return self.mask
        seen, exists = self.remake
        return seen.mask(rule) & exists


class Layout:
    """A segment's lengths on the host, and the way from items to padded batches."""

    def __init__(self, segment: Segment) -> None:
        rule, tail = segment.visibility, segment.tail
        self._segment = segment
        self._rule = rule
        self._device = segment.kv_len.device
        self._kv_len: list[int] = key_lens(segment).tolist()
        self._offsets: list[int] = segment.cu_seqlens_q.tolist()
        self._q_len: list[int] = query_lens(segment).tolist()
        self._window: list[int | None] = [rule.window[0]] * segment.rows
        if rule.row_window is not None:
            self._window = rule.row_window.tolist()
        self._tail_len: list[int] = [0] * segment.rows if tail is None else tail.lens.tolist()
        self._keep: list[int] = [0] * segment.rows if rule.keep is None else rule.keep.tolist()
        self._shard = (0, 1) if segment.kv is None or segment.kv.shard is None else segment.kv.shard
        self._query_positions = query_positions(segment)
        self._positions: list[int] = self._query_positions.tolist()

    def batches(self, heads: int, deterministic: bool = False) -> Iterator[Batch]:
        """Items of similar size together: little padding, and no batch above `BATCH_SCORES`.

        Args:
            heads: query heads.
            deterministic: each query alone with its own span, so that its sums do not depend on its neighbours.
        """
        group: list[Item] = []
        for item in sorted(self.items(1 if deterministic else QUERY_BLOCK), key=lambda i: (i.queries, i.keys)):
            if group:
                similar = item.queries == group[0].queries and item.keys <= group[0].keys * 5 // 4 + 16
                if deterministic or not similar or (len(group) + 1) * item.queries * item.keys * heads > BATCH_SCORES:
                    yield self._batch(group)
                    group = []
            group.append(item)
        if group:
            yield self._batch(group)

    def items(self, most: int = QUERY_BLOCK) -> Iterator[Item]:
        """The work, in items of at most so many queries, without queries that see no key."""
        tail = self._segment.tail
        block = 1 if tail is not None and tail.per_query else most
        for row in range(self._segment.rows):
            start = self._offsets[row]
            end = start + self._q_len[row]
            for token in range(start, end, block):
                item = self._item(row, token, min(block, end - token))
                if item.keys:
                    yield item

    def _item(self, row: int, token: int, queries: int) -> Item:
        rule, length, tail = self._rule, self._kv_len[row], self._tail_len[row]
        positions = self._positions[token : token + queries]
        lowest, highest = min(positions), max(positions)
        low, high = 0, highest + 1 if rule.causal else None
        left, right = self._window[row], rule.window[1]
        if left is not None:
            low = max(low, lowest - left)
        if right is not None:
            high = highest + right + 1 if high is None else min(high, highest + right + 1)
        if rule.chunk is not None:
            low = max(low, lowest // rule.chunk * rule.chunk)
            border = (highest // rule.chunk + 1) * rule.chunk
            high = border if high is None else min(high, border)
        low = min(self._index(low), length)
        high = length if high is None else min(self._index(high), length)
        kept = min(self._index(self._keep[row]), length, self._index(highest + 1) if rule.causal else length)
        if kept >= low:  # one span
            low, high, kept = 0, max(high, kept), 0
        return Item(row, token, queries, kept, low, max(0, high - low), tail)

    def _index(self, position: int) -> int:
        """Number of the row's keys before a position."""
        index, count = self._shard
        return max(0, -(-(position - index) // count))

    def _batch(self, group: list[Item]) -> Batch:
        def column(name: str) -> Tensor:
            return torch.tensor([getattr(item, name) for item in group], device=self._device)[:, None]

        row, kept, committed = column("row"), column("kept"), column("committed")
        steps = torch.arange(group[0].queries, device=self._device)
        tokens = column("token") + steps
        index = torch.arange(max(item.keys for item in group), device=self._device)[None]
        exists = index < kept + committed + column("tail")
        index = torch.where(exists, index, 0)
        is_tail = index >= kept + committed
        within = torch.where(is_tail, index - kept - committed, 0)
        length = self._segment.kv_len.long()[row]
        logical = torch.where(index < kept, index, index - kept + column("low"))
        logical = torch.where(is_tail, length + within, logical)
        seen = Seen(
            query=self._query_positions[tokens][:, :, None],
            key=self._key_positions(row, logical, is_tail, within)[:, None, :],
            is_tail=is_tail[:, None, :],
            tree=self._tree(tokens, is_tail, within),
            keep=None if self._rule.keep is None else self._rule.keep.long()[row][:, :, None],
            window=None if self._rule.row_window is None else self._rule.row_window.long()[row][:, :, None],
        )
        slots = self._slots(row, tokens, logical, is_tail, within)
        if tokens.numel() * exists.shape[1] > CACHED_MASK:
            return Batch(tokens, slots, None, (seen, exists[:, None, :]))
        mask = seen.mask(self._rule) & exists[:, None, :]
        return Batch(tokens, slots, None if bool(mask.all()) else mask, None)

    def _key_positions(self, row: Tensor, logical: Tensor, is_tail: Tensor, within: Tensor) -> Tensor:
        """int64 [B, K]: a committed key stands at its index, a tail key where the tail says."""
        tail, (index, count) = self._segment.tail, self._shard
        committed = logical * count + index
        if tail is None or tail.positions is None:
            return torch.where(is_tail, logical, committed)
        flat = torch.where(is_tail, self._segment.cu_seqlens_q.long()[row] + within, 0)
        return torch.where(is_tail, tail.positions.long()[flat], committed)

    def _tree(self, tokens: Tensor, is_tail: Tensor, within: Tensor) -> Tensor | None:
        """bool [B, Q, K] from the tail's mask, True for committed keys."""
        tail = self._segment.tail
        if tail is None or tail.mask is None:
            return None
        columns = within[:, None, :].expand(-1, tokens.shape[1], -1)
        return tail.mask[tokens].gather(2, columns) | ~is_tail[:, None, :]

    def _slots(self, row: Tensor, tokens: Tensor, logical: Tensor, is_tail: Tensor, within: Tensor) -> Tensor:
        """int64 [B, K] index of each key in the tensors that the kernel is given."""
        view, tail = self._segment.kv, self._segment.tail
        if view is None:
            offsets = self._segment.cu_seqlens_q if self._segment.cu_seqlens_k is None else self._segment.cu_seqlens_k
            return offsets.long()[row] + logical
        slots = slots_at(view, row, logical)
        if tail is not None and tail.slots is not None:
            own = tail.slots.long()[tokens[:, :1] if tail.per_query else row, within]
            slots = torch.where(is_tail, own, slots)
        return translated(view, slots)
