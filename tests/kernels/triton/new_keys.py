"""Cases of decoding rows before their newest keys are written."""

from __future__ import annotations

import math

import attrs
import torch

from faback.core.segment import KVWrite, Segment
from faback.testing.layers import as_bits
from kernels.triton.cases import Case

Tensor = torch.Tensor


def newest(segment: Segment) -> Tensor:
    """int64 [rows] slots of the rows' last keys, 0 where there is none."""
    view, found = segment.kv, []
    assert view is not None
    starts = [0] * segment.rows if view.start is None else view.start.tolist()
    for row, length, start in zip(view.req_pool_indices.tolist(), segment.kv_len.tolist(), starts, strict=True):
        at, page = start + length - 1, view.page_size
        if row == 0 or length == 0:
            found.append(0)
        elif view.page_stride is None:
            found.append(int(view.req_to_token[row, at]))
        else:
            found.append(int(view.req_to_token[row, at // page]) * view.page_stride + at % page)
    return torch.tensor(found, device=segment.kv_len.device)


def forgotten(case: Case) -> tuple[Case, tuple[Tensor, Tensor | None]]:
    """The case with NaN in place of its newest keys and values, and these as a layer brings them."""
    view = case.segment.kv
    assert view is not None
    slots = newest(case.segment)
    inside = slots if view.slot_map is None else torch.where(slots > 0, view.slot_map.long()[slots], 0)
    k, v = case.k.clone(), None if case.layer.latent else case.v.clone()
    new = [None if c is None else _taken(c, inside, s, case) for c, s in ((k, case.k_scale), (v, case.v_scale))]
    segment = attrs.evolve(case.segment, max_seqlen_q=1, write=KVWrite(slots, view.slot_map))
    before = attrs.evolve(case, segment=segment, k=k, v=k[..., : case.layer.v_head_dim] if v is None else v)
    assert new[0] is not None
    return before, (new[0], new[1])


def _taken(cache: Tensor, slots: Tensor, scale: float | Tensor | None, case: Case) -> Tensor:
    """The contents of some slots, within a larger tensor; NaN takes their place."""
    values = cache[slots].float() * (scale.view(-1, 1) if isinstance(scale, Tensor) else scale or 1.0)
    around = torch.full((*values.shape[:2], values.shape[2] + 3), math.nan, dtype=case.q.dtype, device=cache.device)
    around[..., 1:-2] = values.to(case.q.dtype)
    as_bits(cache)[slots[slots > 0]] = as_bits(torch.full((1,), math.nan).to(cache.dtype)).to(cache.device)
    return around[..., 1:-2]
