"""block_sparse -> block table: each piece a row of its own over a list of the blocks that it sees."""

from __future__ import annotations

import attrs

from faback.core.contracts import Lowering, PlanContext
from faback.core.kernel import KernelRequest
from faback.core.segment import KVView, Segment
from faback.core.workspace import Workspace
from faback_block_sparse.fills import block_table
from faback_block_sparse.segment import FEATURE, BlockSparseSegment

UNSUITED = frozenset(
    {
        "non_causal", "window", "window_right", "row_window", "chunk", "keep", "positions", "q_len", "tail", "tree",
        "tail_only", "sharded", "start", "slot_map", "raw_kv", "dense_table", "block_table",
    }
)  # fmt: skip
"""What a segment has no longer its own rows with, or a choice knows nothing of."""


class BlockTable(Lowering):
    """Any kernel with causal attention over tables can do the result.

    A piece's queries are the last tokens of its list, and keys are listed in the order of the text: what is causal in
    the list is causal in the text. Blocks are whole pages and all but the last are full, so pages stay pages.
    """

    key = "block_table"
    removes = frozenset({FEATURE})
    priority = 100  # before the rows are made others

    def becomes(self, request: KernelRequest) -> tuple[KernelRequest, ...]:
        if request.features & UNSUITED:
            return ()
        return (attrs.evolve(request, features=request.features - self.removes | {"dense_table"}),)

    def lower(self, segment: Segment, ws: Workspace, ctx: PlanContext) -> tuple[Segment, ...]:
        assert isinstance(segment, BlockSparseSegment) and segment.choice is not None and segment.kv is not None
        choice = segment.choice
        n, width = choice.count, choice.width
        flat = ws.fill("block_table", (n * (1 + width),), block_table, segment=segment, choice=choice)
        table = KVView(flat[n:].view(n, width), ws.uniform_offsets(n)[:-1], segment.kv.page_size, dense=True)
        listed = Segment(
            rows=n,
            tokens=segment.tokens,
            cu_seqlens_q=choice.pieces[0],
            max_seqlen_q=min(segment.max_seqlen_q, choice.options.block_size),
            kv_len=flat[:n],
            max_kv_len=width,
            kv=table,
            write=segment.write,
            exchange=segment.exchange,
            absolute=False,
        )
        return (listed,)
