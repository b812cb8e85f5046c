"""encoder-decoder: a request's row holds its encoder tokens first and its text behind them."""

from __future__ import annotations

import attrs

from faback.core.batch import ForwardBatch
from faback.core.config import BackendConfig
from faback.core.contracts import Overlay, PlanContext
from faback.core.hooks import hookimpl
from faback.core.layer import LayerKind
from faback.core.segment import KVWrite, Segment, Visibility
from faback.core.workspace import Workspace


class CrossAttention(Overlay):
    """Every query sees all encoder tokens of its request: no causality, no window, no tree, no text.

    Keys and values are the encoder's and go to `encoder_out_cache_loc`, in the passes that bring them.
    """

    key = "cross_attention"
    honours = frozenset({"non_causal"})

    def applies(self, layer: LayerKind) -> bool:
        return layer.cross

    def transform(
        self, segment: Segment, layer: LayerKind, batch: ForwardBatch, ws: Workspace, ctx: PlanContext
    ) -> Segment:
        batch.check_fields(("encoder_lens",))
        assert batch.encoder_lens is not None
        return attrs.evolve(
            segment,
            kv_len=batch.encoder_lens,
            max_kv_len=batch.bound("encoder_lens", ctx.config.context_len),
            visibility=Visibility(causal=False),
            tail=None,
            positions=None,
            write=KVWrite(batch.encoder_out_cache_loc),
        )


class EncoderOffset(Overlay):
    """Text token t of a request with E encoder tokens is token E + t of its row."""

    key = "encoder_offset"

    def applies(self, layer: LayerKind) -> bool:
        return not layer.cross and layer.cached

    def transform(
        self, segment: Segment, layer: LayerKind, batch: ForwardBatch, ws: Workspace, ctx: PlanContext
    ) -> Segment:
        if batch.encoder_lens is None or segment.kv is None:
            return segment
        return attrs.evolve(segment, kv=attrs.evolve(segment.kv, start=batch.encoder_lens))


@hookimpl
def faback_overlays(config: BackendConfig) -> list[Overlay]:
    return [CrossAttention(), EncoderOffset()]
