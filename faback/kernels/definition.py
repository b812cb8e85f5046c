"""`faback.core.segment` in torch: where queries and keys stand, and what sees what.

The reference kernel and the torch fills share it; every other kernel is tested against it.
"""

from __future__ import annotations

import attrs
import torch

from faback.core.segment import KVView, Segment, Visibility

Tensor = torch.Tensor


def owners(offsets: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """The row of each token and the token's index in it.

    Args:
        offsets: [rows + 1] where rows begin.
        tokens: how many tokens; those past the last offset are given to the last row, beyond its end.

    Returns:
        row, index: int64 [tokens].
    """
    offsets = offsets.long()
    token = torch.arange(tokens, device=offsets.device)
    row = torch.searchsorted(offsets[1:].contiguous(), token, right=True).clamp(max=max(0, offsets.shape[0] - 2))
    return row, token - offsets[row]


def query_lens(segment: Segment) -> Tensor:
    """int64 [rows] live queries."""
    return segment.cu_seqlens_q.long().diff() if segment.q_len is None else segment.q_len.long()


def key_lens(segment: Segment) -> Tensor:
    """int64 [rows] committed keys that belong to this segment, none in rows of padding."""
    if not segment.committed:
        return torch.zeros_like(segment.kv_len, dtype=torch.int64)
    if segment.kv is None or segment.kv.dense:
        return segment.kv_len.long()
    return segment.kv_len.long() * (segment.kv.req_pool_indices != 0)


def query_positions(segment: Segment) -> Tensor:
    """int64 [tokens] absolute positions: explicit ones, or the last tokens of the row."""
    if segment.positions is not None:
        return segment.positions.long()
    if segment.rows == 0:
        return torch.zeros(segment.tokens, dtype=torch.int64, device=segment.kv_len.device)
    row, index = owners(segment.cu_seqlens_q, segment.tokens)
    end = segment.kv_len.long()
    if segment.tail is not None:
        end = end + segment.tail.lens.long()
    return (end - query_lens(segment))[row] + index


@attrs.frozen(eq=False)
class Seen:
    """Positions of some queries and keys, shaped to broadcast to [..., queries, keys].

    Attributes:
        query: int64 positions of queries.
        key: int64 positions of keys.
        is_tail: bool, keys of the tail; None if there is no tail.
        tree: bool, what the tail's mask says of tail keys; None if it has none.
        keep: int64 kept prefix of the query's row, or None.
        window: int64 left distance of the query's row, or None.
    """

    query: Tensor
    key: Tensor
    is_tail: Tensor | None = None
    tree: Tensor | None = None
    keep: Tensor | None = None
    window: Tensor | None = None

    def mask(self, rule: Visibility) -> Tensor:
        """bool [..., queries, keys]: what sees what, by the rule to the letter."""
        p, t = self.query, self.key
        seen = torch.ones_like(p == t)
        left, right = rule.window[0] if self.window is None else self.window, rule.window[1]
        if left is not None:
            seen &= t >= p - left
        if right is not None:
            seen &= t <= p + right
        if rule.chunk is not None:
            seen &= t // rule.chunk == p // rule.chunk
        if self.keep is not None:
            kept = t < self.keep
            seen |= kept if self.is_tail is None else kept & ~self.is_tail
        if rule.causal:
            ordered = t <= p
            seen &= ordered if self.tree is None or self.is_tail is None else ordered | self.is_tail
        if self.tree is not None:
            seen &= self.tree
        return seen


def tail_slots(segment: Segment) -> Tensor:
    """int64 [tokens, tail.size]: slot of each query's tail keys, before the slot map; undefined past the tail's end."""
    view, tail = segment.kv, segment.tail
    assert view is not None and tail is not None
    row, _ = owners(segment.cu_seqlens_q, segment.tokens)
    if tail.slots is not None:
        return tail.slots.long() if tail.per_query else tail.slots.long()[row]
    column = segment.kv_len.long()[row][:, None] + torch.arange(tail.size, device=row.device)
    return slots_at(view, row[:, None], column)


def slots_at(view: KVView, row: Tensor, token: Tensor) -> Tensor:
    """int64 slots of tokens of kernel rows, before the slot map; both broadcast, tokens past the table are clamped."""
    if view.start is not None:
        token = token + view.start.long()[row]
    table, request, last = view.req_to_token, view.req_pool_indices.long()[row], view.req_to_token.shape[1] - 1
    if view.page_stride is None:
        return table[request, token.clamp(0, last)].long()
    page = table[request, (token // view.page_size).clamp(0, last)].long()
    return page * view.page_stride + token % view.page_size


def translated(view: KVView, slots: Tensor) -> Tensor:
    """int64 slots of the layer's own pool."""
    return slots if view.slot_map is None else view.slot_map[slots].long()


def key_positions(segment: Segment, width: int) -> Tensor:
    """int64 [width]: where the committed keys of every row stand."""
    index, count = (0, 1) if segment.kv is None or segment.kv.shard is None else segment.kv.shard
    return torch.arange(width, device=segment.kv_len.device) * count + index


def per_query(segment: Segment) -> tuple[Tensor, Tensor, Tensor]:
    """What each query can choose from: all committed keys of its row, then all of its tail.

    Returns:
        visible: bool [tokens, max_kv_len + tail.size].
        row: int64 [tokens].
        live: bool [tokens], False for padding.
    """
    rule, tail, width = segment.visibility, segment.tail, segment.max_kv_len
    row, index = owners(segment.cu_seqlens_q, segment.tokens)
    live = index < query_lens(segment)[row]
    columns = torch.arange(width, device=row.device)
    exists = columns < key_lens(segment)[row][:, None]
    positions = key_positions(segment, width).expand(segment.tokens, width)
    is_tail = tree = None
    if tail is not None:
        within = torch.arange(tail.size, device=row.device)
        exists = torch.cat([exists, within < tail.lens.long()[row][:, None]], dim=1)
        own = segment.kv_len.long()[row][:, None] + within
        if tail.positions is not None:
            flat = segment.cu_seqlens_q.long()[row][:, None] + within
            own = tail.positions.long()[flat.clamp(max=tail.positions.shape[0] - 1)]
        positions = torch.cat([positions, own], dim=1)
        is_tail = torch.arange(width + tail.size, device=row.device).expand(segment.tokens, -1) >= width
        if tail.mask is not None:
            tree = torch.nn.functional.pad(tail.mask, (width, 0), value=True)
    seen = Seen(
        query=query_positions(segment)[:, None],
        key=positions,
        is_tail=is_tail,
        tree=tree,
        keep=None if rule.keep is None else rule.keep.long()[row][:, None],
        window=None if rule.row_window is None else rule.row_window.long()[row][:, None],
    )
    return seen.mask(rule) & exists & live[:, None], row, live
