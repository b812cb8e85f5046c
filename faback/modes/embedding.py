"""embedding, and every layer whose keys come with the call: no cache is read or written."""

from __future__ import annotations

import attrs
import torch

from faback.core.batch import ForwardBatch
from faback.core.config import BackendConfig
from faback.core.contracts import Mode, Overlay, PlanContext
from faback.core.hooks import hookimpl
from faback.core.layer import LayerKind
from faback.core.segment import KVWrite, Segment
from faback.core.workspace import Workspace


class Embedding(Mode):
    """`extend_seq_lens[i]` tokens of each request attend to one another, causal unless the layer is not.

    Tokens past the last offset (piecewise graphs pad them) belong to no row and get zeros.
    """

    key = "embedding"
    needs = ("extend_seq_lens",)

    def build(self, batch: ForwardBatch, ws: Workspace, ctx: PlanContext) -> Segment:
        assert batch.extend_seq_lens is not None
        longest = batch.bound("extend_seq_lens", batch.num_tokens)
        return Segment(
            rows=batch.bs,
            tokens=batch.num_tokens,
            cu_seqlens_q=ws.offsets("cu_seqlens_q", batch.extend_seq_lens),
            max_seqlen_q=longest,
            kv_len=batch.extend_seq_lens,
            max_kv_len=longest,
            kv=None,
        )


class NoCache(Overlay):
    """Layers of the KV group "none" have no cache: in any mode they see the keys of the batch alone."""

    key = "no_cache"

    def applies(self, layer: LayerKind) -> bool:
        return not layer.cached

    def transform(
        self, segment: Segment, layer: LayerKind, batch: ForwardBatch, ws: Workspace, ctx: PlanContext
    ) -> Segment:
        if segment.kv is None:
            return segment
        lens = batch.extend_seq_lens
        if lens is None:
            lens = ws.row_lens("raw_lens", segment.max_seqlen_q, active=batch.req_pool_indices)
        return attrs.evolve(
            segment,
            kv=None,
            kv_len=lens,
            max_kv_len=segment.max_seqlen_q,
            write=KVWrite(),
            tail=None,
            positions=None,
            absolute=_whole(batch),
        )


def _whole(batch: ForwardBatch) -> bool:
    """Whether the host knows that the batch brings its requests from their first token on."""
    total, new = batch.seq_lens_cpu, batch.extend_seq_lens_cpu
    return total is not None and new is not None and torch.equal(total.long(), new.long())


@hookimpl
def faback_modes(config: BackendConfig) -> list[Mode]:
    return [Embedding()]


@hookimpl
def faback_overlays(config: BackendConfig) -> list[Overlay]:
    return [NoCache()]
