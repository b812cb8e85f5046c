"""encoder-only: layers in which every token sees the whole text, in both directions."""

from __future__ import annotations

import attrs

from faback.core.batch import ForwardBatch
from faback.core.config import BackendConfig
from faback.core.contracts import Overlay, PlanContext
from faback.core.hooks import hookimpl
from faback.core.layer import LayerKind
from faback.core.segment import Segment
from faback.core.workspace import Workspace


class EncoderOnly(Overlay):
    """No causality. A window of such a layer reaches as far to the right as to the left."""

    key = "encoder_only"
    honours = frozenset({"non_causal"})

    def applies(self, layer: LayerKind) -> bool:
        return not layer.causal and not layer.cross

    def transform(
        self, segment: Segment, layer: LayerKind, batch: ForwardBatch, ws: Workspace, ctx: PlanContext
    ) -> Segment:
        return attrs.evolve(segment, visibility=attrs.evolve(segment.visibility, causal=False))


@hookimpl
def faback_overlays(config: BackendConfig) -> list[Overlay]:
    return [EncoderOnly()]
