"""Models that mix full and sliding-window layers: the window layers' cache lives in a smaller pool."""

from __future__ import annotations

import attrs
import torch

from faback.core.layer import AttentionLayer, LayerKind
from faback.pools.checks import Index, at_least, check_num_slots, real_device
from faback.pools.hybrid_allocator import HybridAllocator
from faback.pools.storage import LayerStorage, as_layers, check_copy, check_dtype, check_group, check_layers

Tensor = torch.Tensor

GROUPS = ("full", "window")


@attrs.define(eq=False, kw_only=True)
class HybridPool:
    """A `KVPool` with the groups "full" and "window"; a layer chooses by its `kv_group`.

    Requests hold full slots alone; `slot_map("window")` leads from them to window slots, or to slot 0 where a token
    has slid out of the window. Memory is not initialised, but for the padding pages.

    Attributes:
        num_pages: pages per full layer, the padding page 0 included.
        num_window_pages: pages per window layer, the padding page 0 included.
        page_size: tokens per page, on both sides.
        layers: the layers, with different ids.
        dtype: storage dtype: float16, bfloat16, float32, float8_e4m3fn or float8_e5m2.
        device: where the memory lives.
        allocator: owner of the slots of both groups, and of the map.

    Raises:
        ConfigError: a size, dtype or layer that cannot be used.
    """

    num_pages: int = attrs.field(validator=at_least(2, "Page 0 is reserved for padding."))
    num_window_pages: int = attrs.field(validator=at_least(2, "Page 0 is reserved for padding."))
    page_size: int = attrs.field(default=1, validator=at_least(1))
    layers: tuple[AttentionLayer, ...] = attrs.field(converter=as_layers)
    _dtype: torch.dtype = attrs.field(default=torch.bfloat16, validator=check_dtype)
    device: torch.device = attrs.field(default=torch.device("cpu"), converter=real_device)
    allocator: HybridAllocator = attrs.field(init=False, repr=False)
    _storage: dict[str, LayerStorage] = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        check_num_slots("HybridPool", max(self.num_pages, self.num_window_pages), self.page_size)
        check_layers("HybridPool", self.layers, GROUPS)
        self.allocator = HybridAllocator(
            self.num_pages, self.page_size, self.device, num_window_pages=self.num_window_pages
        )
        self._storage = {
            group: LayerStorage(
                f"HybridPool group {group!r}",
                [layer for layer in self.layers if layer.kv_group == group],
                num_slots=pages * self.page_size,
                page_size=self.page_size,
                dtype=self._dtype,
                device=self.device,
            )
            for group, pages in zip(GROUPS, (self.num_pages, self.num_window_pages), strict=True)
        }

    @property
    def num_slots(self) -> int:
        """Slots of the full group, the padding slots included."""
        return self.num_pages * self.page_size

    @property
    def bytes(self) -> int:
        """Memory held by all layers, in bytes; the slot map is not counted."""
        return sum(storage.bytes for storage in self._storage.values())

    def buffers(self, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
        """Storage of a layer, in place: k [slots, num_kv_heads, head_dim] and v [slots, num_kv_heads, v_head_dim].

        Slots are those of the layer's group.

        Raises:
            ConfigError: the pool was not made for this layer, for other heads, or for another group.
        """
        check_group("HybridPool", layer.kv_group, GROUPS)
        return self._storage[layer.kv_group].buffers(layer)

    def dtype(self, kind: LayerKind) -> torch.dtype:
        """Storage dtype, the same for all kinds."""
        return self._dtype

    def slot_map(self, group: str) -> Tensor | None:
        """None for "full"; for "window" int64 [num_slots], the window slot of each full slot, 0 where there is none.

        The tensor is the same one for the pool's life; its contents follow the allocator.

        Raises:
            ConfigError: another group.
        """
        check_group("HybridPool", group, GROUPS)
        return self.allocator.full_to_window if group == "window" else None

    def copy_slots(self, src: Index, dst: Index) -> None:
        """Copies full slots src[i] to dst[i] in full layers, and their window slots in window layers.

        Args:
            src: [n] full slots.
            dst: [n] full slots, each once.

        Raises:
            PoolError: lengths differ, or, where they lie on the CPU, a slot is outside the pool or written twice.
        """
        source, target = check_copy(src, dst, self.num_slots, self.device)
        self._storage["full"].copy(source, target)
        translate = self.allocator.full_to_window
        self._storage["window"].copy(translate[source], translate[target])
