"""The generator's decode and verify passes as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from faback import AttentionBackend, ForwardBatch
from faback.graph_runner import GraphMemory, GraphRunner, capture_all
from faback_transformers.packing import PackedBatch

Tensor = torch.Tensor
Forward = Callable[[Tensor, Tensor], Tensor]
"""`forward(input_ids [1, tokens], position_ids [1, tokens]) -> logits [tokens, vocabulary]`, the plan already made."""


@attrs.frozen(eq=False)
class StepGraphs:
    """Recorded passes of a generator, by forward mode.

    Attributes:
        runners: of "decode", and of "target_verify" where the generator speculates.
        memory: what they take.
    """

    runners: dict[str, GraphRunner]
    memory: GraphMemory

    @classmethod
    def record(
        cls, backend: AttentionBackend, forward: Forward, max_requests: int, *, progress: bool = False
    ) -> StepGraphs:
        """Records every usual number of requests.

        Args:
            backend: planned by nobody else while a graph runs.
            forward: the model.
            max_requests: the largest number.
            progress: show a bar.
        """

        def model(batch: ForwardBatch, input_ids: Tensor, position_ids: Tensor) -> Tensor:
            return forward(input_ids[None], position_ids[None])

        largest = {"decode": _decode(backend, max_requests)}
        if backend.config.speculative is not None:
            largest["target_verify"] = _verify(backend, max_requests)
        runners = {}
        for mode, batch in largest.items():
            ids = torch.zeros(batch.num_tokens, dtype=torch.int64, device=backend.device)
            runners[mode] = GraphRunner(backend, model, batch, {"input_ids": ids, "position_ids": ids})
        return cls(runners, capture_all(list(runners.values()), progress))

    def run(self, batch: PackedBatch) -> Tensor | None:
        """[tokens, vocabulary] logits, which hold until the next pass; None for passes that are not recorded."""
        runner = self.runners.get(batch.forward.forward_mode)
        if runner is None or runner.size_for(batch.forward.bs) is None:
            return None
        return runner.run(batch.forward, input_ids=batch.input_ids[0], position_ids=batch.position_ids[0])


def _decode(backend: AttentionBackend, requests: int) -> ForwardBatch:
    """A batch with the fields that `packing.pack` gives; contents do not count."""
    zeros = torch.zeros(requests, dtype=torch.int64, device=backend.device)
    return ForwardBatch(
        forward_mode="decode",
        req_pool_indices=zeros,
        seq_lens=zeros,
        out_cache_loc=zeros,
        positions=zeros,
        extend_seq_lens=zeros,
        extend_prefix_lens=zeros,
    )


def _verify(backend: AttentionBackend, requests: int) -> ForwardBatch:
    """A batch with the fields that `packing.pack_drafts` gives, with room for the longest masks."""
    spec = backend.config.speculative
    assert spec is not None
    nodes = spec.num_draft_tokens
    zeros = torch.zeros(requests, dtype=torch.int64, device=backend.device)
    tokens = zeros.repeat(nodes)
    room = requests * nodes * (backend.config.context_len + nodes)
    return ForwardBatch(
        forward_mode="target_verify",
        req_pool_indices=zeros,
        seq_lens=zeros,
        out_cache_loc=tokens,
        positions=tokens,
        verify_lens=zeros,
        custom_mask=torch.zeros(room, dtype=torch.bool, device=backend.device),
    )
