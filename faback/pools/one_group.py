"""What pools with one group have in common."""

from __future__ import annotations

from typing import ClassVar

import attrs
import torch

from faback.core.layer import AttentionLayer, LayerKind
from faback.pools.checks import Index, at_least, check_num_slots, real_device
from faback.pools.storage import LayerStorage, as_layers, check_copy, check_dtype, check_group, check_layers

Tensor = torch.Tensor


@attrs.define(eq=False, kw_only=True)
class OneGroupPool:
    """A `KVPool` whose only group is "full". Memory is not initialised, but for the padding page.

    Attributes:
        num_pages: pages per layer, the padding page 0 included.
        page_size: tokens per page.
        layers: the layers, with different ids.
        dtype: storage dtype: float16, bfloat16, float32, float8_e4m3fn or float8_e5m2.
        device: where the memory lives.

    Raises:
        ConfigError: a size, dtype or layer that cannot be used.
    """

    fused: ClassVar[bool] = False
    """Values are the leading part of the keys, not memory of their own."""

    num_pages: int = attrs.field(validator=at_least(2, "Page 0 is reserved for padding."))
    page_size: int = attrs.field(default=1, validator=at_least(1))
    layers: tuple[AttentionLayer, ...] = attrs.field(converter=as_layers)
    _dtype: torch.dtype = attrs.field(default=torch.bfloat16, validator=check_dtype)
    device: torch.device = attrs.field(default=torch.device("cpu"), converter=real_device)
    _storage: LayerStorage = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        check_num_slots(self.owner, self.num_pages, self.page_size)
        check_layers(self.owner, self.layers, ("full",))
        self._storage = LayerStorage(
            self.owner,
            self.layers,
            num_slots=self.num_slots,
            page_size=self.page_size,
            dtype=self._dtype,
            device=self.device,
            fused=self.fused,
        )

    @property
    def owner(self) -> str:
        """The pool's name in errors."""
        return type(self).__name__

    @property
    def num_slots(self) -> int:
        """Slots per layer, the padding slots included."""
        return self.num_pages * self.page_size

    @property
    def bytes(self) -> int:
        """Memory held by all layers, in bytes."""
        return self._storage.bytes

    def buffers(self, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
        """Storage of a layer, in place: k [slots, num_kv_heads, head_dim] and v [slots, num_kv_heads, v_head_dim].

        Raises:
            ConfigError: the pool was not made for this layer, or for other heads.
        """
        check_group(self.owner, layer.kv_group, ("full",))
        return self._storage.buffers(layer)

    def dtype(self, kind: LayerKind) -> torch.dtype:
        """Storage dtype, the same for all kinds."""
        return self._dtype

    def slot_map(self, group: str) -> Tensor | None:
        """None: the only group is "full".

        Raises:
            ConfigError: another group.
        """
        check_group(self.owner, group, ("full",))
        return None

    def copy_slots(self, src: Index, dst: Index) -> None:
        """Copies keys and values of slots src[i] to dst[i] in every layer, reading all before writing any.

        Args:
            src: [n] slots.
            dst: [n] slots, each once.

        Raises:
            PoolError: lengths differ, or, where they lie on the CPU, a slot is outside the pool or written twice.
        """
        self._storage.copy(*check_copy(src, dst, self.num_slots, self.device))
