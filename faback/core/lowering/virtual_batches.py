"""chunk -> virtual batches: each row cut at chunk borders into rows that attend to one chunk."""

from __future__ import annotations

import attrs

from faback.core.config import BackendConfig
from faback.core.contracts import Lowering, PlanContext
from faback.core.hooks import hookimpl
from faback.core.kernel import KernelRequest
from faback.core.segment import Segment
from faback.core.workspace import Workspace

UNSUITED = frozenset(
    {"positions", "keep", "tail", "tail_only", "raw_kv", "q_len", "sharded", "non_causal", "row_window"}
)


class VirtualBatches(Lowering):
    """A piece's queries are the last tokens of its keys, so windows stay what they are.

    The cut is made on the device from device lengths; only the number of pieces is bounded on the host: a row of n
    queries touches at most (n - 2) // chunk + 2 chunks.
    """

    key = "virtual_batches"
    removes = frozenset({"chunk"})
    priority = 5

    def becomes(self, request: KernelRequest) -> tuple[KernelRequest, ...]:
        if request.features & UNSUITED:
            return ()
        return (attrs.evolve(request, features=request.features - {"chunk"} | {"start"}),)

    def lower(self, segment: Segment, ws: Workspace, ctx: PlanContext) -> tuple[Segment, ...]:
        chunk, view, rows = segment.visibility.chunk, segment.kv, segment.rows
        assert chunk is not None and view is not None
        per_row = 1 if segment.max_seqlen_q <= 1 else (segment.max_seqlen_q - 2) // chunk + 2
        pieces = min(rows * per_row, 2 * rows + segment.tokens // chunk)
        table = ws.fill("virtual_batches", (4, pieces + 1), ws.ops.virtual_batches, segment=segment)
        piece = attrs.evolve(
            segment,
            rows=pieces,
            cu_seqlens_q=table[0],
            max_seqlen_q=min(segment.max_seqlen_q, chunk),
            kv_len=table[1, :-1],
            max_kv_len=min(segment.max_kv_len, chunk),
            kv=attrs.evolve(view, start=table[2, :-1], req_pool_indices=table[3, :-1]),
            visibility=attrs.evolve(segment.visibility, chunk=None),
        )
        return (piece,)


@hookimpl
def faback_lowerings(config: BackendConfig) -> list[Lowering]:
    return [VirtualBatches()]
