"""draft extend: after verification the draft model takes in the accepted tokens, a different number per request."""

from __future__ import annotations

import attrs

from faback.core.batch import ForwardBatch
from faback.core.config import BackendConfig
from faback.core.contracts import Mode, PlanContext
from faback.core.errors import BatchError
from faback.core.hooks import hookimpl
from faback.core.segment import Segment
from faback.core.workspace import Workspace
from faback.modes.extend import Extend


class DraftExtend(Extend):
    """An extend by the accepted tokens, whose rows may be padded to one length.

    With `token_stride` request i's tokens begin at i * token_stride, and only the first `extend_seq_lens[i]` are live;
    without it they are packed. Accepting nothing is legal.
    """

    def build(self, batch: ForwardBatch, ws: Workspace, ctx: PlanContext) -> Segment:
        packed = super().build(batch, ws, ctx)
        stride = batch.token_stride
        if stride is None:
            return packed
        if batch.num_tokens != batch.bs * stride:
            wanted = f"{batch.bs} requests * token_stride {stride}"
            raise BatchError("batch.out_cache_loc", wanted=wanted, got=batch.num_tokens)
        return attrs.evolve(
            packed,
            cu_seqlens_q=ws.uniform_offsets(batch.bs, stride),
            max_seqlen_q=min(stride, packed.max_seqlen_q),
            q_len=batch.extend_seq_lens,
        )


@hookimpl
def faback_modes(config: BackendConfig) -> list[Mode]:
    return [DraftExtend("draft_extend")]
