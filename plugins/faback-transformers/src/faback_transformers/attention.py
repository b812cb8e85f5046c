"""Attention in packed batches, for a generator.

Transformers finds attention functions by name in a table of its own. What a function needs beyond q, k and v comes as
keyword arguments of the model's forward, which models hand on to every layer: that is how a running generator's
context gets here, and why no state is kept in this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Protocol

import attrs
import torch
from transformers import PreTrainedModel

from faback import AttentionBackend, AttentionLayer, BatchError, FabackError

Tensor = torch.Tensor

NAME = "faback"
"""What `attn_implementation` calls it."""
PACKED = "faback_packed"
"""The same for packed batches only, whose plan says who sees what: no mask is built for them."""


class AttentionContext(Protocol):
    """What the attention function is given as `faback_context=` of the model's forward."""

    def attend(self, module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]) -> Tensor:
        """One layer of one forward pass over a packed batch.

        Args:
            module: the model's attention module.
            q: [tokens, num_q_heads, head_dim].
            k: [tokens, num_kv_heads, head_dim].
            v: [tokens, num_kv_heads, v_head_dim].
            options: what else the model said: "scaling", "sliding_window", "softcap", "s_aux" ...

        Returns:
            [tokens, num_q_heads, v_head_dim].
        """
        ...


@attrs.define(eq=False)
class PagedContext:
    """Sends the layers of one model through one backend, and counts how long that takes.

    Attributes:
        backend: planned before each forward pass.
        layers: by `layer_idx` of the model's attention modules.
        seconds: time spent in the backend by all layers so far, on the host.
    """

    backend: AttentionBackend
    layers: Mapping[int, AttentionLayer]
    seconds: float = 0.0

    def attend(self, module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]) -> Tensor:
        """See `AttentionContext`."""
        start = perf_counter()
        layer = self.layers[module.layer_idx]  # type: ignore[index]
        out = self.backend.forward(q, k, v, layer, sinks=options.get("s_aux"))
        self.seconds += perf_counter() - start
        return out  # type: ignore[return-value]


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    faback_context: AttentionContext | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function of packed batches, as Transformers calls it.

    Args:
        module: the attention module.
        query: [1, num_q_heads, tokens, head_dim], requests packed one after another.
        key: [1, num_kv_heads, tokens, head_dim], the new tokens only.
        value: [1, num_kv_heads, tokens, v_head_dim] likewise.
        attention_mask: not looked at: who sees what is in the context's plan.
        faback_context: the running generator's.
        options: "scaling", "sliding_window" ...

    Returns:
        [1, tokens, num_q_heads, v_head_dim], and no weights.

    Raises:
        FabackError: the model was called without a context.
        BatchError: the batch is not packed.
    """
    if faback_context is None:
        hint = (
            "This implementation serves packed batches from a paged cache: use faback_transformers.PagedGenerator, "
            'or model.set_attn_implementation("faback") or "sdpa" for a plain forward pass.'
        )
        raise FabackError(f"{PACKED!r} outside a generator", wanted="faback_context", got=None, hint=hint)
    if query.shape[0] != 1:
        hint = "Pack the requests one after another: input_ids [1, tokens]."
        raise BatchError("query of the attention function", wanted="batch size 1", got=query.shape[0], hint=hint)
    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    return faback_context.attend(module, q, k, v, options).unsqueeze(0), None


@contextmanager
def attending(model: PreTrainedModel) -> Iterator[None]:
    """Switches a model to packed batches, and back to what it had."""
    before = model.config._attn_implementation
    model.set_attn_implementation(PACKED)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
