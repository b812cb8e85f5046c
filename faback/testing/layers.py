"""The layers of a scenario's model, and how their keys and values are stored."""

from __future__ import annotations

import random
from typing import Any

import attrs
import torch

from faback.core.layer import AttentionLayer
from faback.testing.options import FP8, Options
from faback.testing.oracle import World

Tensor = torch.Tensor
SCALES = (0.125, 0.25, 0.5, 2.0, 4.0)
"""Powers of two, so that every correct way of dividing by them gives the same bits; never 1, so that they matter."""


def make_layers(options: Options, rng: random.Random) -> list[AttentionLayer]:
    """The layers of the overlay, each with the features that the options want."""
    layers = []
    for index, special in enumerate(_specials(options, rng)):
        common: dict[str, Any] = dict(
            layer_id=index,
            num_q_heads=options.num_q_heads,
            num_kv_heads=1 if options.overlay == "mla" else options.num_kv_heads,
            head_dim=options.head_dim,
            v_head_dim=_value_dim(options),
            sinks=options.sinks,
            softcap=0.75 + 0.5 * index if options.softcap else 0.0,
        )
        if options.scale is not None and index == 0:
            common["scale"] = options.scale
        common.update(special)
        if options.kv_scales:
            common.update(_scales(options, common["num_kv_heads"], rng))
        layers.append(AttentionLayer(**common))
    return layers


def _specials(options: Options, rng: random.Random) -> list[dict[str, Any]]:
    page, group = options.page_size, "window" if options.hybrid else "full"
    wide = rng.choice([0, page - 1, page, page + 1, 7, options.max_len + 3])
    pair = options.windows or (rng.choice([1, 2, 3, 4]), wide)
    chunk = options.chunk or rng.choice([3, 4, 5, page, page + 1])
    sliding: list[dict[str, Any]] = [{"window": window, "kv_group": group} for window in pair]
    raw: dict[str, Any] = {"kv_group": "none"} if options.mode == "embedding" and rng.random() < 0.5 else {}
    specials: dict[str, list[dict[str, Any]]] = {
        "full": [raw],
        "window": [raw, *(window | raw for window in sliding)],
        "local": [{"chunk": chunk, "kv_group": group} | raw, raw],
        "prefill_aware": [sliding[0], {}],
        "cross": [{}, {"cross": True}, {"window": pair[0]}],
        "mla": [{"latent": True}, {"latent": True, "window": pair[0]}],
        "encoder_only": [{"causal": False} | raw, {"causal": False, "window": pair[0]} | raw],
    }
    return specials[options.overlay]


def _value_dim(options: Options) -> int:
    if options.v_head_dim is not None:
        return options.v_head_dim
    return max(1, options.head_dim - options.head_dim // 4) if options.overlay == "mla" else options.head_dim


def _scales(options: Options, kv_heads: int, rng: random.Random) -> dict[str, Any]:
    if options.overlay == "mla":
        scale = rng.choice(SCALES)
        return {"k_scale": scale, "v_scale": scale}
    k_scale, v_scale = rng.sample(SCALES, 2)
    if rng.random() < 0.5:
        return {"k_scale": k_scale, "v_scale": v_scale}
    per_head = [torch.tensor([rng.choice(SCALES) for _ in range(kv_heads)]) for _ in range(2)]
    return {"k_scale": per_head[0], "v_scale": per_head[1]}


@attrs.frozen(eq=False)
class LayerStore:
    """Every token's keys and values in one layer, in three forms, [world, kv_heads, dim] each.

    Attributes:
        given: as a model hands them over, in the dtype of q.
        stored: as the pool holds them.
        true: what the stored ones mean, float64.
    """

    given: tuple[Tensor, Tensor]
    stored: tuple[Tensor, Tensor]
    true: tuple[Tensor, Tensor]


def make_store(world: World, layer: AttentionLayer, options: Options) -> LayerStore:
    """Draws a layer's vectors and stores them."""
    vectors = world.vectors(layer.layer_id, layer.num_kv_heads, layer.head_dim, layer.v_head_dim, layer.latent)
    given = tuple(vector.to(options.dtype) for vector in vectors)
    scales = (layer.k_scale, layer.v_scale)
    stored = tuple(quantised(g, s, options.storage_dtype) for g, s in zip(given, scales, strict=True))
    true = tuple(dequantised(s, scale) for s, scale in zip(stored, scales, strict=True))
    return LayerStore((given[0], given[1]), (stored[0], stored[1]), (true[0], true[1]))


def quantised(given: Tensor, scale: float | Tensor | None, dtype: torch.dtype) -> Tensor:
    """given [n, kv_heads, dim] divided by the scale and rounded to nearest; fp8 saturates."""
    exact = given.to(torch.float64) / _per_head(scale)
    if dtype in FP8:
        limit = torch.finfo(dtype).max
        exact = exact.clamp(-limit, limit)
    return exact.to(torch.float32).to(dtype)


def dequantised(stored: Tensor, scale: float | Tensor | None) -> Tensor:
    """float64 [n, kv_heads, dim]: what stored numbers mean."""
    return stored.to(torch.float32).to(torch.float64) * _per_head(scale)


def _per_head(scale: float | Tensor | None) -> Tensor | float:
    if scale is None:
        return 1.0
    return scale.to(torch.float64).view(-1, 1) if isinstance(scale, Tensor) else scale


def as_bits(tensor: Tensor) -> Tensor:
    """The same memory as integers of the same size, so that NaN compares and every dtype can be indexed."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor if tensor.dtype == torch.bool else tensor.view(sizes[tensor.element_size()])


def taken(tensor: Tensor, rows: Tensor) -> Tensor:
    """tensor[rows], for every dtype."""
    return as_bits(tensor)[rows].view(tensor.dtype)
