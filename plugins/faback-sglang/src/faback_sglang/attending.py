"""What the backend of a pass and that of a draft step have in common: one layer's call, in faback's terms."""

from __future__ import annotations

import abc
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from faback import AttentionLayer, BatchError
from faback_sglang.setup import Setup
from faback_sglang.terms import engine_terms

Tensor = torch.Tensor


class Attending(AttentionBackend):
    """SGLang's backend, as far as a forward of a layer goes.

    Args:
        model_runner: SGLang's.
        setup: what was read off it.
    """

    needs_cpu_seq_lens = False

    def __init__(self, model_runner: Any, setup: Setup) -> None:
        super().__init__()
        self.setup = setup
        self.device = model_runner.device
        self.max_context_len = model_runner.model_config.context_len
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.kv_index_translator = model_runner.kv_index_translator
        self.kv_cache_dtype = model_runner.kv_cache_dtype

    @abc.abstractmethod
    def planned_tokens(self) -> int:
        """Tokens of the current pass, padding left out."""

    @abc.abstractmethod
    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, **options: Any) -> Any:
        """`faback.AttentionBackend.forward` with the current plan."""

    def shared_read_ends(self, fm: ForwardMode) -> SharedReadEnds:
        """Kernels may read `req_to_token` and the slot map themselves, up to the last layer."""
        if fm.is_decode() or fm.is_target_verify():
            return SharedReadEnds.POST_REPLAY
        return SharedReadEnds.UNKNOWN

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> Any:
        """See `forward_extend`: the plan knows the mode."""
        return self.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **options)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        q_rope: Tensor | None = None,
        k_rope: Tensor | None = None,
        sinks: Tensor | None = None,
        return_lse: bool = False,
        **unknown: Any,
    ) -> Any:
        """Writes new keys and values, then attends.

        Args:
            q: [tokens, tp_q_head_num * qk_head_dim], tokens beyond the batch's are padding.
            k, v: new keys and values, None where they are in the cache already.
            layer: one of the model's.
            forward_batch: SGLang's; gives the tensor to write into, if it has one.
            save_kv_cache: False if k and v have been written.
            q_rope, k_rope: trailing parts of q and k of absorbed MLA.
            sinks: [tp_q_head_num] logits.
            return_lse: also return float32 [tokens, tp_q_head_num].
            unknown: must be None.

        Returns:
            [tokens, tp_q_head_num * v_head_dim].

        Raises:
            BatchError: an argument that would be ignored, or tensors that do not fit the plan.
        """
        for name, value in unknown.items():
            if value is not None:
                wanted = "None: faback does not honour it"
                raise BatchError(f"{name} of layer {layer.layer_id}", wanted=wanted, got="a value")
        ours = self.setup.layer(layer)
        if not ours.cross:
            k, v, k_rope = (first(x, self.planned_tokens()) for x in (k, v, k_rope))
        options = {"sinks": sinks, "q_rope": q_rope, "k_rope": k_rope, "save_kv_cache": save_kv_cache}
        with engine_terms():
            found = self.attend(q, k, v, ours, out=given_output(forward_batch, ours), return_lse=return_lse, **options)
        out, lse = found if return_lse else (found, None)
        out = out.view(out.shape[0], -1)
        return (out, lse) if return_lse else out


def first(tensor: Tensor | None, tokens: int) -> Tensor | None:
    """Without the padding behind a batch's tokens."""
    return tensor if tensor is None or tensor.shape[0] <= tokens else tensor[:tokens]


def given_output(forward_batch: Any, layer: AttentionLayer) -> Tensor | None:
    """Where SGLang wants the result, by head."""
    out = getattr(forward_batch, "_attn_output", None)
    return None if out is None else out.view(-1, layer.num_q_heads, layer.v_head_dim)
