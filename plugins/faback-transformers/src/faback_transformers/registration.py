"""What Transformers finds under faback's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from faback_transformers.attention import NAME, PACKED, AttentionContext, attention
from faback_transformers.continuous import PAGED, ContinuousAttention, offered
from faback_transformers.dense import DenseAttention

Tensor = torch.Tensor


class Attention:
    """The attention function "faback": of packed batches where the call brings a context, else of padded ones.

    Args:
        kernels: as in `BackendConfig`, for padded batches.
    """

    def __init__(self, kernels: str | Mapping[str, str] = "auto") -> None:
        self._dense = DenseAttention(kernels)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        faback_context: AttentionContext | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """See `attention` and `DenseAttention.attend`. No weights are returned."""
        if faback_context is not None:
            return attention(module, query, key, value, None, faback_context=faback_context, **options)
        return self._dense.attend(module, query, key, value, attention_mask, options), None


def no_mask(*args: Any, **kwargs: Any) -> None:
    """The mask function of packed batches: a plan says who sees what, so no mask is built."""


def register(kernels: str | Mapping[str, str] = "auto") -> None:
    """Makes faback's names known to Transformers; importing the package does it.

    Args:
        kernels: as in `BackendConfig`, for models that are called without a generator.
    """
    AttentionInterface.register(NAME, Attention(kernels))
    AttentionMaskInterface.register(NAME, sdpa_mask)
    AttentionInterface.register(PACKED, attention)
    AttentionMaskInterface.register(PACKED, no_mask)
    if offered():
        AttentionInterface.register(PAGED, ContinuousAttention(kernels))
