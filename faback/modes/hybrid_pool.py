"""hybrid pool: layers whose cache lives in another, smaller part of the pool, with slots of its own."""

from __future__ import annotations

import attrs

from faback.core.batch import ForwardBatch
from faback.core.config import BackendConfig
from faback.core.contracts import Overlay, PlanContext
from faback.core.hooks import hookimpl
from faback.core.layer import LayerKind
from faback.core.segment import KVWrite, Segment
from faback.core.workspace import Workspace


class HybridPool(Overlay):
    """Reads and writes of a layer go through the slot map of its KV group.

    The map is read where the keys are: a freed slot maps to 0, and nothing that a layer may not see is looked up.
    """

    key = "hybrid_pool"
    after = ("cross_attention", "encoder_offset", "no_cache")

    def applies(self, layer: LayerKind) -> bool:
        return layer.cached

    def transform(
        self, segment: Segment, layer: LayerKind, batch: ForwardBatch, ws: Workspace, ctx: PlanContext
    ) -> Segment:
        slot_map = ctx.pools.kv.slot_map(layer.kv_group)
        if slot_map is None or segment.kv is None:
            return segment
        view = attrs.evolve(segment.kv, slot_map=slot_map)
        return attrs.evolve(segment, kv=view, write=KVWrite(segment.write.slots, slot_map))


@hookimpl
def faback_overlays(config: BackendConfig) -> list[Overlay]:
    return [HybridPool()]
