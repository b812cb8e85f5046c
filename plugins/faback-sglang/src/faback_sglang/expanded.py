"""Un-absorbed MLA prefill: attention over keys that the model expands from latents, in SGLang's two ways.

In parts, the new tokens among themselves and then one chunk of the cached prefix after the other, each with its
log-sum-exp, which the model merges; or at once (`mha_one_shot`).
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from sglang.srt.layers.radix_attention import RadixAttention

from faback import AttentionBackend, BatchError, ForwardBatch
from faback_sglang.attending import first, given_output
from faback_sglang.batches import translate
from faback_sglang.layers import Layers, describe
from faback_sglang.pools import engine_pools
from faback_sglang.registration import NAME
from faback_sglang.setup import Setup, known

Tensor = torch.Tensor


def use_unabsorbed_prefill() -> None:
    """Lets SGLang's DeepSeek models choose between absorbed and un-absorbed attention as they do with FlashAttention.

    Without an entry they would fall back to the rule of the Triton backend.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
        handle_attention_fa3,
    )
    from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS

    AttentionBackendRegistry.register(NAME, handle_attention_fa3)
    if NAME not in FORWARD_ABSORB_CORE_ATTENTION_BACKENDS:
        FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.append(NAME)


@attrs.frozen(eq=False)
class Expanded:
    """Those layers of an MLA model, with a backend of their own: only passes that expand keys plan for them.

    Attributes:
        backend: faback's.
        layers: by SGLang's module.
    """

    backend: AttentionBackend
    layers: Layers

    @classmethod
    def of(cls, model_runner: Any, setup: Setup, registry: Any = None) -> Expanded | None:
        """None where the model has no such layers."""
        layers = describe(model_runner, expanded=True)
        if not layers.ours:
            return None
        pools = engine_pools(model_runner, layers.slots_of)
        return cls(AttentionBackend(setup.config, pools, layers.distinct, registry=registry), layers)

    def forward(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: RadixAttention, fb: Any, plans: dict[Any, Any]
    ) -> Any:
        """Attends to the keys of the call.

        Args:
            q: [tokens, tp_q_head_num * qk_head_dim].
            k, v: expanded; those of the new tokens, of a chunk of the prefix, or of both.
            layer: SGLang's.
            fb: SGLang's batch, which says which keys these are.
            plans: of this pass, by what the keys are.

        Returns:
            [tokens, tp_q_head_num, v_head_dim]; with `fb.mha_return_lse` also float32 [tokens, tp_q_head_num].
        """
        ours = known(self.layers, layer)
        if k is None or v is None:
            raise BatchError(f"k and v of layer {layer.layer_id}", wanted="expanded keys and values", got=None)
        return_lse = bool(fb.mha_return_lse)
        which = self._which(fb)
        if (which, return_lse) not in plans:
            plans[which, return_lse] = self.backend.plan(self._batch(fb, which), return_lse=return_lse)
        plan = plans[which, return_lse]
        k, v = k.view(-1, ours.num_kv_heads, ours.head_dim), v.view(-1, ours.num_kv_heads, ours.v_head_dim)
        if which == "extend":
            k, v = first(k, plan.batch.num_tokens), first(v, plan.batch.num_tokens)
        out = given_output(fb, ours)
        return self.backend.forward(q, k.to(q.dtype), v.to(q.dtype), ours, out=out, return_lse=return_lse, plan=plan)

    @staticmethod
    def _which(fb: Any) -> Any:
        """Which keys the call brings: "extend", "one_shot", or the number of a chunk of the prefix."""
        if fb.attn_attend_prefix_cache:
            if fb.prefix_chunk_idx is None or fb.prefix_chunk_seq_lens is None:
                wanted = "the chunk of the prefix that k and v hold"
                raise BatchError("forward_batch.prefix_chunk_idx", wanted=wanted, got=None)
            return int(fb.prefix_chunk_idx)
        return "one_shot" if fb.mha_one_shot else "extend"

    @staticmethod
    def _batch(fb: Any, which: Any) -> ForwardBatch:
        batch = translate(fb)
        if which == "extend":
            return batch
        tokens = batch.num_tokens
        if which == "one_shot":
            return attrs.evolve(batch, forward_mode=which, out_cache_loc=None, num_tokens=tokens)
        chunk = {"chunk_lens": fb.prefix_chunk_seq_lens[which], "chunk_starts": fb.prefix_chunk_starts[which]}
        return attrs.evolve(batch, forward_mode="prefix_chunk", out_cache_loc=None, num_tokens=tokens, extras=chunk)
