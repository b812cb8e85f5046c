"""decode: one query per request, at its last position, sees the whole request."""

from __future__ import annotations

from faback.core.batch import ForwardBatch
from faback.core.config import BackendConfig
from faback.core.contracts import Mode, PlanContext
from faback.core.hooks import hookimpl
from faback.core.segment import KVView, KVWrite, Segment
from faback.core.workspace import Workspace


class Decode(Mode):
    """The newest token of each request; its key and value are written first. Nothing is computed here at all."""

    key = "decode"
    needs = ("out_cache_loc",)

    def build(self, batch: ForwardBatch, ws: Workspace, ctx: PlanContext) -> Segment:
        return Segment(
            rows=batch.bs,
            tokens=batch.num_tokens,
            cu_seqlens_q=ws.uniform_offsets(batch.bs),
            max_seqlen_q=1,
            kv_len=batch.seq_lens,
            max_kv_len=batch.bound("seq_lens", ctx.config.context_len),
            kv=KVView(ctx.pools.req_to_token, batch.req_pool_indices, ctx.page_size),
            write=KVWrite(batch.out_cache_loc),
        )


@hookimpl
def faback_modes(config: BackendConfig) -> list[Mode]:
    return [Decode()]
