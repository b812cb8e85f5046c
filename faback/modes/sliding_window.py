"""sliding window: layers in which a token sees its last neighbours only, on top of any mode."""

from __future__ import annotations

import attrs

from faback.core.batch import ForwardBatch
from faback.core.config import BackendConfig
from faback.core.contracts import Overlay, PlanContext
from faback.core.hooks import hookimpl
from faback.core.layer import LayerKind
from faback.core.segment import Segment
from faback.core.workspace import Workspace


class SlidingWindow(Overlay):
    """Token p sees [p - window, p]; in encoder-only layers [p - window, p + window]. Cross-attention has no window."""

    key = "sliding_window"
    honours = frozenset({"window"})

    def applies(self, layer: LayerKind) -> bool:
        return layer.window is not None and not layer.cross

    def transform(
        self, segment: Segment, layer: LayerKind, batch: ForwardBatch, ws: Workspace, ctx: PlanContext
    ) -> Segment:
        right = None if layer.causal else layer.window
        rule = attrs.evolve(segment.visibility, window=(layer.window, right))
        return attrs.evolve(segment, visibility=rule)


@hookimpl
def faback_overlays(config: BackendConfig) -> list[Overlay]:
    return [SlidingWindow()]
