"""vLLM's KV caches as a pool of faback: views, whatever the memory order, and no copy."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import torch

from faback import AttentionLayer, LayerKind, PoolError

Tensor = torch.Tensor

STORED_AS_BYTES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""`kv_cache_dtype` -> what the bytes of the cache are."""


@attrs.define(eq=False)
class BlockPool:
    """The caches of one KV cache group; implements `faback.KVPool`.

    A cache is [num_blocks, num_kv_heads, block_size, head_size + head_size_v], keys and values joined on the last axis,
    in any memory order in which the distance between blocks is a multiple of that between tokens. faback's slots count
    tokens by their distance: slot `block * page_stride + i` is token i of a block. Where tokens of a block lie together
    with all their heads (vLLM's NHD) these are vLLM's slots; where each head has its own part of a block (HND), or
    other layers lie between the blocks, they are not, and views overlap in memory without sharing elements of a token.

    Attributes:
        page_size: tokens per block, as the kernel sees blocks.
        device: where the caches are.
    """

    page_size: int
    device: torch.device
    _dtype: torch.dtype
    _caches: dict[int, Tensor] = attrs.field(factory=dict)
    _views: dict[int, tuple[Tensor, Tensor]] = attrs.field(factory=dict)
    _blocks: int = 1
    _stride: int | None = None

    @property
    def page_stride(self) -> int:
        """Slots from one block to the next."""
        return self.page_size if self._stride is None else self._stride

    @property
    def num_blocks(self) -> int:
        """Blocks of each cache."""
        return self._blocks

    @property
    def num_slots(self) -> int:
        """Slots of each cache."""
        return (self._blocks - 1) * self.page_stride + self.page_size

    @property
    def bound(self) -> bool:
        """Whether there are caches yet."""
        return bool(self._caches)

    def buffers(self, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
        """See `faback.KVPool`. Without slots until the layer's cache is there."""
        found = self._views.get(layer.layer_id)
        if found is None:
            dims = layer.head_dim, layer.v_head_dim
            empty = (torch.empty(0, layer.num_kv_heads, dim, dtype=self._dtype, device=self.device) for dim in dims)
            found = next(empty), next(empty)
        return found

    def dtype(self, kind: LayerKind) -> torch.dtype:
        """See `faback.KVPool`."""
        return self._dtype

    def slot_map(self, group: str) -> None:
        """See `faback.KVPool`: all layers of a KV cache group have the same slots."""
        return

    def bind(self, layer: AttentionLayer, kv_cache: Tensor) -> None:
        """Takes a layer's cache; nothing to do if it is the one that was taken before.

        Raises:
            PoolError: a cache that is not what vLLM's contract says, or in a memory order that cannot be read in place.
        """
        if self._caches.get(layer.layer_id) is not kv_cache:
            self._views[layer.layer_id] = self._view(layer, kv_cache)
            self._caches[layer.layer_id] = kv_cache

    def bind_all(self, layers: Iterable[tuple[AttentionLayer, Tensor]]) -> None:
        """`bind` for each, as far as vLLM has made the caches."""
        for layer, kv_cache in layers:
            if kv_cache.numel():
                self.bind(layer, kv_cache)

    def _view(self, layer: AttentionLayer, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """k [slots, heads, dim] and v [slots, heads, v_dim] of a cache."""
        what = f"kv_cache of layer {layer.layer_id}"
        heads, width = layer.num_kv_heads, layer.head_dim + layer.v_head_dim
        shape = tuple(kv_cache.shape)
        if kv_cache.ndim != 4 or shape[1:3] != (heads, self.page_size) or shape[3] < width:
            wanted = f"[num_blocks, {heads}, {self.page_size}, {width}]"
            raise PoolError(what, wanted=wanted, got=list(shape), hint="See the KV cache contract of vLLM 0.33.")
        if kv_cache.device != self.device:
            raise PoolError(what, wanted=f"a tensor on {self.device}", got=kv_cache.device)
        if kv_cache.dtype != self._dtype:
            if kv_cache.dtype != torch.uint8 or self._dtype.itemsize != 1:
                raise PoolError(what, wanted=self._dtype, got=kv_cache.dtype)
            kv_cache = kv_cache.view(self._dtype)
        block, head, token, last = kv_cache.stride()
        if last != 1 or token == 0 or block % token:
            wanted = "a distance between blocks that is a multiple of the one between tokens"
            hint = "Blocks padded to another layer's size can break this: set VLLM_KV_CACHE_LAYOUT=HND."
            raise PoolError(f"strides of {what}", wanted=wanted, got=list(kv_cache.stride()), hint=hint)
        stride, blocks = block // token, shape[0]
        if (blocks - 1) * stride + self.page_size >= 1 << 31:
            hint = "Fewer blocks, or VLLM_KV_CACHE_LAYOUT=NHD, where slots count tokens alone."
            raise PoolError(what, wanted="fewer than 2**31 slots", got=blocks * stride, hint=hint)
        if self._stride is not None and (stride, blocks) != (self._stride, self._blocks):
            wanted = f"{self._blocks} blocks, {self._stride} slots apart, like the other caches of its group"
            raise PoolError(what, wanted=wanted, got=f"{blocks} blocks, {stride} slots apart")
        self._stride, self._blocks = stride, blocks
        at, slots = kv_cache.storage_offset(), self.num_slots
        k = kv_cache.as_strided((slots, heads, layer.head_dim), (token, head, 1), at)
        v = kv_cache.as_strided((slots, heads, layer.v_head_dim), (token, head, 1), at + layer.head_dim)
        return k, v
