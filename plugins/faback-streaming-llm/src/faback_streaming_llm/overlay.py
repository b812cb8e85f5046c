"""streaming llm: full-attention layers keep a request's first tokens and a sliding window in sight, in any mode.

Switched on by `config.options["streaming-llm"] = {"sinks": 4, "window": 1020}`.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from faback import hookimpl
from faback.core.batch import ForwardBatch
from faback.core.config import BackendConfig
from faback.core.contracts import Overlay, PlanContext
from faback.core.errors import BatchError, ConfigError
from faback.core.layer import LayerKind
from faback.core.segment import Segment
from faback.core.workspace import Workspace

NAME = "streaming-llm"


class StreamingLLM(Overlay):
    """Token p sees token t <= p if t < sinks or t >= p - window. Positions are those of the request's text.

    Args:
        sinks: first tokens of a request that stay visible.
        window: inclusive distance to the left: window + 1 tokens, the query's own included.
        layers: ids or kinds (`LayerKind`) of layers; None for all that are causal self-attention without window or
            chunk.

    Raises:
        ConfigError: a length that is none; when a backend is built, layers that cannot be varied.
    """

    key = NAME
    after = ("no_cache",)

    def __init__(self, sinks: int, window: int, layers: Iterable[int | LayerKind] | None = None) -> None:
        for name, value in (("sinks", sinks), ("window", window)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"config.options[{NAME!r}][{name!r}]", wanted="an integer >= 0", got=repr(value))
        self._sinks, self._window = sinks, window
        self._layers = None if layers is None else tuple(layers)
        self._kinds: frozenset[LayerKind] = frozenset()

    def bind(self, ctx: PlanContext) -> None:
        able = {layer.layer_id: layer.kind for layer in ctx.layers if _full(layer)}
        chosen = set(able)
        if self._layers is not None:
            wanted = f"ids or kinds of causal self-attention layers without window or chunk: {sorted(able)}"
            strangers = [name for name in self._layers if name not in [*able, *able.values()]]
            if strangers:
                raise ConfigError(f"config.options[{NAME!r}]['layers']", wanted=wanted, got=strangers)
            chosen = {number for number in able if number in self._layers or able[number] in self._layers}
        if not chosen:
            raise ConfigError(f"config.options[{NAME!r}]", wanted="a layer to vary", got="none of the model's")
        self._kinds = frozenset(able[number] for number in chosen)
        alike = sorted(number for number in able if number not in chosen and able[number] in self._kinds)
        if alike:
            hint = "Layers of one kind share their metadata: name all of them, or give some a KV group of their own."
            wanted = f"also layers {alike}, which are of the same kind"
            raise ConfigError(f"config.options[{NAME!r}]['layers']", wanted=wanted, got=sorted(chosen), hint=hint)

    def applies(self, layer: LayerKind) -> bool:
        return layer in self._kinds

    def transform(
        self, segment: Segment, layer: LayerKind, batch: ForwardBatch, ws: Workspace, ctx: PlanContext
    ) -> Segment:
        tail = segment.tail
        if not segment.absolute:
            wanted, got = "keys counted from the first token of each request", f"mode {batch.forward_mode!r} on a part"
            raise BatchError(NAME, wanted=wanted, got=got)
        if tail is not None and self._window < tail.size - 1:  # `keep` says nothing of tails: they must be in sight
            hint = f"Make config.options[{NAME!r}]['window'] as large as the drafts are deep."
            got = f"a window of {self._window}"
            raise BatchError(NAME, wanted=f"a window over all {tail.size} drafted tokens", got=got, hint=hint)
        rows = segment.kv_len if segment.kv is None else segment.kv.req_pool_indices  # the same for all draft steps
        keep = ws.row_lens(NAME, self._sinks, active=rows)
        rule = attrs.evolve(segment.visibility, keep=keep, window=(self._window, None))
        return attrs.evolve(segment, visibility=rule)


def _full(layer: LayerKind) -> bool:
    """Whether a layer is causal self-attention over the whole text."""
    return layer.causal and not layer.cross and layer.window is None and layer.chunk is None


@hookimpl
def faback_overlays(config: BackendConfig) -> list[Overlay]:
    overlay = config.configured(NAME, StreamingLLM)
    return [] if overlay is None else [overlay]
