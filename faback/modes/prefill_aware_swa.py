"""prefill-aware sliding window: a request's prompt stays visible to its sliding layers while it generates.

Switched on by `config.options["prefill_aware_swa"] = {"inclusive": False}`.
"""

from __future__ import annotations

import attrs
import torch

from faback.core.batch import ForwardBatch
from faback.core.config import BackendConfig
from faback.core.contracts import Overlay, PlanContext
from faback.core.errors import ConfigError
from faback.core.hooks import hookimpl
from faback.core.layer import LayerKind
from faback.core.segment import Segment
from faback.core.workspace import Workspace

Tensor = torch.Tensor


class PrefillAwareWindow(Overlay):
    """A prompt itself uses the plain window and its length is remembered; later queries also see all of it.

    A later query at p sees [0, prompt) and [p + 1 - window, p]: here the window counts the token itself, which is the
    field's definition; `inclusive` makes it one token wider, like the plain window.

    In a mixed batch a row is a later one if it brings one token to a request whose prompt is known. Where a prompt's
    last chunk can be a single token, the engine says how long prompts are in `extras["prompt_lens"]` [bs].

    Args:
        inclusive: the window has `window + 1` tokens.
    """

    key = "prefill_aware_swa"
    after = ("sliding_window", "no_cache")
    prompt_modes = ("extend",)
    mixed_modes = ("mixed",)

    def __init__(self, inclusive: bool = False) -> None:
        self._inclusive = inclusive

    def bind(self, ctx: PlanContext) -> None:
        table = ctx.pools.req_to_token
        self._prompts = torch.zeros(table.shape[0], dtype=torch.int32, device=table.device)

    def release(self, req_pool_indices: Tensor) -> None:
        self._prompts[req_pool_indices.long()] = 0

    def applies(self, layer: LayerKind) -> bool:
        if layer.window == 0 and not self._inclusive:
            hint = "Give such layers a window of 1, or say inclusive=True."
            raise ConfigError("layer.window", wanted="at least the token itself, which it counts", got=0, hint=hint)
        return layer.window is not None and layer.causal and layer.cached and not layer.cross

    def transform(
        self, segment: Segment, layer: LayerKind, batch: ForwardBatch, ws: Workspace, ctx: PlanContext
    ) -> Segment:
        rows, window = batch.req_pool_indices, layer.window
        if segment.kv is None or window is None:
            return segment
        if batch.forward_mode in self.prompt_modes:
            ws.update(ws.ops.remember, self._prompts, rows, batch.seq_lens, None)
            return segment
        left = window if self._inclusive else window - 1
        mixed = batch.forward_mode in self.mixed_modes
        known = (self._prompts, rows, batch.seq_lens, batch.extend_seq_lens if mixed else None)
        said = batch.extras.get("prompt_lens") if mixed else None
        reach = ws.fill("reach", (3, batch.bs), ws.ops.prompt_reach, *known, said, later=left, prompt=window)
        rule = attrs.evolve(segment.visibility, keep=reach[0], window=(left, None))
        if mixed:
            ws.update(ws.ops.remember, self._prompts, rows, batch.seq_lens, reach[2])
            rule = attrs.evolve(rule, window=segment.visibility.window, row_window=reach[1])
        return attrs.evolve(segment, visibility=rule)


@hookimpl
def faback_overlays(config: BackendConfig) -> list[Overlay]:
    overlay = config.configured(PrefillAwareWindow.key, PrefillAwareWindow)
    return [] if overlay is None else [overlay]
