"""draft decode: one step of drafting, a single chain or k branches per request.

`seq_lens` are the committed lengths L. `out_cache_loc` holds a slot per branch and step, read as [bs * topk, steps];
the step writes its column.
"""

from __future__ import annotations

import torch

from faback.core.batch import ForwardBatch
from faback.core.config import BackendConfig, SpeculativeConfig
from faback.core.contracts import Mode, PlanContext
from faback.core.errors import BatchError, ConfigError
from faback.core.hooks import hookimpl
from faback.core.segment import KVView, KVWrite, Segment, Tail
from faback.core.workspace import Workspace


class DraftDecode(Mode):
    """Each branch's newest token sees the committed tokens and its own branch's steps 0 .. s.

    With one branch the drafted tokens already continue the request's row, so this is a decode at length L + s + 1. With
    several, a branch's own slots are a tail of its query. Either way the committed tokens are read from the request's
    own pages, so a partly filled last page needs no copy.
    """

    key = "draft_decode"
    needs = ("draft_step", "out_cache_loc")

    def build(self, batch: ForwardBatch, ws: Workspace, ctx: PlanContext) -> Segment:
        spec, step = speculative(ctx, self.key), batch.draft_step
        assert step is not None
        if not 0 <= step < spec.num_steps:
            raise BatchError("batch.draft_step", wanted=f"0 to {spec.num_steps - 1} (config.speculative)", got=step)
        rows, steps, active = batch.bs, spec.num_steps, batch.req_pool_indices
        slots = _by_branch(batch, rows * spec.topk, steps)
        write = KVWrite(slots[:, step])
        longest = batch.bound("seq_lens", ctx.config.context_len)
        view = KVView(ctx.pools.req_to_token, active, ctx.page_size)
        if spec.topk == 1:
            reach = ws.step_lens("draft_lens", batch.seq_lens, steps=steps, active=active)[step]
            return Segment(
                rows=rows,
                tokens=rows,
                cu_seqlens_q=ws.uniform_offsets(rows),
                max_seqlen_q=1,
                kv_len=reach,
                max_kv_len=longest + step + 1,
                kv=view,
                write=write,
            )
        tail_lens = ws.step_lens("tail_lens", None, steps=steps, active=active)[step]
        return Segment(
            rows=rows,
            tokens=rows * spec.topk,
            cu_seqlens_q=ws.uniform_offsets(rows, spec.topk),
            max_seqlen_q=spec.topk,
            kv_len=batch.seq_lens,
            max_kv_len=longest,
            kv=view,
            tail=Tail(step + 1, tail_lens, slots[:, : step + 1], per_query=True),
            positions=ws.branch_positions("positions", batch.seq_lens, steps=steps, each=spec.topk)[step],
            write=write,
        )


def speculative(ctx: PlanContext, mode: str) -> SpeculativeConfig:
    """The sizes of speculation, or an error that says where they belong."""
    if ctx.config.speculative is None:
        hint = "BackendConfig(speculative=SpeculativeConfig(topk=..., num_steps=..., num_draft_tokens=...))"
        raise ConfigError("config.speculative", wanted=f"sizes for forward mode {mode!r}", got=None, hint=hint)
    return ctx.config.speculative


def _by_branch(batch: ForwardBatch, branches: int, steps: int) -> torch.Tensor:
    """[branches, steps] slots of the drafted tokens."""
    slots = batch.out_cache_loc
    assert slots is not None
    if slots.shape[0] != branches * steps:
        wanted = f"[{branches} branches * {steps} steps]"
        raise BatchError("batch.out_cache_loc", wanted=wanted, got=list(slots.shape), hint="Branch by branch, by step.")
    return slots.view(branches, steps)


@hookimpl
def faback_modes(config: BackendConfig) -> list[Mode]:
    return [DraftDecode()]
