"""block_sparse_extend, block_sparse_decode: passes whose queries see some blocks of their requests."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from faback.core.batch import ForwardBatch
from faback.core.contracts import Mode, PlanContext
from faback.core.errors import BatchError, ConfigError
from faback.core.layer import LayerKind
from faback.core.segment import Segment
from faback.core.workspace import Workspace
from faback_block_sparse.fills import chosen, pieces
from faback_block_sparse.memory import Memory
from faback_block_sparse.options import NAME
from faback_block_sparse.segment import BlockSparseSegment, Choice
from faback_block_sparse.summaries import KindSummaries, scores

Tensor = torch.Tensor


class BlockSparse(Mode):
    """Another mode's pass, in which block-sparse layers see some blocks and all others what they always see.

    The batch brings `extras["query_summary"]`: what the queries will probably look like.

    Args:
        plain: the other mode: "decode" or "extend".
        memory: what all modes of the backend remember together.
        limit: the most tokens of a request that a plan takes into its summaries.

    Attributes:
        memory: likewise.
    """

    def __init__(self, plain: Mode, memory: Memory, limit: int | None = None) -> None:
        self.key = f"{NAME}_{plain.key}"
        self.needs = (*plain.needs, "query_summary")
        self.memory, self._plain, self._limit = memory, plain, limit

    def bind(self, ctx: PlanContext) -> None:
        self.memory.bind(ctx)

    def release(self, req_pool_indices: Tensor) -> None:
        self.memory.release(req_pool_indices)

    def build(self, batch: ForwardBatch, ws: Workspace, ctx: PlanContext) -> Segment:
        if batch.token_stride is not None:
            hint = "Give the rows' tokens one after another, padding behind the last."
            raise BatchError("batch.token_stride", wanted="None", got=batch.token_stride, hint=hint)
        query = self._query(batch, ctx)
        segment = self._plain.build(batch, ws, ctx)
        size = self.memory.options.block_size
        known = self.memory.catch_up(segment, ws, ctx, self._limit)
        parts = ws.fill("pieces", (4, _pieces(segment, size) + 1), pieces, segment=segment, block=size)
        choices = {
            kind: self._choice(summaries, segment, query, known, parts, ws, ctx)
            for kind, summaries in self.memory.kinds.items()
        }
        return BlockSparseSegment.of(segment, choices)

    def calls(self, segment: Segment, layer: LayerKind, ctx: PlanContext) -> tuple[Segment, ...]:
        if layer not in self.memory.kinds:
            return (segment,)
        if not isinstance(segment, BlockSparseSegment) or segment.features():
            got = ", ".join(sorted(segment.features())) or "another segment"
            hint = "An overlay has varied them; it and block-sparse modes do not go together."
            raise ConfigError("block-sparse layers", wanted="the mode's own causal segment", got=got, hint=hint)
        return (attrs.evolve(segment, choice=segment.choices[layer]),)

    def _choice(
        self,
        summaries: KindSummaries,
        segment: Segment,
        query: Tensor,
        known: Tensor,
        parts: Tensor,
        ws: Workspace,
        ctx: PlanContext,
    ) -> Choice:
        options = self.memory.options
        size, n = options.block_size, parts.shape[1] - 1
        blocks = -(-segment.max_kv_len // size)
        k = min(options.top_k, blocks)
        shape, floats = (segment.rows, blocks), torch.float32
        sizes: dict[str, Any] = {"segment": segment, "block": size, "page": ctx.page_size}
        ranks = ws.fill("scores", shape, scores, query, known[1], dtype=floats, summaries=summaries, **sizes)
        rule: dict[str, Any] = {"block": size, "local": options.local_blocks, "recent": options.all_recent}
        best = ws.fill("chosen", (n, k), chosen, ranks, parts, known[1], **rule)
        width = segment.max_kv_len
        if self._limit is None:
            width = min(width, size * (1 + k + options.run_blocks(segment.max_seqlen_q)))
        return Choice(options, parts, known, best, max(1, width))

    def _query(self, batch: ForwardBatch, ctx: PlanContext) -> Tensor:
        """`extras["query_summary"]`, or a `BatchError`."""
        query, memory = batch.extras["query_summary"], self.memory
        wanted = (
            f"float [{batch.bs}, heads, {memory.dim}] or [{memory.count} layers, {batch.bs}, heads, {memory.dim}] "
            f"with heads of {sorted(set(memory.heads))} on {ctx.device}"
        )
        if not isinstance(query, Tensor):
            raise BatchError("batch.extras['query_summary']", wanted=wanted, got=type(query).__name__)
        *layers, bs, heads, dim = query.shape if query.ndim in (3, 4) else (0, 0, 0)
        fits = (bs, dim) == (batch.bs, memory.dim) and heads in memory.heads and layers in ([], [memory.count])
        if not fits or not query.is_floating_point() or query.device != ctx.device:
            got = f"{query.dtype} {list(query.shape)} on {query.device}"
            hint = "A request's last queries will do: `faback_block_sparse.QueryMemory` keeps them."
            raise BatchError("batch.extras['query_summary']", wanted=wanted, got=got, hint=hint)
        return query


def _pieces(segment: Segment, block: int) -> int:
    """Most pieces: a row of n queries touches at most (n - 2) // block + 2 blocks."""
    each = 1 if segment.max_seqlen_q <= 1 else (segment.max_seqlen_q - 2) // block + 2
    return min(segment.rows * each, 2 * segment.rows + segment.tokens // block)
