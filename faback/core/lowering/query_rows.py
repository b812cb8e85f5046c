"""window, chunk, direction -> query rows: each query a row of its own over one contiguous span of keys."""

from __future__ import annotations

import attrs

from faback.core.config import BackendConfig
from faback.core.contracts import Lowering, PlanContext
from faback.core.hooks import hookimpl
from faback.core.kernel import KernelRequest
from faback.core.segment import Segment, Visibility
from faback.core.workspace import Workspace

SPANS = frozenset({"window", "row_window", "chunk"})
UNSUITED = frozenset({"keep", "tail", "tail_only", "raw_kv", "sharded"})


class QueryRows(Lowering):
    """Without a kept prefix or a tail, what a query sees is a span [low, high): a row with one query at its end.

    Nothing is copied: the rows point into the same tables, with a start offset.
    """

    key = "query_rows"
    removes = frozenset({"non_causal", "window", "window_right", "row_window", "chunk", "positions", "q_len"})

    def becomes(self, request: KernelRequest) -> tuple[KernelRequest, ...]:
        if request.features & UNSUITED:
            return ()
        start = {"start"} if request.features & SPANS else frozenset()
        return (attrs.evolve(request, features=request.features - self.removes | start),)

    def lower(self, segment: Segment, ws: Workspace, ctx: PlanContext) -> tuple[Segment, ...]:
        view = segment.kv
        assert view is not None
        table = ws.fill("query_rows", (3, segment.tokens), ws.ops.query_rows, segment=segment)
        moved = view.start is not None or not segment.features().isdisjoint(SPANS)
        rows = attrs.evolve(
            segment,
            rows=segment.tokens,
            cu_seqlens_q=ws.uniform_offsets(segment.tokens),
            max_seqlen_q=1,
            kv_len=table[0],
            kv=attrs.evolve(view, start=table[1] if moved else None, req_pool_indices=table[2]),
            visibility=Visibility(),
            positions=None,
            q_len=None,
        )
        return (rows,)


@hookimpl
def faback_lowerings(config: BackendConfig) -> list[Lowering]:
    return [QueryRows()]
