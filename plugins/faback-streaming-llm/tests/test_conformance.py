"""faback's own kit for overlays."""

from __future__ import annotations

from types import MappingProxyType

import faback_streaming_llm.overlay as overlay
from faback.testing.conformance import OverlayConformance


class TestStreamingLLM(OverlayConformance):
    plugin = overlay
    options = MappingProxyType({"streaming-llm": {"sinks": 2, "window": 3}})
    overlays = ("full", "window", "local", "cross")
    bad_options = (
        {"streaming-llm": {"sinks": 2}},
        {"streaming-llm": {"sinks": -1, "window": 3}},
        {"streaming-llm": {"sinks": 2, "window": 3, "layers": [99]}},
    )

    def sees(self, query, key, layer):
        varied = layer.causal and not layer.cross and layer.window is None and layer.chunk is None
        return not varied or key.position < 2 or key.position >= query.position - 3
