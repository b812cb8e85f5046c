"""vLLM's attention layers in faback's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from faback import AttentionLayer, BackendConfig, ConfigError
from faback_vllm.caches import STORED_AS_BYTES

OPTIONS = "faback"
"""Key of faback's settings in vLLM's `additional_config`."""
PLUGIN = "vllm"
"""Entry point that brings the forward mode of vLLM's batches."""
SETTINGS = ("kernels", "checks", "options", "disable_plugins", "require_plugins")
"""Fields of `faback.BackendConfig` that a user may set there."""
CACHELESS = ("encoder", "encoder_only")
"""`AttentionType`s of layers that attend to the keys of the batch."""


def described(layers: Sequence[Any], *, causal: bool) -> dict[str, AttentionLayer]:
    """Descriptions by layer name.

    Args:
        layers: vLLM's `Attention` modules of one KV cache group, each with a `FabackImpl`.
        causal: what vLLM says of the pass. Layers of encoders and of cross-attention never are.
    """
    return {layer.layer_name: _described(layer, number, causal) for number, layer in enumerate(layers)}


def _described(layer: Any, number: int, causal: bool) -> AttentionLayer:
    impl, window = layer.impl, layer.impl.sliding_window
    if window is not None and window < 1:
        raise ConfigError(f"sliding_window of {layer.layer_name}", wanted="None or 1 or more tokens", got=window)
    quantised = impl.kv_cache_dtype in STORED_AS_BYTES
    return AttentionLayer(
        layer_id=number,
        num_q_heads=impl.num_heads,
        num_kv_heads=impl.num_kv_heads,
        head_dim=impl.head_size,
        v_head_dim=getattr(layer, "head_size_v", impl.head_size),
        scale=impl.scale,
        softcap=impl.logits_soft_cap,
        window=None if window is None else window - 1,  # vLLM counts the token itself
        causal=causal and impl.attn_type == "decoder",
        sinks=impl.sinks is not None,
        k_scale=layer._k_scale if quantised else None,
        v_scale=layer._v_scale if quantised else None,
        kv_group="none" if impl.attn_type in CACHELESS else "full",
    )


def stored_dtype(kv_cache_dtype: str, spec_dtype: torch.dtype) -> torch.dtype:
    """What the cache's elements are; vLLM keeps 8-bit floats as bytes."""
    return STORED_AS_BYTES.get(kv_cache_dtype, spec_dtype)


def configuration(vllm_config: Any, *, batch_invariant: bool) -> BackendConfig:
    """faback's configuration from vLLM's.

    Raises:
        ConfigError: settings under `additional_config["faback"]` that faback does not have.
    """
    given = vllm_config.additional_config
    settings = given.get(OPTIONS, {}) if isinstance(given, Mapping) else {}
    unknown = sorted(set(settings) - set(SETTINGS))
    if unknown:
        wanted = f"settings among {', '.join(SETTINGS)}"
        raise ConfigError(f"additional_config[{OPTIONS!r}] of vLLM", wanted=wanted, got=", ".join(unknown))
    model = vllm_config.model_config
    config = BackendConfig(context_len=model.max_model_len, dtype=model.dtype, deterministic=batch_invariant)
    config = attrs.evolve(config, **settings)
    return attrs.evolve(config, require_plugins=(*config.require_plugins, PLUGIN))
