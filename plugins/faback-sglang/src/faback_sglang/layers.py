"""SGLang's attention layers as faback describes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

from faback import AttentionLayer, ConfigError

Tensor = torch.Tensor

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SINKS = ("sinks", "attention_sink_bias")
"""Attributes in which SGLang's models keep the sinks that they bring to their attention layers."""


@attrs.frozen(eq=False)
class Layers:
    """The attention layers of a model.

    Attributes:
        ours: by SGLang's module; modules of one description share one.
        slots_of: the pool's layer id of each of our layers.
    """

    ours: Mapping[RadixAttention, AttentionLayer]
    slots_of: Mapping[int, int]

    @property
    def distinct(self) -> tuple[AttentionLayer, ...]:
        """Each description once."""
        return tuple({layer.layer_id: layer for layer in self.ours.values()}.values())


def describe(model_runner: Any, *, expanded: bool = False) -> Layers:
    """Finds the attention layers of the runner's model.

    Args:
        model_runner: SGLang's, its model loaded and its pools made.
        expanded: those layers of an MLA model that attend to keys expanded from latents, and keep none; else those that
            have a place in the pool.

    Raises:
        ConfigError: a layer that cannot be honoured, naming the field.
    """
    ours: dict[RadixAttention, AttentionLayer] = {}
    taken: dict[int, AttentionLayer] = {}
    slots_of: dict[int, int] = {}
    for module, parent in attention_modules(model_runner.model):
        if is_expanded(module, model_runner) != expanded:
            continue
        layer = described(module, parent, model_runner, expanded)
        while layer.layer_id in taken and taken[layer.layer_id] != layer:
            layer = attrs.evolve(layer, layer_id=max(taken) + 1)
        ours[module] = taken.setdefault(layer.layer_id, layer)
        slots_of[layer.layer_id] = module.layer_id
    return Layers(ours, slots_of)


def attention_modules(model: torch.nn.Module) -> Iterator[tuple[RadixAttention, torch.nn.Module]]:
    """Every attention layer once, with the module that owns it."""
    seen = set()
    for parent in model.modules():
        for child in parent.children():
            if isinstance(child, RadixAttention) and child not in seen:
                seen.add(child)
                yield child, parent


def is_latent(module: RadixAttention, model_runner: Any) -> bool:
    """Whether a layer's cache holds latents, its values being the leading part of its keys."""
    return model_runner.use_mla_backend and module.tp_k_head_num == 1 and module.v_head_dim < module.qk_head_dim


def is_expanded(module: RadixAttention, model_runner: Any) -> bool:
    return model_runner.use_mla_backend and not is_latent(module, model_runner)


def described(module: RadixAttention, parent: torch.nn.Module, model_runner: Any, expanded: bool) -> AttentionLayer:
    """One layer."""
    check(module)
    latent = is_latent(module, model_runner)
    window = module.sliding_window_size
    local = model_runner.model_config.is_local_attention_model and module.use_irope
    scales = (None, None) if expanded else kv_scales(module, model_runner.token_to_kv_pool.dtype, latent)
    return AttentionLayer(
        layer_id=module.layer_id,
        num_q_heads=module.tp_q_head_num,
        num_kv_heads=module.tp_k_head_num,
        head_dim=module.qk_head_dim,
        v_head_dim=module.v_head_dim,
        scale=module.scaling,
        softcap=module.logit_cap or 0.0,
        window=window if window is not None and window > -1 else None,
        chunk=model_runner.attention_chunk_size if local else None,
        causal=module.attn_type == AttentionType.DECODER,
        cross=module.is_cross_attention,
        sinks=any(getattr(parent, name, None) is not None for name in SINKS),
        latent=latent,
        kv_group="none" if expanded else group_of(module, model_runner.token_to_kv_pool),
        k_scale=scales[0],
        v_scale=scales[1],
    )


def group_of(module: RadixAttention, pool: Any) -> str:
    """Which part of the pool has the layer: "window" in a hybrid pool, with slots of its own, or "full"."""
    mapping = getattr(pool, "layers_mapping", None)
    if mapping is None or getattr(pool, "swa_uses_full_indices", False):
        return "full"
    return "window" if mapping[module.layer_id][1] else "full"


def kv_scales(module: RadixAttention, dtype: torch.dtype, latent: bool) -> tuple[Any, Any]:
    """Factors of stored keys and values. SGLang applies them to fp8 pools alone, and stores latents as they are."""
    if dtype not in FP8:
        return None, None
    if not latent:
        return as_scale(module.k_scale), as_scale(module.v_scale)
    for name in ("k_scale_float", "v_scale_float"):
        value = getattr(module, name)
        if value not in (None, 1.0):
            hint = "SGLang stores latents unscaled, so a factor at reading would be wrong."
            raise ConfigError(f"{name} of MLA layer {module.layer_id}", wanted="None or 1.0", got=value, hint=hint)
    return None, None


def as_scale(value: Any) -> Any:
    return value.detach().float().flatten() if isinstance(value, Tensor) else value


def check(module: RadixAttention) -> None:
    """Raises a `ConfigError` for what would be ignored."""
    wanted = {"pos_encoding_mode": ("NONE",), "logit_capping_method": ("tanh",), "xai_temperature_len": (-1, 0, None)}
    for name, accepted in wanted.items():
        value = getattr(module, name)
        if value not in accepted:
            raise ConfigError(f"{name} of attention layer {module.layer_id}", wanted=accepted[0], got=value)
    if module.tp_v_head_num != module.tp_k_head_num:
        what = f"tp_v_head_num of attention layer {module.layer_id}"
        raise ConfigError(what, wanted=f"{module.tp_k_head_num}, as tp_k_head_num", got=module.tp_v_head_num)
