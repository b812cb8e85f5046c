"""What the modes of one backend remember together: summaries of pages, and how far each request has them."""

from __future__ import annotations

import torch

from faback.core.contracts import PlanContext
from faback.core.errors import ConfigError
from faback.core.layer import LayerKind
from faback.core.segment import Segment
from faback.core.workspace import Workspace
from faback_block_sparse.fills import known, remember
from faback_block_sparse.layers import sparse_layers
from faback_block_sparse.options import Options
from faback_block_sparse.summaries import KindSummaries, absorb

Tensor = torch.Tensor


class Memory:
    """Summaries of all block-sparse layers, brought up to date by every plan.

    Args:
        options: the sizes.

    Attributes:
        kinds: the summaries of each kind of layers.
        done: int32 [request rows] tokens of each request that have summaries; None until it is bound.
        count: number of block-sparse layers.
        heads: heads that a query summary may have.
        dim: head dim of the layers.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.kinds: dict[LayerKind, KindSummaries] = {}
        self.done: Tensor | None = None
        self.count, self.dim = 0, 0
        self.heads: tuple[int, ...] = (1,)

    def bind(self, ctx: PlanContext) -> None:
        """Allocates, once.

        Raises:
            ConfigError: blocks that are not whole pages, or layers that cannot share a query summary.
        """
        if self.done is not None:
            return
        self.options.check_page(ctx.page_size)
        layers = sparse_layers(ctx.layers, ctx.pools.kv)
        shapes = sorted({(layer.num_q_heads, layer.num_kv_heads, layer.head_dim) for layer in layers})
        if len(shapes) != 1:
            wanted = "causal layers without window or chunk, all of the same heads and head dim"
            got = f"heads, KV heads and dims {shapes}" if shapes else "none"
            raise ConfigError("block-sparse layers", wanted=wanted, got=got)
        for kind in dict.fromkeys(layer.kind for layer in layers):
            mine = [(layer, place) for place, layer in enumerate(layers) if layer.kind == kind]
            alike, places = zip(*mine, strict=True)
            self.kinds[kind] = KindSummaries.make(kind, alike, places, ctx.pools)
        q_heads, kv_heads, self.dim = shapes[0]
        self.count, self.heads = len(layers), (1, kv_heads, q_heads)
        self.done = torch.zeros(ctx.pools.req_to_token.shape[0], dtype=torch.int32, device=ctx.device)

    def release(self, req_pool_indices: Tensor) -> None:
        """Forgets requests."""
        assert self.done is not None
        self.done[req_pool_indices.long()] = 0

    def catch_up(self, segment: Segment, ws: Workspace, ctx: PlanContext, limit: int | None) -> Tensor:
        """Takes in the tokens that were cached since the requests' last plans; returns `Choice.known`.

        Args:
            segment: what is planned.
            ws, ctx: as for a mode.
            limit: the most tokens of each request, rounded up to whole pages.
        """
        view, page = segment.kv, ctx.page_size
        assert view is not None and self.done is not None
        pages = -(-segment.max_kv_len // page) if limit is None else (limit + page - 2) // page + 1
        reached = ws.fill("known", (2, segment.rows), known, self.done, segment=segment, page=page, pages=pages)
        sizes = {"segment": segment, "page": page, "pages": pages}
        for summaries in self.kinds.values():
            for bounds, layer in zip(summaries.bounds, summaries.layers, strict=True):
                ws.update(absorb, bounds, ctx.pools.kv.buffers(layer)[0], reached, **sizes)
        ws.update(remember, self.done, view.req_pool_indices, reached[1])
        return reached
