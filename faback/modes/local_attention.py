"""local attention: layers that see their own chunk of the text only (Llama 4's iRoPE layers), on top of any mode."""

from __future__ import annotations

import attrs

from faback.core.batch import ForwardBatch
from faback.core.config import BackendConfig
from faback.core.contracts import Overlay, PlanContext
from faback.core.errors import BatchError
from faback.core.hooks import hookimpl
from faback.core.layer import LayerKind
from faback.core.segment import Segment
from faback.core.workspace import Workspace


class LocalAttention(Overlay):
    """Token p sees [chunk * (p // chunk), p]. Chunks are counted from the first token, whatever the page size."""

    key = "local_attention"
    after = ("no_cache",)
    honours = frozenset({"chunk"})

    def applies(self, layer: LayerKind) -> bool:
        return layer.chunk is not None and not layer.cross

    def transform(
        self, segment: Segment, layer: LayerKind, batch: ForwardBatch, ws: Workspace, ctx: PlanContext
    ) -> Segment:
        if not segment.absolute:
            wanted = "keys counted from the first token of each request"
            got = f"mode {batch.forward_mode!r} over a part of them"
            raise BatchError("local attention", wanted=wanted, got=got, hint="Bring all keys at once: mode 'one_shot'.")
        return attrs.evolve(segment, visibility=attrs.evolve(segment.visibility, chunk=layer.chunk))


@hookimpl
def faback_overlays(config: BackendConfig) -> list[Overlay]:
    return [LocalAttention()]
