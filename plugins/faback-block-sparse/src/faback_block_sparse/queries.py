"""For engines: the last query of each request in each layer, which is what its next query will probably look like."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from faback.core.batch import ForwardBatch
from faback.core.layer import AttentionLayer
from faback.core.pools import Pools
from faback_block_sparse.layers import sparse_layers

Tensor = torch.Tensor


class QueryMemory:
    """Queries by layer and request row. Nothing waits for the device, and memory stays where it is.

    Args:
        layers: those of the backend; only block-sparse ones are kept.
        pools: the engine's.

    Attributes:
        last: float32 [block-sparse layers, request rows, num_q_heads, head_dim].
    """

    def __init__(self, layers: Iterable[AttentionLayer], pools: Pools) -> None:
        kept = sparse_layers(layers, pools.kv)
        self._places = {layer.layer_id: place for place, layer in enumerate(kept)}
        heads, dim = (kept[0].num_q_heads, kept[0].head_dim) if kept else (1, 1)
        self.last = torch.zeros(len(kept), pools.req_to_token.shape[0], heads, dim, device=pools.device)

    def note(self, q: Tensor, layer: AttentionLayer, batch: ForwardBatch) -> None:
        """Keeps what a layer asked in a pass.

        Args:
            q: [tokens, num_q_heads, head_dim], as given to `forward`.
            layer: whose; one that is not block-sparse is not kept.
            batch: of decode or extend, rows one after another.
        """
        place = self._places.get(layer.layer_id)
        if place is None or q.shape[0] == 0:
            return
        rows, new = batch.req_pool_indices.long(), batch.extend_seq_lens
        ends = torch.arange(1, batch.bs + 1, device=q.device) if new is None else new.cumsum(0)
        found, mine = q[(ends - 1).clamp(min=0)].float(), self.last[place]
        mine[rows] = found if new is None else torch.where((new > 0)[:, None, None], found, mine[rows])

    def read(self, req_pool_indices: Tensor) -> Tensor:
        """float32 [block-sparse layers, bs, num_q_heads, head_dim], for `extras["query_summary"]`."""
        return self.last[:, req_pool_indices.long()]
