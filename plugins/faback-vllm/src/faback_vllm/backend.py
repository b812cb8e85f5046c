"""What vLLM asks about the backend before it chooses it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf

from faback import BackendConfig, NoKernelError
from faback.builtins import BUILTINS
from faback.core.config import ATTENTION_DTYPES
from faback.core.kernel import KernelRequest
from faback.core.registry import Registry
from faback.core.select import Selector
from faback_vllm import NAME
from faback_vllm.builder import FabackMetadataBuilder
from faback_vllm.impl import FabackImpl
from faback_vllm.layers import stored_dtype
from faback_vllm.mode import KEY


class FabackAttentionBackend(AttentionBackend):
    """Answers from what faback can do; what depends on the installed kernels is asked of the selector."""

    supported_dtypes: ClassVar[list[torch.dtype]] = list(ATTENTION_DTYPES)
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"]
    forward_includes_kv_cache_update: bool = True

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[FabackImpl]:
        return FabackImpl

    @staticmethod
    def get_builder_cls() -> type[FabackMetadataBuilder]:
        return FabackMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Any; so blocks of 16 need no page table of their own, and odd ones work as well."""
        return [MultipleOf(1)]

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """faback's `deterministic`, on with VLLM_BATCH_INVARIANT."""
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """No: a kernel's tiles go by max_query_len, which must hold on the device as well."""
        return False

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in tuple(AttentionType)

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """Why no kernel of faback serves such a layer here, None if one does."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        config = BackendConfig(context_len=1, dtype=dtype)
        request = KernelRequest(
            forward_mode=KEY,
            device=device.type,
            arch=0 if device_capability is None or device.type == "cpu" else device_capability.to_int(),
            q_dtype=dtype,
            kv_dtype=stored_dtype(kv_cache_dtype or "auto", getattr(torch, kv_cache_dtype or "", dtype)),
            num_q_heads=1,
            num_kv_heads=1,
            head_dim=head_size,
            v_head_dim=head_size,
            page_size=block_size or 1,
            features=frozenset({"dense_table", "block_table"} | ({"sinks"} if has_sink else set())),
        )
        try:
            Selector(config, Registry.load(config, BUILTINS), device).route(request)
        except NoKernelError as error:
            return str(error)
        return None
