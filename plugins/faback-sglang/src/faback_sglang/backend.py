"""The backend of a model: everything but the steps of drafting."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from sglang.srt.layers.attention.verify_mask import VerifyMask, tree_mask_numel
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.speculative.eagle_utils import TreeMaskMode

from faback import AttentionBackend, AttentionLayer, BatchError, ForwardBatch
from faback_sglang.attending import Attending
from faback_sglang.batches import check_offsets, mode_of, translate
from faback_sglang.captures import Captures, largest
from faback_sglang.expanded import Expanded, use_unabsorbed_prefill
from faback_sglang.setup import Setup
from faback_sglang.terms import engine_terms

Tensor = torch.Tensor


@attrs.frozen(eq=False)
class Metadata:
    """What SGLang keeps of a pass between its start and its layers.

    Attributes:
        plan: faback's.
        tokens: of the pass, padding left out.
        expanded: plans of un-absorbed MLA layers in this pass, made when the first of them comes.
    """

    plan: Any
    tokens: int
    expanded: dict[Any, Any] = attrs.field(factory=dict)


class FabackBackend(Attending):
    """Extend, mixed, decode, verification, draft extend and idle passes, eager and in CUDA graphs.

    Args:
        model_runner: SGLang's, its model loaded and its pools made.
        registry: faback's plugins, as for `faback.AttentionBackend`.

    Raises:
        FabackError: what cannot be honoured, by SGLang's name.
    """

    forward_metadata: Metadata | None

    def __init__(self, model_runner: Any, *, registry: Any = None) -> None:
        with engine_terms():
            setup = Setup.of(model_runner)
            self._faback = AttentionBackend(setup.config, setup.pools, setup.layers.distinct, registry=registry)
        super().__init__(model_runner, setup)
        self.forward_metadata = None
        self._captures = Captures(self._faback)
        self._drafts = model_runner.is_draft_worker
        self._verify_mask: VerifyMask | None = None
        self._expanded = None
        if model_runner.use_mla_backend:
            use_unabsorbed_prefill()
            with engine_terms():
                self._expanded = Expanded.of(model_runner, setup, registry)

    @property
    def verify_mask(self) -> VerifyMask | None:
        """Where SGLang's tree kernel writes the mask of drafted tokens; captured passes read it there."""
        return self._verify_mask

    def planned_tokens(self) -> int:
        return self._metadata().tokens

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plans an eager pass."""
        self.forward_metadata = None
        with engine_terms():
            batch = self._translated(forward_batch)
            if self._faback.config.checks:
                check_offsets(forward_batch, batch)
            plan = self._faback.plan(batch)
        self.forward_metadata = Metadata(plan, batch.num_tokens)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Reserves the metadata of captured passes; afterwards nothing grows.

        Args:
            max_bs: requests of the largest graph.
            max_num_tokens: its tokens.
        """
        config, device = self._faback.config, self._faback.device
        spec = config.speculative
        if spec is None:
            modes = [("decode", 1)]
        elif self._drafts:
            modes = [("decode", 1), ("draft_extend", max(1, max_num_tokens // max_bs))]
        else:
            modes = [("decode", 1), ("target_verify", spec.num_draft_tokens)]
            layout = TreeMaskMode.FULL_MASK if spec.topk > 1 else TreeMaskMode.QLEN_ONLY
            cells = tree_mask_numel(layout, max_bs, spec.num_draft_tokens, self.max_context_len)
            buffer = torch.zeros(cells, dtype=torch.bool, device=device)
            self._verify_mask = VerifyMask(buffer=buffer, mode=layout, max_bs=max_bs, is_read=spec.topk > 1)
        encoder = any(layer.cross for layer in self.setup.layers.distinct)
        with engine_terms():
            self._faback.reserve(
                largest(mode, max_bs, each, device, encoder=encoder, custom_mask=self._static_mask())
                for mode, each in modes
            )

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a graph is recorded (`in_capture`) or replayed: plans once, then brings that plan up to date.

        Recorded kernels read the tensors of the batch that was captured, which are SGLang's own buffers; SGLang has
        filled those when it replays.
        """
        mode = forward_batch.forward_mode
        if mode.is_extend() and not mode.is_target_verify():
            wanted = "a decode, verify or draft extend graph"
            hint = "Leave --cuda-graph-backend-prefill at its default: attention then runs between the graph's pieces."
            raise BatchError("forward_batch.forward_mode", wanted=wanted, got=f"{mode.name} in a full graph", hint=hint)
        self.forward_metadata = None
        with engine_terms():
            if in_capture:
                plan, tokens = self._captures.capture(self._with_static_mask(self._translated(forward_batch)))
            else:
                plan, tokens = self._captures.replay(mode_of(forward_batch), forward_batch)
        self.forward_metadata = Metadata(plan, tokens)

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, **options: Any) -> Any:
        return self._faback.forward(q, k, v, layer, plan=self._metadata().plan, **options)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> Any:
        if self._expanded is not None and layer in self._expanded.layers.ours:
            with engine_terms():
                return self._expanded.forward(q, k, v, layer, forward_batch, self._metadata().expanded)
        return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **options)

    def _translated(self, forward_batch: Any) -> ForwardBatch:
        return translate(forward_batch, self._faback.config.speculative, embedding=self.setup.keeps_no_cache)

    def _with_static_mask(self, batch: ForwardBatch) -> ForwardBatch:
        """A captured tree is read where every later one is written, or copied to."""
        mask = self._static_mask()
        return batch if batch.custom_mask is None or mask is None else attrs.evolve(batch, custom_mask=mask)

    def _static_mask(self) -> Tensor | None:
        found = self._verify_mask
        return found.buffer if found is not None and found.is_read else None

    def _metadata(self) -> Metadata:
        if self.forward_metadata is None:
            hint = "A plan that failed leaves none."
            raise BatchError("forward_metadata", wanted="a call of init_forward_metadata", got=None, hint=hint)
        return self.forward_metadata
