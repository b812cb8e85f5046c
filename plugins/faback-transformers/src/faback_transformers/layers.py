"""A model's attention layers, described for faback.

The model itself is asked: one token runs through it, and each attention layer shows its heads, scale, window, softcap
and sinks by the very call that it will make when it serves. The configuration is consulted for what layers do not say
in that call (chunked attention) and must not contradict it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from transformers import PreTrainedModel

from faback import AttentionLayer, ConfigError
from faback_transformers.attention import attending

Tensor = torch.Tensor

UNSUPPORTED = ("position_bias", "sinks", "indexer", "block_mask")
"""Options that change what a layer computes and that faback has no notion of."""


@attrs.define(eq=False)
class Recorder:
    """An `AttentionContext` that attends to nothing and describes whoever calls it.

    Attributes:
        layers: what was seen, by `layer_idx`.
    """

    layers: dict[int, AttentionLayer] = attrs.field(factory=dict)

    def attend(self, module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]) -> Tensor:
        """Notes the layer; returns zeros."""
        layer = describe(module, q, k, v, options)
        if layer.layer_id in self.layers:
            hint = "Models that run one attention layer several times per pass are not supported."
            raise ConfigError("layer_idx", wanted="one attention call per layer", got=layer.layer_id, hint=hint)
        self.layers[layer.layer_id] = layer
        return q.new_zeros((q.shape[0], layer.num_q_heads, layer.v_head_dim))


def layers_of(model: PreTrainedModel) -> dict[int, AttentionLayer]:
    """Descriptions of a decoder-only model's attention layers, by `layer_idx`.

    Args:
        model: any causal language model of Transformers whose layers look up their attention function by name.

    Raises:
        ConfigError: a layer that faback cannot describe, or a model that does not hand keyword arguments to its layers.
    """
    recorder = Recorder()
    zero = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    with attending(model), torch.inference_mode():
        model(input_ids=zero, position_ids=zero, use_cache=False, faback_context=recorder)
    if not recorder.layers:
        raise ConfigError("model", wanted="attention layers that use attn_implementation", got=type(model).__name__)
    return recorder.layers


def describe(module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]) -> AttentionLayer:
    """One layer, from the arguments of its attention call."""
    index = getattr(module, "layer_idx", None)
    if index is None:
        raise ConfigError("attention module", wanted="a layer_idx", got=type(module).__name__)
    for name in UNSUPPORTED:
        if options.get(name) is not None:
            raise ConfigError(f"layer {index}", wanted=f"attention without {name!r}", got=type(module).__name__)
    window, chunk = _reach(module, index, options.get("sliding_window"))
    scaling = options.get("scaling")
    return AttentionLayer(
        layer_id=index,
        num_q_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=q.shape[2],
        v_head_dim=v.shape[2],
        scale=q.shape[2] ** -0.5 if scaling is None else float(scaling),
        softcap=float(options.get("softcap") or 0.0),
        window=window,
        chunk=chunk,
        causal=bool(getattr(module, "is_causal", True)),
        sinks=options.get("s_aux") is not None,
    )


def _reach(module: torch.nn.Module, index: int, width: int | None) -> tuple[int | None, int | None]:
    """Window and chunk. Transformers' width counts the query itself, faback's window does not."""
    config = getattr(module, "config", None)
    types = getattr(config, "layer_types", None)
    kind = types[index] if types is not None and index < len(types) else None
    if kind == "chunked_attention":
        return None, config.attention_chunk_size  # type: ignore[union-attr]
    if kind == "sliding_attention" and width is None:
        width = config.sliding_window  # type: ignore[union-attr]
    if kind == "full_attention" and width is not None:
        hint = "The mask that Transformers would build and the window that the layer asks for differ."
        raise ConfigError(f"layer {index}", wanted="no window, by config.layer_types", got=width, hint=hint)
    return (None if width is None else width - 1), None
