"""What faback asks of an engine's pools. Ours (`faback.pools`) are one implementation."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import attrs
import torch

from faback.core.errors import ConfigError
from faback.core.layer import AttentionLayer, LayerKind
from faback.core.segment import INDEX_DTYPES

MAX_SLOTS = 2**31 - 1
"""Slots are looked up as 32-bit numbers; what lies in them is addressed in 64 bits."""


@runtime_checkable
class KVPool(Protocol):
    """Storage of keys and values, addressed by slot: one slot holds one token of one layer group.

    Attributes:
        page_size: tokens per page. The slots of page p are p * page_size ... (p + 1) * page_size - 1.
        num_slots: slots of the full group, the padding slots included.
    """

    @property
    def page_size(self) -> int: ...

    @property
    def num_slots(self) -> int: ...

    def buffers(self, layer: AttentionLayer) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value storage of a layer, in place.

        Returns:
            k: [slots, num_kv_heads, head_dim] and v: [slots, num_kv_heads, v_head_dim], views with any strides
            whose last is 1. For MLA v is the leading part of k.
        """
        ...

    def dtype(self, kind: LayerKind) -> torch.dtype:
        """Storage dtype of layers of this kind."""
        ...

    def slot_map(self, group: str) -> torch.Tensor | None:
        """Translation from full-group slots to those of `group`: int32 or int64 [num_slots], None for identity.

        Raises:
            ConfigError: the pool has no such group.
        """
        ...


@attrs.frozen(eq=False, kw_only=True)
class Pools:
    """The two pools of an engine, as faback uses them.

    Attributes:
        req_to_token: int32 or int64 [request rows, context], slot of each token; row 0 belongs to padding.
        kv: the KV storage.
    """

    req_to_token: torch.Tensor = attrs.field()
    kv: KVPool = attrs.field()

    @req_to_token.validator
    def _check_table(self, attribute: object, value: torch.Tensor) -> None:
        if value.ndim != 2 or value.dtype not in INDEX_DTYPES:
            got = f"{value.dtype} {tuple(value.shape)}"
            raise ConfigError("pools.req_to_token", wanted="an int32 or int64 tensor [request rows, tokens]", got=got)

    @kv.validator
    def _check_pool(self, attribute: object, value: object) -> None:
        if not isinstance(value, KVPool):
            missing = [n for n in ("page_size", "num_slots", "buffers", "dtype", "slot_map") if not hasattr(value, n)]
            raise ConfigError("pools.kv", wanted="an object with the members of KVPool", got=f"none of {missing}")
        if value.num_slots > MAX_SLOTS:
            hint = "Slots are 32-bit numbers. Use fewer pages, or share the requests among several backends."
            raise ConfigError("pools.kv.num_slots", wanted=f"at most {MAX_SLOTS}", got=value.num_slots, hint=hint)

    @property
    def device(self) -> torch.device:
        """Where the tables and the storage live."""
        return self.req_to_token.device
