"""Which layers are block-sparse, and how layers that are alike choose for themselves."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import torch

from faback.core.layer import AttentionLayer, LayerKind
from faback.core.pools import KVPool

OWN = "own group of layer"
"""What the names of groups of one layer begin with."""


def is_sparse(layer: LayerKind, kv: KVPool) -> bool:
    """Whether a layer is block-sparse: causal, without window or chunk, its cache in slots that nobody translates."""
    plain = layer.causal and layer.cached and not layer.cross and layer.window is None and layer.chunk is None
    return plain and kv.slot_map(layer.kv_group) is None


def sparse_layers(layers: Iterable[AttentionLayer], kv: KVPool) -> tuple[AttentionLayer, ...]:
    """The block-sparse ones, by their number: the order of `extras["query_summary"]`."""
    return tuple(sorted((layer for layer in layers if is_sparse(layer, kv)), key=lambda layer: layer.layer_id))


def own_groups(layers: Iterable[AttentionLayer], group: str = "full") -> tuple[AttentionLayer, ...]:
    """The same layers, those of a KV group each in one of its own, so that no two are of one kind.

    Their pool is a `GroupPerLayer` around one that was made for `layers`.
    """
    return tuple(
        attrs.evolve(layer, kv_group=f"{OWN} {layer.layer_id}") if layer.kv_group == group else layer
        for layer in layers
    )


@attrs.frozen(eq=False)
class GroupPerLayer:
    """Another pool, in which the layers of one KV group have groups of their own, all with that group's slots.

    Attributes:
        pool: the other pool.
        group: the group that is divided, as for `own_groups`.
    """

    pool: KVPool
    group: str = "full"

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.pool.page_size

    @property
    def num_slots(self) -> int:
        """Slots, the padding slots included."""
        return self.pool.num_slots

    def buffers(self, layer: AttentionLayer) -> tuple[torch.Tensor, torch.Tensor]:
        """Storage of a layer, in place: k [slots, num_kv_heads, head_dim] and v [slots, num_kv_heads, v_head_dim]."""
        return self.pool.buffers(attrs.evolve(layer, kv_group=self._shared(layer.kv_group)))

    def dtype(self, kind: LayerKind) -> torch.dtype:
        """Storage dtype of a kind of layers."""
        return self.pool.dtype(attrs.evolve(kind, kv_group=self._shared(kind.kv_group)))

    def slot_map(self, group: str) -> torch.Tensor | None:
        """Translation from full-group slots to those of a group, None for identity."""
        return self.pool.slot_map(self._shared(group))

    def _shared(self, group: str) -> str:
        """The other pool's name of a group."""
        return self.group if group.startswith(OWN) else group
