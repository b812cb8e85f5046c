"""Forward modes for attention that Transformers calls by itself, and the registry that has them.

"dense": padded batches, whose keys come with the call, a stretch of them for each row, or under a mask. "continuous":
packed ones, whose keys lie in the pages of Transformers' own cache or come with the call.
"""

from __future__ import annotations

import sys

import attrs
import torch

from faback import BackendConfig, ForwardBatch
from faback.builtins import BUILTINS
from faback.core.contracts import Mode, Overlay, PlanContext
from faback.core.hooks import hookimpl
from faback.core.layer import LayerKind
from faback.core.registry import Registry
from faback.core.segment import KVView, Segment, Tail, Visibility
from faback.core.workspace import Workspace

Tensor = torch.Tensor

DENSE = "dense"
CONTINUOUS = "continuous"


class Dense(Mode):
    """Rows of `token_stride` queries; row b sees `seq_lens[b]` keys from `key_starts[b]` on, of those that come along.

    `key_starts` is int32 [bs + 1]. Queries stand at the end of their row's keys, or where `positions` says, counted
    from the row's first key.
    """

    key = DENSE
    needs = ("token_stride", "key_starts")

    def build(self, batch: ForwardBatch, ws: Workspace, ctx: PlanContext) -> Segment:
        assert batch.token_stride is not None
        return Segment(
            rows=batch.bs,
            tokens=batch.num_tokens,
            cu_seqlens_q=ws.uniform_offsets(batch.bs, batch.token_stride),
            max_seqlen_q=batch.token_stride,
            kv_len=batch.seq_lens,
            max_kv_len=batch.bound("seq_lens", 0),
            kv=None,
            cu_seqlens_k=batch.extras["key_starts"],
            positions=batch.positions,
        )


class Continuous(Mode):
    """Rows of queries from `query_starts` on, the last of their row's `seq_lens` keys.

    `query_starts` is int32 [bs + 1]. Keys lie in `pages`, an int32 block table [bs, pages] of the layer's cache, where
    they have been stored before, or come with the call, row after row from `key_starts`, int32 [bs + 1], on.
    """

    key = CONTINUOUS
    needs = ("query_starts",)

    def build(self, batch: ForwardBatch, ws: Workspace, ctx: PlanContext) -> Segment:
        pages: Tensor | None = batch.extras["pages"]
        longest = batch.bound("query_lens", batch.num_tokens)
        single = longest == 1 and batch.bs == batch.num_tokens
        view = None
        if pages is not None:
            size = ctx.page_size
            view = KVView(pages, ws.uniform_offsets(batch.bs)[:-1], size, dense=True, page_stride=size)
        return Segment(
            rows=batch.bs,
            tokens=batch.num_tokens,
            cu_seqlens_q=ws.uniform_offsets(batch.bs) if single else batch.extras["query_starts"],
            max_seqlen_q=longest,
            kv_len=batch.seq_lens,
            max_kv_len=batch.bound("seq_lens", 0),
            kv=view,
            cu_seqlens_k=None if view is not None else batch.extras["key_starts"],
            absolute=view is not None,
        )


class Given(Overlay):
    """A mask that follows no rule: keys become a tail, whose mask says who sees what.

    `seen` is bool [tokens, keys]. After the overlay for layers without a cache, which knows no tables.
    """

    key = "given_mask"
    after = ("no_cache",)

    def applies(self, layer: LayerKind) -> bool:
        return not layer.cached

    def transform(
        self, segment: Segment, layer: LayerKind, batch: ForwardBatch, ws: Workspace, ctx: PlanContext
    ) -> Segment:
        seen: Tensor | None = batch.extras.get("seen")
        if seen is None:
            return segment
        rows, width, starts = segment.rows, seen.shape[1], batch.extras["key_starts"]
        table = ws.fill("key_slots", (rows, width), _slots, starts)
        nothing = ws.fill("no_keys", (rows,), _constant, value=0)
        return attrs.evolve(
            segment,
            kv=KVView(table, ws.uniform_offsets(rows)[:-1], 1, dense=True),
            kv_len=nothing,
            max_kv_len=0,
            cu_seqlens_k=None,
            positions=None,
            visibility=Visibility(),
            tail=Tail(size=width, lens=ws.fill("all_keys", (rows,), _constant, value=width), mask=seen),
        )


def _slots(out: Tensor, starts: Tensor) -> None:
    """out[b, t] = starts[b] + t."""
    out.copy_(starts[:-1, None] + torch.arange(out.shape[1], device=out.device))


def _constant(out: Tensor, *, value: int) -> None:
    """out = value."""
    out.fill_(value)


@hookimpl
def faback_modes(config: BackendConfig) -> list[Mode]:
    return [Dense(), Continuous()]


@hookimpl
def faback_overlays(config: BackendConfig) -> list[Overlay]:
    return [Given()]


def registry(config: BackendConfig) -> Registry:
    """All plugins, and what is in this module."""
    found = Registry.load(config, BUILTINS)
    found.register(sys.modules[__name__], "transformers_modes", "faback-transformers")
    return found
