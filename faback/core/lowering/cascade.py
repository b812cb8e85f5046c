"""tree or tail -> cascade: committed keys and tail apart, merged by log-sum-exp."""

from __future__ import annotations

import attrs

from faback.core.config import BackendConfig
from faback.core.contracts import Lowering, PlanContext
from faback.core.hooks import hookimpl
from faback.core.kernel import KernelRequest
from faback.core.segment import Segment, Visibility
from faback.core.workspace import Workspace

POSITIONED = frozenset({"window", "window_right", "row_window", "chunk", "keep", "sharded"})
"""Features of the committed part for which it matters where a query stands."""


class Cascade(Lowering):
    """The best kernel for the long common part, and whatever can do the short rest. Sinks enter at the merge.

    Every query of a tree stands behind all committed keys, so without a window their part needs no causality.
    """

    key = "cascade"
    removes = frozenset({"tail", "tree"})
    merges = True
    priority = 10

    def becomes(self, request: KernelRequest) -> tuple[KernelRequest, ...]:
        if "tail_only" in request.features or "positions" not in request.features:
            return ()
        shared = request.features - {"sinks"} | {"lse"}
        committed = shared - {"tail", "tree"}
        if committed.isdisjoint(POSITIONED):
            committed = committed - {"positions"} | {"non_causal"}
        tail = shared | {"tail_only"}
        return tuple(attrs.evolve(request, features=features) for features in (committed, tail))

    def lower(self, segment: Segment, ws: Workspace, ctx: PlanContext) -> tuple[Segment, ...]:
        assert segment.kv is not None and segment.tail is not None
        committed = attrs.evolve(segment, tail=None)
        if committed.features().isdisjoint(POSITIONED):
            committed = attrs.evolve(committed, positions=None, visibility=Visibility(causal=False))
        return committed, attrs.evolve(segment, committed=False, max_kv_len=0)


@hookimpl
def faback_lowerings(config: BackendConfig) -> list[Lowering]:
    return [Cascade()]
