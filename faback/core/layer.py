"""What an attention layer is: a small frozen description, given once when the backend is built."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import attrs
import torch

from faback.core.errors import ConfigError


def _positive(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"layer.{attribute.name}", wanted="a positive integer", got=repr(value))


def _distance(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is not None and (not isinstance(value, int) or value < 0):
        hint = "None means no limit; a window counts the keys to the left of the query, itself not included."
        raise ConfigError(f"layer.{attribute.name}", wanted="None or an integer >= 0", got=repr(value), hint=hint)


def _finite(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"layer.{attribute.name}", wanted="a finite number", got=repr(value))


def _factor(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is None or isinstance(value, torch.Tensor):
        return
    if not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"layer.{attribute.name}", wanted="None, a positive number or a tensor", got=repr(value))


def _default_scale(layer: LayerKind) -> float:
    dim: object = layer.head_dim
    return float(dim) ** -0.5 if isinstance(dim, int) and dim > 0 else 1.0  # a wrong head_dim is named by its validator


@attrs.frozen(kw_only=True, cache_hash=True)
class LayerKind:
    """Everything about a layer that decides its metadata and its kernel. Layers of one kind share one prepared call.

    Attributes:
        num_q_heads: query heads on this rank.
        num_kv_heads: key/value heads on this rank; divides `num_q_heads`.
        head_dim: last dimension of q and k.
        v_head_dim: last dimension of v and of the output; `head_dim` unless given.
        scale: factor on q.k; `head_dim ** -0.5` unless given.
        softcap: `c * tanh(score / c)` after scaling and before the mask; 0 switches it off.
        window: inclusive left distance: token p sees [p - window, p]; None is unbounded.
        chunk: local attention: token p sees [chunk * (p // chunk), p]; None is off.
        causal: False for encoder-only layers, where every token sees both directions.
        cross: keys are the encoder's, values of the decoder's tokens are not written.
        sinks: `forward` brings one logit per query head that enters the denominator only.
        kv_scales: the layer has `k_scale` or `v_scale`; set from them.
        latent: multi-head latent attention, absorbed: values are the leading `v_head_dim` of the keys, and are stored
            once.
        kv_group: which part of the KV pool holds the layer's cache, as the pool names it; "none" for layers whose keys
            and values come with each call and are not kept.
        kernel: the name of the kernel that serves such layers, whatever the configuration says; it never falls back to
            another. None leaves the choice to the configuration.
    """

    num_q_heads: int = attrs.field(validator=_positive)
    num_kv_heads: int = attrs.field(validator=_positive)
    head_dim: int = attrs.field(validator=_positive)
    v_head_dim: int = attrs.field(
        default=attrs.Factory(lambda self: self.head_dim, takes_self=True), validator=_positive
    )
    scale: float = attrs.field(default=attrs.Factory(_default_scale, takes_self=True), validator=_finite)
    softcap: float = attrs.field(default=0.0, validator=_finite)
    window: int | None = attrs.field(default=None, validator=_distance)
    chunk: int | None = attrs.field(default=None, validator=attrs.validators.optional(_positive))
    causal: bool = True
    cross: bool = False
    sinks: bool = False
    kv_scales: bool = False
    latent: bool = False
    kv_group: str = "full"
    kernel: str | None = None

    def __attrs_post_init__(self) -> None:
        if self.num_q_heads % self.num_kv_heads:
            raise ConfigError(
                "layer.num_q_heads",
                wanted=f"a multiple of num_kv_heads={self.num_kv_heads}",
                got=self.num_q_heads,
                hint="Give the head counts of this rank, KV heads replicated where ranks outnumber them.",
            )
        if self.softcap < 0:
            raise ConfigError("layer.softcap", wanted="0 (off) or a positive cap", got=self.softcap)

        if self.latent and (self.num_kv_heads != 1 or self.v_head_dim > self.head_dim):
            wanted = "num_kv_heads=1 and v_head_dim <= head_dim"
            raise ConfigError("layer.latent", wanted=wanted, got=f"{self.num_kv_heads} heads, {self.v_head_dim}")

    @property
    def cached(self) -> bool:
        """Whether the layer has a cache."""
        return self.kv_group != "none"

    @property
    def group_size(self) -> int:
        """Query heads per key/value head."""
        return self.num_q_heads // self.num_kv_heads

    def features(self) -> frozenset[str]:
        """The `FEATURES` that such a layer needs of a kernel in any mode."""
        found = {
            "softcap": self.softcap > 0,
            "sinks": self.sinks,
            "kv_scales": self.kv_scales,
            "window": self.window is not None and not self.cross,
            "chunk": self.chunk is not None and not self.cross,
            "non_causal": self.cross or not self.causal,
            "latent": self.latent,
        }
        return frozenset(name for name, present in found.items() if present)


@attrs.frozen(kw_only=True, cache_hash=True)
class AttentionLayer(LayerKind):
    """One attention layer of the model: its kind, its number and its KV scales.

    Attributes:
        layer_id: the layer's index in the KV pool, and its name in errors.
        k_scale: de-quantisation factor of stored keys: a float, or a float32 tensor of one value per KV head.
        v_scale: the same for values.
    """

    layer_id: int
    k_scale: float | torch.Tensor | None = attrs.field(default=None, eq=False, validator=_factor)
    v_scale: float | torch.Tensor | None = attrs.field(default=None, eq=False, validator=_factor)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        for name in ("k_scale", "v_scale"):
            value = getattr(self, name)
            if isinstance(value, torch.Tensor) and value.numel() not in (1, self.num_kv_heads):
                raise ConfigError(
                    f"layer.{name}", wanted=f"1 value or one per KV head ({self.num_kv_heads})", got=tuple(value.shape)
                )
        object.__setattr__(self, "kv_scales", self.k_scale is not None or self.v_scale is not None)

    @property
    def kind(self) -> LayerKind:
        """The part of the description that layers can share."""
        fields = attrs.fields(LayerKind)
        return LayerKind(**{f.name: getattr(self, f.name) for f in fields})


def by_id(layers: Iterable[AttentionLayer]) -> dict[int, AttentionLayer]:
    """Layers by their number.

    Raises:
        ConfigError: two of one number, or none at all.
    """
    found: dict[int, AttentionLayer] = {}
    for layer in layers:
        if layer.layer_id in found:
            raise ConfigError("layers", wanted="one description per layer_id", got=f"two of {layer.layer_id}")
        found[layer.layer_id] = layer
    if not found:
        raise ConfigError("layers", wanted="at least one AttentionLayer", got="none")
    return found
