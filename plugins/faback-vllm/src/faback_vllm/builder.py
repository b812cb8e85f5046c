"""Metadata of a batch: one plan for all layers of a KV cache group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import attrs
import torch
from vllm import envs
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from faback import ForwardBatch
from faback.builtins import BUILTINS
from faback.core.plan import Plan
from faback.core.registry import Registry
from faback.core.select import Selector
from faback_vllm.caches import BlockPool
from faback_vllm.checks import check_contents, check_shapes
from faback_vllm.layers import CACHELESS, configuration, described, stored_dtype
from faback_vllm.mode import KEY
from faback_vllm.passes import Passes, batch_of

Tensor = torch.Tensor


@dataclass(eq=False)
class FabackMetadata(AttentionMetadata):
    """What the layers of one group need in one forward pass. A dataclass because vLLM copies its fields.

    Attributes:
        num_actual_tokens: rows of q that count.
        slot_mapping: where new keys and values go; vLLM exchanges it for cross-attention.
        batch: what was planned.
        passes: who planned.
        plan: the plan.
    """

    num_actual_tokens: int
    slot_mapping: Tensor
    batch: ForwardBatch
    passes: Passes
    plan: Plan

    def attend(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        output: Tensor,
    ) -> None:
        """Writes new keys and values and attends, for one of vLLM's `Attention` layers; shapes as in `FabackImpl`."""
        mine, tokens = self.passes.layers[layer.layer_name], self.num_actual_tokens
        stored = mine.cached
        if stored:
            self.passes.pool.bind(mine, kv_cache)
        if key is not None and self.slot_mapping is not self.batch.out_cache_loc:
            self.batch = attrs.evolve(self.batch, out_cache_loc=self.slot_mapping)
            self.plan = self.passes.plan(self.batch)
        slots = self.slot_mapping.shape[0] if stored else tokens
        self.passes.backend.forward(
            query if query.shape[0] == tokens else query[:tokens],
            key if key is None or key.shape[0] == slots else key[:slots],
            value if value is None or value.shape[0] == slots else value[:slots],
            mine,
            out=output if output.shape[0] == tokens else output[:tokens],
            sinks=layer.impl.sinks,
            save_kv_cache=stored and layer.impl.kv_sharing_target_layer_name is None,
            plan=self.plan,
        )


class FabackMetadataBuilder(AttentionMetadataBuilder[FabackMetadata]):
    """Plans a batch of any requests as one; nothing is reordered or split.

    Args:
        kv_cache_spec: of the group; its block size is the kernel's.
        layer_names: its layers.
        vllm_config: where the layers are found, and `additional_config["faback"]`.
        device: where the caches are.

    Raises:
        NoKernelError: layers that no kernel can serve, with all reasons.
        ConfigError: settings that faback does not have.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        context = vllm_config.compilation_config.static_forward_context
        self._layers = [context[name] for name in layer_names]
        first = self._layers[0].impl
        self._config = configuration(vllm_config, batch_invariant=envs.VLLM_BATCH_INVARIANT)
        self._cached = first.attn_type not in CACHELESS
        dtype = stored_dtype(first.kv_cache_dtype, getattr(kv_cache_spec, "dtype", self._config.dtype))
        self._pool = BlockPool(getattr(kv_cache_spec, "block_size", 1), _indexed(device), dtype)
        self._passes: dict[bool, Passes] = {}
        self._rows = torch.zeros(0, dtype=torch.int32, device=device)
        self._recording = False
        self.passes(causal=first.attn_type == "decoder")

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """ALWAYS where there is a kernel that can be recorded, NEVER elsewhere (on a CPU)."""
        config = configuration(vllm_config, batch_invariant=envs.VLLM_BATCH_INVARIANT)
        device = torch.device(vllm_config.device_config.device)
        kernels = Selector(config, Registry.load(config, BUILTINS), device).kernels
        chosen = config.kernel_for(KEY)
        able = [kernel.capabilities(device).features for kernel in kernels if chosen in (kernel.name, "auto")]
        recordable = any("graph" in features for features in able)
        return cls._cudagraph_support if recordable else AttentionCGSupport.NEVER

    def passes(self, *, causal: bool) -> Passes:
        """The facade for causal passes, or for those in which everything sees everything; made when first needed."""
        if causal not in self._passes:
            self._passes[causal] = Passes.of(described(self._layers, causal=causal), self._pool, self._config)
        return self._passes[causal]

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FabackMetadata:
        """Plans a batch.

        Args:
            common_prefix_len: tokens that all requests share, in whole blocks; read once for all of them.
            common_attn_metadata: the batch. Its tensors must stay as they are until the last layer.
            fast_build: makes no difference: plans are cheap.

        Raises:
            BatchError: a field that is missing, contradicts another, or lies on another device.
        """
        common, requests = common_attn_metadata, common_attn_metadata.num_reqs
        check_shapes(common, self._pool.device, cached=self._cached)
        passes = self.passes(causal=bool(common.causal))
        if self._cached:
            layers = zip(passes.layers.values(), self._layers, strict=True)
            self._pool.bind_all((mine, layer.kv_cache) for mine, layer in layers)
        if self._config.checks and not self._recording:
            size, blocks = self._pool.page_size, self._pool.num_blocks
            check_contents(common, cached=self._cached and self._pool.bound, block_size=size, num_blocks=blocks)
        if self._rows.shape[0] < requests:
            self._rows = torch.arange(2 * requests, dtype=torch.int32, device=self.device)
        batch = batch_of(common, self._rows[:requests], common_prefix_len)
        plan = passes.capture(batch) if self._recording else passes.plan(batch)
        assert batch.out_cache_loc is not None
        return FabackMetadata(batch.num_tokens, batch.out_cache_loc, batch, passes, plan)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> FabackMetadata:
        """Plans a batch whose tensors stay while their contents change; called outside of the recording."""
        self._recording = True
        try:
            return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata)
        finally:
            self._recording = False


def _indexed(device: torch.device) -> torch.device:
    """The device as tensors on it name it."""
    return torch.empty(0, device=device).device
