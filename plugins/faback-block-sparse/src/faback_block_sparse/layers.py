"""Which layers are block-sparse, and how layers that are alike choose for themselves."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import torch

from faback.core.layer import AttentionLayer, LayerKind
from faback.core.pools import KVPool


def is_sparse(layer: LayerKind, kv: KVPool) -> bool:
    """Whether a layer is block-sparse: causal, without window or chunk, its cache in slots that nobody translates."""
    plain = layer.causal and layer.cached and not layer.cross and layer.window is None and layer.chunk is None
    return plain and kv.slot_map(layer.kv_group) is None


def sparse_layers(layers: Iterable[AttentionLayer], kv: KVPool) -> tuple[AttentionLayer, ...]:
    """The block-sparse ones, by their number: the order of `extras["query_summary"]`."""
    return tuple(sorted((layer for layer in layers if is_sparse(layer, kv)), key=lambda layer: layer.layer_id))


def own_groups(layers: Iterable[AttentionLayer]) -> tuple[AttentionLayer, ...]:
    """The same layers, each of a KV group of its own, so that no two are of one kind and each chooses for itself.

    Their pool is a `GroupPerLayer` around one that was made for `layers`.
    """
    return tuple(attrs.evolve(layer, kv_group=f"layer {layer.layer_id}") for layer in layers)


@attrs.frozen(eq=False)
class GroupPerLayer:
    """A `KVPool` that has every group and gives all of them the slots of another pool's group.

    Attributes:
        pool: the other pool.
        group: its group.
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
        return self.pool.buffers(attrs.evolve(layer, kv_group=self.group))

    def dtype(self, kind: LayerKind) -> torch.dtype:
        """Storage dtype of a kind of layers."""
        return self.pool.dtype(attrs.evolve(kind, kv_group=self.group))

    def slot_map(self, group: str) -> torch.Tensor | None:
        """That of the other pool's group."""
        return self.pool.slot_map(self.group)
