"""What a plan launches where the kernel can do everything: at most two fills, and no more for more requests."""

import attrs
import pytest

from faback import AttentionBackend, hookimpl
from faback.builtins import BUILTINS
from faback.core.registry import Registry
from faback.core.workspace import EagerWorkspace
from faback.kernels.reference import Reference
from faback.testing import MODES, OVERLAYS, Options, Scenario, impossible
from faback.testing.late import Late

CELLS = [
    (mode, overlay) for mode in MODES for overlay in OVERLAYS if impossible(Options(mode=mode, overlay=overlay)) is None
]
MOST = 2
MORE = {(mode, "prefill_aware"): 3 for mode in ("target_verify", "draft_decode", "mixed")}
"""The overlay's own fill, or what it remembers, beside those of the mode."""


class Everything:
    @hookimpl
    def faback_kernels(self):
        return [Late(Reference())]


class Counting(EagerWorkspace):
    def __init__(self, *args):
        super().__init__(*args)
        self.launched = []

    def launch(self, op, *inputs, **params):
        self.launched.append(op.__name__)
        super().launch(op, *inputs, **params)


@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize(("mode", "overlay"), CELLS)
def test_launches(mode, overlay, topk):
    options = {"topk": topk} if mode in ("draft_decode", "target_verify") else {}
    scenario = Scenario.make(mode=mode, overlay=overlay, page_size=4, batch_size=5, **options)
    config = attrs.evolve(scenario.config, kernels="late reference")
    registry = Registry.load(config, BUILTINS, entry_points=[])
    registry.register(Everything(), "everything")
    backend = AttentionBackend(config, scenario.pools(), scenario.layers, registry=registry)
    for step in scenario.steps:
        ws = Counting(backend._ops, backend.device, backend._constants)
        backend.build(step.batch, ws)
        assert len(ws.launched) <= MORE.get((mode, overlay), MOST), ws.launched
    if mode == "decode" and overlay == "full":
        assert ws.launched == []
