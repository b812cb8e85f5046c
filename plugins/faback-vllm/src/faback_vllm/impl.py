"""One attention layer of vLLM."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from faback import ConfigError
from faback_vllm.builder import FabackMetadata

Tensor = torch.Tensor


class FabackImpl(AttentionImpl[FabackMetadata]):
    """Holds what vLLM says of a layer, and hands its calls to the facade.

    Args:
        num_heads: query heads of this rank.
        head_size: of q and k.
        scale: factor on q.k.
        num_kv_heads: `num_heads` unless given.
        alibi_slopes: must be None.
        sliding_window: tokens that a token sees, itself included.
        kv_cache_dtype: "auto", a dtype's name, or one of vLLM's 8-bit float caches with scales per tensor or head.
        logits_soft_cap: `c * tanh(score / c)`; None or 0 switches it off.
        attn_type: one of `AttentionType`.
        kv_sharing_target_layer_name: the layer whose cache this one reads; nothing is written then.
        sinks: [num_heads] logits.

    Raises:
        ConfigError: ALiBi.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None:
            hint = "faback has no position biases; choose another backend for this model."
            raise ConfigError("alibi_slopes", wanted=None, got=alibi_slopes, hint=hint)
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = float(logits_soft_cap or 0.0)
        self.attn_type = str(AttentionType(attn_type).value)
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: FabackMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Writes new keys and values into the cache, and attends.

        Args:
            layer: the `Attention` module, which has the name and the KV scales.
            query: [tokens, num_heads, head_size]; tokens past `num_actual_tokens` are padding.
            key: [tokens, num_kv_heads, head_size], None where the cache has them already.
            value: [tokens, num_kv_heads, head_size_v] likewise.
            kv_cache: [num_blocks, num_kv_heads, block_size, head_size + head_size_v], any memory order.
            attn_metadata: None in vLLM's profiling run, which gets zeros.
            output: [tokens, num_heads, head_size_v] to write into; padding is left as it is.
            output_scale, output_block_scale: must be None.

        Returns:
            output.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("faback does not quantise its output; vLLM asks fused_output_quant_supported")
        if attn_metadata is None:
            return output.fill_(0)
        attn_metadata.attend(layer, query, key, value, kv_cache, output)
        return output
