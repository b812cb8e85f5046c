"""The shapes in which engines bring q, k and v."""

from __future__ import annotations

from typing import Any

import torch

from faback.core.errors import BatchError
from faback.core.layer import AttentionLayer

Tensor = torch.Tensor


def by_head(tensor: Tensor | None, heads: int, dim: int) -> Tensor | None:
    """[tokens, heads * dim] -> [tokens, heads, dim].

    Raises:
        BatchError: neither shape.
    """
    if tensor is None or tensor.ndim == 3:
        return tensor
    if tensor.shape[1:] != (heads * dim,):
        wanted = f"[tokens, {heads}, {dim}] or [tokens, {heads * dim}]"
        raise BatchError("q, k or v", wanted=wanted, got=list(tensor.shape))
    return tensor.view(tensor.shape[0], heads, dim)


def fused(tensor: Tensor | None, rope: Tensor | None, heads: int, dim: int) -> Any:
    """q or k whole, by head, its trailing part appended where it came apart."""
    if tensor is None or rope is None:
        return by_head(tensor, heads, dim)
    cut = dim - (rope.shape[-1] if rope.ndim == 3 else rope.shape[-1] // heads)
    parts: Any = (by_head(tensor, heads, cut), by_head(rope, heads, dim - cut))
    return torch.cat(parts, dim=-1)


def check_call(q: Tensor, out: Tensor | None, sinks: Tensor | None, layer: AttentionLayer, dtype: torch.dtype) -> None:
    """Raises where tensors do not fit the layer; reads shapes and dtypes only."""
    heads, name = layer.num_q_heads, layer.layer_id
    if q.shape[1:] != (heads, layer.head_dim) or q.dtype != dtype:
        wanted = f"{dtype} [tokens, {heads}, {layer.head_dim}]"
        raise BatchError(f"q of layer {name}", wanted=wanted, got=f"{q.dtype} {list(q.shape)}")
    if out is not None and out.shape != (q.shape[0], heads, layer.v_head_dim):
        shape = [q.shape[0], heads, layer.v_head_dim]
        raise BatchError(f"out of layer {name}", wanted=shape, got=list(out.shape))
    if (sinks is not None) != layer.sinks or (sinks is not None and sinks.shape != (heads,)):
        got = None if sinks is None else list(sinks.shape)
        wanted = f"[{heads}]" if layer.sinks else "no sinks, as the layer is described"
        hint = "A layer that brings sinks is described with sinks=True, so that a kernel is chosen that has them."
        raise BatchError(f"sinks of layer {name}", wanted=wanted, got=got, hint=hint)
