"""extend: the new tokens of each request, after none, some or all of it was cached. mixed: decode rows among them."""

from __future__ import annotations

from faback.core.batch import ForwardBatch
from faback.core.config import BackendConfig
from faback.core.contracts import Mode, PlanContext
from faback.core.errors import BatchError
from faback.core.hooks import hookimpl
from faback.core.segment import KVView, KVWrite, Segment
from faback.core.workspace import Workspace


class Extend(Mode):
    """`extend_seq_lens[i]` queries are the last tokens of request i, causal.

    A row with no new token is legal, and so is a row with one: each is judged by its own lengths, so decode rows
    ("mixed") need no rule of their own. With `token_stride` rows are padded to one length: request i's tokens begin at
    i * token_stride, and only the first `extend_seq_lens[i]` are live.
    """

    needs = ("out_cache_loc", "extend_seq_lens")

    def __init__(self, key: str) -> None:
        self.key = key

    def build(self, batch: ForwardBatch, ws: Workspace, ctx: PlanContext) -> Segment:
        assert batch.extend_seq_lens is not None
        stride, most = batch.token_stride, batch.bound("extend_seq_lens", batch.num_tokens)
        if stride is not None and batch.num_tokens < batch.bs * stride:
            wanted = f"at least {batch.bs} requests * token_stride {stride}"
            raise BatchError("batch.out_cache_loc", wanted=wanted, got=batch.num_tokens)
        padded = stride is not None
        return Segment(
            rows=batch.bs,
            tokens=batch.num_tokens,
            cu_seqlens_q=ws.uniform_offsets(batch.bs, stride)
            if stride is not None
            else ws.offsets("cu_seqlens_q", batch.extend_seq_lens),
            max_seqlen_q=most if stride is None else stride,
            kv_len=batch.seq_lens,
            max_kv_len=batch.bound("seq_lens", ctx.config.context_len),
            kv=KVView(ctx.pools.req_to_token, batch.req_pool_indices, ctx.page_size),
            q_len=batch.extend_seq_lens if padded else None,
            write=KVWrite(batch.out_cache_loc),
        )


@hookimpl
def faback_modes(config: BackendConfig) -> list[Mode]:
    return [Extend("extend"), Extend("mixed")]
