"""any visibility -> compacted table: each query a row of its own over a list of exactly what it sees."""

from __future__ import annotations

import attrs

from faback.core.config import BackendConfig
from faback.core.contracts import Lowering, PlanContext
from faback.core.hooks import hookimpl
from faback.core.kernel import KernelRequest
from faback.core.segment import KVView, Segment, Visibility
from faback.core.workspace import Workspace

UNSUITED = frozenset({"raw_kv"})


class Compact(Lowering):
    """The last resort: right for every rule, at the price of a table of queries x keys.

    It is what a kept prefix (two spans) and a tree's tail need on a kernel that knows causality only.
    """

    key = "compact"
    removes = frozenset(
        {
            "non_causal", "window", "window_right", "row_window", "chunk", "keep", "positions", "q_len",
            "tail", "tree", "tail_only", "sharded", "start", "slot_map", "block_table",
        }
    )  # fmt: skip
    priority = -10

    def becomes(self, request: KernelRequest) -> tuple[KernelRequest, ...]:
        if request.features & UNSUITED:
            return ()
        return (attrs.evolve(request, features=request.features - self.removes | {"dense_table"}, page_size=1),)

    def lower(self, segment: Segment, ws: Workspace, ctx: PlanContext) -> tuple[Segment, ...]:
        width = max(1, segment.max_kv_len + (0 if segment.tail is None else segment.tail.size))
        tokens = segment.tokens
        flat = ws.fill("compact", (tokens * (1 + width),), ws.ops.compact, segment=segment)
        rows = ws.uniform_offsets(tokens)
        compacted = attrs.evolve(
            segment,
            rows=tokens,
            cu_seqlens_q=rows,
            max_seqlen_q=1,
            kv_len=flat[:tokens],
            max_kv_len=width,
            kv=KVView(flat[tokens:].view(tokens, width), rows[:-1], 1, dense=True),
            visibility=Visibility(),
            tail=None,
            positions=None,
            q_len=None,
            committed=True,
        )
        return (compacted,)


@hookimpl
def faback_lowerings(config: BackendConfig) -> list[Lowering]:
    return [Compact()]
