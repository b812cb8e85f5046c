"""sinks -> merge: a kernel that returns its log-sum-exp needs no sinks of its own."""

from __future__ import annotations

import attrs

from faback.core.config import BackendConfig
from faback.core.contracts import Lowering, PlanContext
from faback.core.hooks import hookimpl
from faback.core.kernel import KernelRequest
from faback.core.segment import Segment
from faback.core.workspace import Workspace


class SinkMerge(Lowering):
    """One part, and the sinks enter where parts are merged."""

    key = "sink_merge"
    removes = frozenset({"sinks"})
    merges = True
    priority = -8

    def becomes(self, request: KernelRequest) -> tuple[KernelRequest, ...]:
        return (attrs.evolve(request, features=request.features - {"sinks"} | {"lse"}),)

    def lower(self, segment: Segment, ws: Workspace, ctx: PlanContext) -> tuple[Segment, ...]:
        return (segment,)


@hookimpl
def faback_lowerings(config: BackendConfig) -> list[Lowering]:
    return [SinkMerge()]
