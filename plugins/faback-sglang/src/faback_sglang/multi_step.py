"""The draft model's backend: all steps of a round from one plan."""

from __future__ import annotations

from typing import Any

import torch

from faback import AttentionLayer, BatchError, MultiStepDraft
from faback_sglang.attending import Attending
from faback_sglang.batches import translate_draft
from faback_sglang.captures import Captures, largest
from faback_sglang.setup import Setup
from faback_sglang.terms import engine_terms

Tensor = torch.Tensor


class FabackStepBackend(Attending):
    """What the draft model's layers call in one step; the container plans.

    Args:
        container: plans all steps.
        step: which one, from 0.
        model_runner: the draft model's.
    """

    def __init__(self, container: FabackMultiStepBackend, step: int, model_runner: Any) -> None:
        super().__init__(model_runner, container.setup)
        self._container, self._step = container, step

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Does nothing on an idle rank; a round's steps are planned together, before the first of them."""
        if not forward_batch.forward_mode.is_idle():
            hint = "Call init_forward_metadata of the multi-step backend."
            raise BatchError("forward_batch", wanted="a plan of all steps", got=f"step {self._step} alone", hint=hint)

    def planned_tokens(self) -> int:
        return self._container.planned_tokens()

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, **options: Any) -> Any:
        return self._container.draft.forward(self._step, q, k, v, layer, **options)


class FabackMultiStepBackend:
    """SGLang's container of one backend per step.

    Args:
        model_runner: the draft model's.
        topk: branches of a request.
        speculative_num_steps: drafted tokens per branch; the last one is not attended from.
        registry: faback's plugins, as for `faback.AttentionBackend`.

    Raises:
        FabackError: what cannot be honoured, by SGLang's name.
    """

    needs_cpu_seq_lens = False

    def __init__(self, model_runner: Any, topk: int, speculative_num_steps: int, *, registry: Any = None) -> None:
        self.topk, self.speculative_num_steps = topk, speculative_num_steps
        with engine_terms():
            self.setup = Setup.of(model_runner, topk=topk, num_steps=speculative_num_steps)
            layers = self.setup.layers.distinct
            self.draft = MultiStepDraft(self.setup.config, self.setup.pools, layers, registry=registry)
        self.kv_index_translator = model_runner.kv_index_translator
        self.attn_backends = [FabackStepBackend(self, step, model_runner) for step in range(self.draft.num_steps)]
        self.attn_backend_list = self.attn_backends
        self.forward_metadata = None
        self._captures = Captures(self.draft)
        self._tokens = 0

    def planned_tokens(self) -> int:
        """Tokens of a step."""
        return self._tokens

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plans all steps of an eager round."""
        with engine_terms():
            self.draft.plan(translate_draft(forward_batch, self.topk, self.speculative_num_steps))
        self._tokens = forward_batch.batch_size * self.topk

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Reserves the metadata of captured rounds; afterwards nothing grows."""
        each = self.topk * self.speculative_num_steps
        encoder = any(layer.cross for layer in self.setup.layers.distinct)
        device = self.setup.pools.device
        with engine_terms():
            self.draft.reserve([largest("draft_decode", max_bs, each, device, encoder=encoder, custom_mask=None)])

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a graph of a whole round is recorded or replayed; see `FabackBackend`."""
        with engine_terms():
            if in_capture:
                self._captures.capture(translate_draft(forward_batch, self.topk, self.speculative_num_steps))
            else:
                self._captures.replay("draft_decode", forward_batch)
        self._tokens = forward_batch.batch_size * self.topk

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Nothing: the plan's tensors are filled before the graph."""
