"""target verify: the target model checks drafted tokens, a chain, a ragged chain or a tree.

`seq_lens` are the committed lengths L; request i's drafted tokens already sit in its row behind them.
"""

from __future__ import annotations

import attrs
import torch

from faback.core.batch import ForwardBatch
from faback.core.config import BackendConfig
from faback.core.contracts import Mode, PlanContext
from faback.core.errors import BatchError
from faback.core.hooks import hookimpl
from faback.core.segment import KVView, KVWrite, Segment, Tail
from faback.core.workspace import Workspace
from faback.modes.draft_decode import speculative


class TargetVerify(Mode):
    """All drafted tokens of a request at once.

    A chain is an extend by `num_draft_tokens`, or by `verify_lens[i]` where they differ. A tree (topk > 1) keeps the
    drafted tokens apart as a tail, whose mask says who sees whom; a node stands at L plus the number of its visible
    ancestors, and that position anchors windows and chunks.
    """

    key = "target_verify"
    needs = ("out_cache_loc",)

    def build(self, batch: ForwardBatch, ws: Workspace, ctx: PlanContext) -> Segment:
        spec = speculative(ctx, self.key)
        rows, size, active = batch.bs, spec.num_draft_tokens, batch.req_pool_indices
        longest = batch.bound("seq_lens", ctx.config.context_len)
        if batch.verify_lens is None:
            offsets = ws.uniform_offsets(rows, size)
            lens = ws.row_lens("verify_lens", size, active=active)
        else:
            offsets = ws.offsets("cu_seqlens_q", batch.verify_lens)
            lens = ws.lens("verify_lens", batch.verify_lens, active=active)
        if batch.verify_lens is None and batch.num_tokens < rows * size:
            wanted = f"at least {rows} requests * {size} draft tokens"
            raise BatchError("batch.out_cache_loc", wanted=wanted, got=batch.num_tokens)
        chain = Segment(
            rows=rows,
            tokens=batch.num_tokens,
            cu_seqlens_q=offsets,
            max_seqlen_q=min(size, batch.bound("verify_lens", size)) if batch.verify_lens is not None else size,
            kv_len=batch.seq_lens,
            max_kv_len=longest,
            kv=KVView(ctx.pools.req_to_token, active, ctx.page_size),
            write=KVWrite(batch.out_cache_loc),
        )
        if spec.topk == 1:
            total = ws.sum("kv_len", batch.seq_lens, lens)
            return attrs.evolve(chain, kv_len=total, max_kv_len=longest + size)
        return self._tree(chain, batch, size, lens, ws)

    def _tree(self, chain: Segment, batch: ForwardBatch, size: int, lens: torch.Tensor, ws: Workspace) -> Segment:
        batch.check_fields(("custom_mask",))
        assert batch.custom_mask is not None
        tokens = batch.num_tokens
        bits, mask, positions = ws.tree(batch.custom_mask, batch.seq_lens, chain.cu_seqlens_q, tokens, size)
        tail = Tail(size, lens, mask=mask, positions=positions, bits=bits)
        return attrs.evolve(chain, tail=tail, positions=positions)


@hookimpl
def faback_modes(config: BackendConfig) -> list[Mode]:
    return [TargetVerify()]
