"""start offset, slot map, keys of the batch, block table -> dense table: slots written out, row by row."""

from __future__ import annotations

import attrs

from faback.core.config import BackendConfig
from faback.core.contracts import Lowering, PlanContext
from faback.core.hooks import hookimpl
from faback.core.kernel import KernelRequest
from faback.core.segment import KVView, Segment
from faback.core.workspace import Workspace


class DenseTable(Lowering):
    """What was a recipe becomes a table [rows, keys].

    Whole pages stay whole under a slot map. An offset need not be a multiple of the page, and pages of a block table
    may lie apart, so their tables have pages of 1.
    """

    key = "dense_table"
    removes = frozenset({"start", "slot_map", "raw_kv", "block_table"})
    priority = -5

    def becomes(self, request: KernelRequest) -> tuple[KernelRequest, ...]:
        if "sharded" in request.features or "tail_only" in request.features:
            return ()
        whole = request.features.isdisjoint({"start", "raw_kv", "block_table"})
        features = request.features - self.removes | {"dense_table"}
        return (attrs.evolve(request, features=features, page_size=request.page_size if whole else 1),)

    def lower(self, segment: Segment, ws: Workspace, ctx: PlanContext) -> tuple[Segment, ...]:
        view, tail = segment.kv, segment.tail
        continues = tail is not None and tail.slots is None
        width = max(1, segment.max_kv_len + (tail.size if tail is not None and continues else 0))
        # Without a row, tokens of nobody may still become rows that point into the table.
        table = ws.fill("dense_table", (max(1, segment.rows), width), ws.ops.slot_table, segment=segment)
        whole = view is not None and view.start is None and view.page_stride is None
        dense = KVView(
            table,
            ws.uniform_offsets(segment.rows)[:-1],
            view.page_size if view is not None and whole else 1,
            dense=True,
        )
        if view is not None and not view.dense:
            live = ws.lens("live_keys", segment.kv_len, active=view.req_pool_indices)
            segment = attrs.evolve(segment, kv_len=live)
        if tail is not None and tail.slots is not None and view is not None and view.slot_map is not None:
            slots = ws.fill("tail_slots", tuple(tail.slots.shape), ws.ops.translate, tail.slots, view.slot_map)
            tail = attrs.evolve(tail, slots=slots)
        return (attrs.evolve(segment, kv=dense, tail=tail, cu_seqlens_k=None),)


@hookimpl
def faback_lowerings(config: BackendConfig) -> list[Lowering]:
    return [DenseTable()]
