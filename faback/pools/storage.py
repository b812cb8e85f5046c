"""Key and value tensors of a set of layers, and what all pools check about layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import torch

from faback.core.errors import ConfigError, PoolError
from faback.core.layer import AttentionLayer, LayerKind
from faback.pools.checks import Index, check_distinct, check_values, index_tensor, send

Tensor = torch.Tensor

STORAGE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)


def check_dtype(instance: object, attribute: attrs.Attribute[torch.dtype], value: torch.dtype) -> None:
    """An attrs validator: a dtype in which keys and values can be stored, or a `ConfigError`."""
    if value not in STORAGE_DTYPES:
        wanted = ", ".join(str(dtype) for dtype in STORAGE_DTYPES)
        raise ConfigError(f"{type(instance).__name__}.dtype", wanted=wanted, got=repr(value))


def as_layers(layers: Iterable[AttentionLayer]) -> tuple[AttentionLayer, ...]:
    """An attrs converter with a type that checkers understand, unlike `tuple`."""
    return tuple(layers)


def check_layers(owner: str, layers: Sequence[AttentionLayer], groups: tuple[str, ...]) -> None:
    """Raises a `ConfigError` unless there are layers, with ids of their own, in groups that the pool has."""
    if not layers:
        raise ConfigError(f"{owner}.layers", wanted="at least one layer", got="none")
    seen: set[int] = set()
    for layer in layers:
        if layer.layer_id in seen:
            hint = "Two attentions of one block (self and cross) need two layer ids."
            raise ConfigError(f"{owner}.layers", wanted="layer ids once each", got=layer.layer_id, hint=hint)
        seen.add(layer.layer_id)
        check_group(owner, layer.kv_group, groups)


def check_group(owner: str, group: str, groups: tuple[str, ...]) -> None:
    """Raises a `ConfigError` where the pool has no such group."""
    if group not in groups:
        hint = "A HybridPool has the groups 'full' and 'window'." if "window" not in groups else None
        raise ConfigError(f"{owner} group", wanted=" or ".join(map(repr, groups)), got=repr(group), hint=hint)


def _shape(layer: LayerKind) -> tuple[int, int, int]:
    return layer.num_kv_heads, layer.head_dim, layer.v_head_dim


class LayerStorage:
    """Uninitialised memory for some layers, with a zeroed padding page.

    Args:
        owner: the pool's name in errors.
        layers: layers with different ids; their heads and head dims may differ.
        num_slots: slots of each layer.
        page_size: slots of the padding page.
        dtype: storage dtype.
        device: where the memory lives.
        fused: values are the leading part of the keys (MLA), not memory of their own.
    """

    def __init__(
        self,
        owner: str,
        layers: Sequence[AttentionLayer],
        *,
        num_slots: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        fused: bool = False,
    ) -> None:
        self.owner = owner
        self.num_slots = num_slots
        self._shapes = {layer.layer_id: _shape(layer) for layer in layers}
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}
        self._owned: list[Tensor] = []

        def allocate(heads: int, dim: int) -> Tensor:
            memory = torch.empty((num_slots, heads, dim), dtype=dtype, device=device)
            memory[:page_size].zero_()
            self._owned.append(memory)
            return memory

        for layer in layers:
            k = allocate(layer.num_kv_heads, layer.head_dim)
            v = k[..., : layer.v_head_dim] if fused else allocate(layer.num_kv_heads, layer.v_head_dim)
            self._buffers[layer.layer_id] = (k, v)

    @property
    def bytes(self) -> int:
        """Memory held, in bytes."""
        return sum(memory.numel() * memory.element_size() for memory in self._owned)

    def buffers(self, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, in place; a `ConfigError` for a layer that the pool was not made for."""
        shape = self._shapes.get(layer.layer_id)
        if shape != _shape(layer):
            what = f"layer {layer.layer_id} in {self.owner}"
            if shape is None:
                raise ConfigError(what, wanted=f"a layer id among {sorted(self._shapes)}", got=layer.layer_id)
            raise ConfigError(what, wanted=f"(num_kv_heads, head_dim, v_head_dim) = {shape}", got=_shape(layer))
        return self._buffers[layer.layer_id]

    def copy(self, src: Tensor, dst: Tensor) -> None:
        """Copies slots of every layer as if at once: int64 [n] each, on the storage's device."""
        for memory in self._owned:
            # torch indexes fp8 nowhere; its bytes will do
            plain = memory.view(torch.uint8) if memory.element_size() == 1 else memory
            plain.index_copy_(0, dst, plain.index_select(0, src))


def check_copy(src: Index, dst: Index, num_slots: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Arguments of `copy_slots` as int64 [n] on the device.

    Raises:
        PoolError: lengths differ, or, where they lie on the CPU, a slot is outside the pool or written twice.
    """
    source, target = index_tensor("copy_slots.src", src), index_tensor("copy_slots.dst", dst)
    if source.shape != target.shape:
        raise PoolError("copy_slots", wanted="as many src as dst", got=[source.shape[0], target.shape[0]])
    check_values("copy_slots.src", source, num_slots)
    check_values("copy_slots.dst", target, num_slots)
    check_distinct("copy_slots.dst", target)
    return send(source, device).to(torch.int64), send(target, device).to(torch.int64)
