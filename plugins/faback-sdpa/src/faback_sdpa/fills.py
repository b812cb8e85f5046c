"""Metadata of the kernel, padded: which token of q each query is, and what it sees. Free of host synchronisation."""

from __future__ import annotations

import torch

from faback.core.segment import Segment
from faback.kernels.definition import Seen, key_lens, key_positions, query_lens, query_positions

Tensor = torch.Tensor


def query_tokens(out: Tensor, *, segment: Segment) -> None:
    """out [rows, queries]: where in q each row's queries are, -1 behind its live ones."""
    index = torch.arange(out.shape[1], device=out.device)
    token = segment.cu_seqlens_q[:-1, None] + index
    out.copy_(torch.where(index < query_lens(segment)[:, None], token, -1))


def visible(out: Tensor, tokens: Tensor, *, segment: Segment) -> None:
    """out bool [rows, queries, keys]: what the segment's rule shows each query; a query of `tokens` -1 sees nothing."""
    rule, index = segment.visibility, torch.arange(out.shape[2], device=out.device)
    seen = Seen(
        query=query_positions(segment)[tokens.long().clamp(min=0)][:, :, None],
        key=key_positions(segment, out.shape[2]),
        keep=None if rule.keep is None else rule.keep.long()[:, None, None],
        window=None if rule.row_window is None else rule.row_window.long()[:, None, None],
    )
    exists = index < key_lens(segment)[:, None]
    out.copy_(seen.mask(rule) & exists[:, None, :] & (tokens >= 0)[:, :, None])
