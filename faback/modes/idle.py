"""idle: a rank without work takes part in the step and attends to nothing."""

from __future__ import annotations

from faback.core.batch import ForwardBatch
from faback.core.config import BackendConfig
from faback.core.contracts import Mode, PlanContext
from faback.core.hooks import hookimpl
from faback.core.segment import KVView, Segment
from faback.core.workspace import Workspace


class Idle(Mode):
    """No row has a query: whatever tokens the batch carries are padding, get zeros and write nothing."""

    key = "idle"

    def build(self, batch: ForwardBatch, ws: Workspace, ctx: PlanContext) -> Segment:
        return Segment(
            rows=batch.bs,
            tokens=batch.num_tokens,
            cu_seqlens_q=ws.uniform_offsets(batch.bs, 0),
            max_seqlen_q=0,
            kv_len=batch.seq_lens,
            max_kv_len=batch.bound("seq_lens", ctx.config.context_len),
            kv=KVView(ctx.pools.req_to_token, batch.req_pool_indices, ctx.page_size),
        )


@hookimpl
def faback_modes(config: BackendConfig) -> list[Mode]:
    return [Idle()]
