"""prefill-aware sliding window: a request's prompt stays visible to its sliding layers while it generates.

Switched on by `config.options["prefill_aware_swa"] = {"inclusive": False}`.
"""

from __future__ import annotations

import attrs
import torch

from faback.core.batch import ForwardBatch
from faback.core.config import BackendConfig
from faback.core.contracts import Overlay, PlanContext
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
        return layer.window is not None and layer.causal and layer.cached and not layer.cross

    def transform(
        self, segment: Segment, layer: LayerKind, batch: ForwardBatch, ws: Workspace, ctx: PlanContext
    ) -> Segment:
        rows, window = batch.req_pool_indices, layer.window
        if segment.kv is None or window is None:
            return segment
        if batch.forward_mode in self.prompt_modes:
            ws.update(_remember, self._prompts, rows, batch.seq_lens)
            return segment
        left = window if self._inclusive else max(0, window - 1)
        if batch.forward_mode not in self.mixed_modes:
            keep = ws.fill("keep", (batch.bs,), _recall, self._prompts, rows)
            return attrs.evolve(segment, visibility=attrs.evolve(segment.visibility, keep=keep, window=(left, None)))
        known = (self._prompts, rows, batch.seq_lens, batch.extend_seq_lens, batch.extras.get("prompt_lens"))
        later = ws.fill("later_rows", (batch.bs,), _later_rows, *known)
        keep = ws.fill("keep", (batch.bs,), _recall, self._prompts, rows, later)
        reach = ws.fill("row_window", (batch.bs,), _row_window, later, later=left, prompt=window)
        ws.update(_remember, self._prompts, rows, batch.seq_lens, later)
        return attrs.evolve(segment, visibility=attrs.evolve(segment.visibility, keep=keep, row_window=reach))


def _remember(prompts: Tensor, rows: Tensor, seq_lens: Tensor, later: Tensor | None = None) -> None:
    """prompts[rows] = seq_lens, except in later rows and in the row of padding."""
    index = rows.long()
    known = prompts[index]
    new = seq_lens.to(prompts.dtype) * (rows != 0)
    prompts[index] = new if later is None else torch.where(later != 0, known, new)


def _recall(out: Tensor, prompts: Tensor, rows: Tensor, later: Tensor | None = None) -> None:
    """out[b] = prompt length of the row's request, 0 for rows that are not later ones."""
    known = prompts[rows.long()]
    out.copy_(known if later is None else known * later)


def _later_rows(
    out: Tensor, prompts: Tensor, rows: Tensor, seq_lens: Tensor, extend_seq_lens: Tensor, prompt_lens: Tensor | None
) -> None:
    """out[b] = 1 for rows behind their request's prompt."""
    if prompt_lens is not None:
        out.copy_(seq_lens > prompt_lens)
        return
    known = prompts[rows.long()]
    out.copy_((extend_seq_lens == 1) & (known > 0) & (seq_lens > known))


def _row_window(out: Tensor, rows: Tensor, *, later: int, prompt: int) -> None:
    """out[b] = one left distance for later rows, another for prompts."""
    out.copy_(torch.where(rows != 0, later, prompt))


@hookimpl
def faback_overlays(config: BackendConfig) -> list[Overlay]:
    overlay = config.configured(PrefillAwareWindow.key, PrefillAwareWindow)
    return [] if overlay is None else [overlay]
