"""Summaries: of every page, the least and the greatest value that its keys have in each dimension.

They follow the pages of the pool. A summary is never merged with an older one: where a page has come to have new
tokens, it is made again from all tokens that the request has in it, so what a page held for another request is gone.
"""

from __future__ import annotations

import attrs
import torch

from faback.core.layer import AttentionLayer, LayerKind
from faback.core.pools import Pools
from faback.core.segment import Segment
from faback.kernels.definition import slots_at

Tensor = torch.Tensor
PAGES_AT_ONCE = 64
"""Pages of each row whose keys are gathered together."""


@attrs.frozen(eq=False)
class KindSummaries:
    """The pages' summaries in all layers of one kind.

    Attributes:
        kind: the kind.
        layers: its layers.
        places: index of each layer among all block-sparse layers.
        bounds: [layers, pages, 2, num_kv_heads, head_dim], least and greatest, as stored: not multiplied by `k_scale`.
    """

    kind: LayerKind
    layers: tuple[AttentionLayer, ...]
    places: tuple[int, ...]
    bounds: Tensor

    @classmethod
    def make(
        cls, kind: LayerKind, layers: tuple[AttentionLayer, ...], places: tuple[int, ...], pools: Pools
    ) -> KindSummaries:
        """Empty ones, in the pool's dtype, which holds them exactly (bfloat16 for fp8)."""
        stored = pools.kv.dtype(kind)
        shape = (len(layers), pools.kv.num_slots // pools.kv.page_size, 2, kind.num_kv_heads, kind.head_dim)
        dtype = torch.bfloat16 if stored.itemsize == 1 else stored
        return cls(kind, layers, places, torch.zeros(shape, dtype=dtype, device=pools.device))


def absorb(bounds: Tensor, keys: Tensor, known: Tensor, *, segment: Segment, page: int, pages: int) -> None:
    """Makes the summaries of pages known[0] and following, as far as tokens before known[1] are in them.

    Args:
        bounds: [pages, 2, heads, dim] of one layer.
        keys: [slots, heads, dim], the layer's.
        known: int32 [2, rows].
        segment: its view leads from tokens to slots.
        page: tokens per page.
        pages: most pages per row.
    """
    view = segment.kv
    assert view is not None
    row = torch.arange(segment.rows, device=bounds.device)[:, None, None]
    within = torch.arange(page, device=bounds.device)
    for offset in range(0, pages, PAGES_AT_ONCE):
        some = torch.arange(offset, min(pages, offset + PAGES_AT_ONCE), device=bounds.device)
        token = (known[0].long()[:, None] + some)[..., None] * page + within
        live = token < known[1].long()[:, None, None]
        slots = torch.where(live, slots_at(view, row, token), 0)
        found, there = _gathered(keys, slots), live[..., None, None]
        least = torch.where(there, found, torch.inf).amin(2)
        greatest = torch.where(there, found, -torch.inf).amax(2)
        bounds[slots[..., 0] // page] = torch.stack([least, greatest], dim=2).to(bounds.dtype)  # page 0 is padding's


def scores(
    out: Tensor,
    query: Tensor,
    ends: Tensor,
    *,
    summaries: KindSummaries,
    segment: Segment,
    block: int,
    page: int,
) -> None:
    """out [rows, blocks]: how much of the attention each block can have, over all heads of all layers of the kind.

    Args:
        query: [rows, heads, dim], or [block-sparse layers, rows, heads, dim].
        ends: [rows] tokens that have summaries.
        summaries: of the kind.
        segment: its view leads from tokens to pages.
        block, page: tokens of each.
    """
    view = segment.kv
    assert view is not None
    if out.numel() == 0:
        return
    row = torch.arange(segment.rows, device=out.device)[:, None]
    first = torch.arange(out.shape[1] * (block // page), device=out.device) * page
    live = first < ends[:, None]
    pages = torch.where(live, slots_at(view, row, first), 0) // page
    found = []
    for index, (layer, place) in enumerate(zip(summaries.layers, summaries.places, strict=True)):
        q = _by_head(query if query.ndim == 3 else query[place], layer)
        least, greatest = summaries.bounds[index][pages].float().unbind(2)
        high = torch.einsum("bhgd,bphd->bhgp", q.clamp(min=0), greatest)
        high = high + torch.einsum("bhgd,bphd->bhgp", q.clamp(max=0), least)
        high = torch.where(live[:, None, None], high, -torch.inf)
        high = high.reshape(*high.shape[:3], out.shape[1], -1).amax(-1)
        total = high.logsumexp(-1, keepdim=True)
        share = high - torch.where(total == -torch.inf, 0.0, total)
        found.append(share.flatten(1, 2).logsumexp(1))
    out.copy_(torch.stack(found).logsumexp(0))


def _by_head(query: Tensor, layer: AttentionLayer) -> Tensor:
    """[rows, heads, dim] -> float32 [rows, num_kv_heads, queries of each, dim], scaled as scores are."""
    heads, factor = layer.num_kv_heads, layer.k_scale
    grouped = query.float() if query.shape[1] >= heads else query.float().expand(-1, heads, -1)
    grouped = grouped.reshape(query.shape[0], heads, -1, layer.head_dim) * layer.scale
    if factor is None:
        return grouped
    return grouped * (factor.view(-1, 1, 1) if isinstance(factor, Tensor) else factor)


def _gathered(keys: Tensor, slots: Tensor) -> Tensor:
    """float32 keys [*slots, heads, dim]; torch indexes fp8 nowhere, its bytes will do."""
    if keys.element_size() == 1:
        return keys.view(torch.uint8)[slots].view(keys.dtype).float()
    return keys[slots].float()
