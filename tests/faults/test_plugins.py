"""Plugins that raise in the middle: the error names them, the others work on, and what is done again is right."""

from __future__ import annotations

import pytest
import torch

from core.plugins import Point, plugin
from faback import BatchError, PluginError
from faback.core.contracts import Overlay
from faback.core.lowering.sink_merge import SinkMerge
from faback.kernels.reference import Reference
from faback.testing.poor import Poor


class Fuse:
    """Raises when it is lit, once."""

    def __init__(self):
        self.lit = False

    def burn(self):
        if self.lit:
            self.lit = False
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


class Fused(Reference):
    """The reference kernel with fuses in `prepare` and `run`."""

    name, priority = "fused", 99

    def __init__(self):
        super().__init__()
        self.fuses = {"prepare": Fuse(), "run": Fuse()}

    def prepare(self, *args):
        self.fuses["prepare"].burn()
        return super().prepare(*args)

    def run(self, *args, **options):
        self.fuses["run"].burn()
        super().run(*args, **options)


class FusedOverlay(Overlay):
    """Changes nothing; comes last."""

    key, priority = "fused", -99

    def __init__(self):
        self.fuses, self.released = {"transform": Fuse(), "release": Fuse()}, []

    def applies(self, layer):
        return True

    def transform(self, segment, layer, batch, ws, ctx):
        self.fuses["transform"].burn()
        return segment

    def release(self, rows):
        self.fuses["release"].burn()
        self.released += rows.tolist()


def test_a_kernel_that_raises(world, layer):
    kernel = Fused()
    mine = layer()
    made = world([mine], [7, 3], [2, 1], page_size=4, points=[Point("p", plugin(faback_kernels=[kernel]))])
    batch, tensors = made.batch(), (made.q[0], *made.fresh(mine), mine)
    for _ in range(2):
        kernel.fuses["prepare"].lit = True
        with pytest.raises(PluginError, match="prepare of fused .acme-p 1.0., plugin 'p', raised.*illegal memory"):
            made.backend.plan(batch)
        with pytest.raises(BatchError, match="wanted a plan"):
            made.backend.forward(*tensors)
        made.backend.plan(batch)
        kernel.fuses["run"].lit = True
        with pytest.raises(
            PluginError, match="run of fused .acme-p 1.0., plugin 'p', raised.*illegal memory"
        ) as caught:
            made.backend.forward(*tensors)
        assert isinstance(caught.value.__cause__, RuntimeError)
        made.check(mine, made.backend.forward(*tensors))  # the plan is good still


def test_errors_of_faback_in_a_kernel_pass_as_they_are(world, layer):
    class Strict(Reference):
        name, priority = "strict", 99

        def run(self, *args, **options):
            raise BatchError("sinks", wanted="few")

    made = world([layer()], [2], [1], points=[Point("p", plugin(faback_kernels=[Strict()]))])
    with pytest.raises(BatchError, match="sinks: wanted few"):
        made.run(made.layers[0])


def test_an_overlay_that_raises_mid_plan(world, layer):
    """The first layer's segment is there, and prompts are remembered already."""
    overlay, options = FusedOverlay(), {"prefill_aware_swa": {}}
    layers = [layer(0), layer(1, window=3)]
    point = Point("p", plugin(faback_overlays=[overlay]))
    made = world(layers, [7, 5], [7, 5], points=[point], options=options)
    overlay.fuses["transform"].lit = True
    with pytest.raises(PluginError, match="transform of fused"):
        made.backend.plan(made.batch())
    assert made.backend.current is None
    for each in layers:
        made.check(each, made.run(each))


class FusedLowering(SinkMerge):
    """`SinkMerge` with a fuse in `lower`."""

    key, replaces = "fused", "sink_merge"

    def __init__(self):
        self.fuse = Fuse()

    def lower(self, *args):
        self.fuse.burn()
        return super().lower(*args)


def test_a_lowering_that_raises(world, layer):
    lowering, mine = FusedLowering(), layer(sinks=True)
    point = Point("p", plugin(faback_lowerings=[lowering], faback_kernels=[Poor()]))
    made = world([mine], [5, 9], [2, 1], points=[point], kernels="poor")
    sinks = torch.randn(mine.num_q_heads)
    lowering.fuse.lit = True
    with pytest.raises(PluginError, match="lower of fused .acme-p 1.0."):
        made.backend.plan(made.batch())
    made.check(mine, made.run(mine, sinks=sinks), sinks=sinks)


def test_an_observer_that_raises_leaves_no_plan(world, layer):
    fuse = Fuse()

    def faback_planned(plan):
        fuse.burn()

    mine = layer()
    made = world([mine], [5], [2], points=[Point("p", plugin(faback_planned=faback_planned))])
    fuse.lit = True
    with pytest.raises(PluginError, match="faback_planned"):
        made.backend.plan(made.batch())
    with pytest.raises(BatchError, match="wanted a plan"):
        made.backend.forward(made.q[0], *made.fresh(mine), mine)
    made.check(mine, made.run(mine))


@pytest.mark.parametrize("names", [("a", "z"), ("z", "a")], ids="first raises={0[0]}".format)
def test_release_reaches_everybody_although_one_raises(world, layer, names):
    """Whoever is not told would give the next request of this row a past that is not its own."""
    overlays = [FusedOverlay() for _ in names]
    for overlay, name in zip(overlays, names, strict=True):
        overlay.key = name
    points = [Point(name, plugin(faback_overlays=[o])) for name, o in zip(names, overlays, strict=True)]
    made = world([layer()], [5], [2], points=points)
    overlays[0].fuses["release"].lit = True
    with pytest.raises(PluginError, match=f"release of {names[0]}"):
        made.backend.release(torch.tensor([1]))
    assert [overlay.released for overlay in overlays] == [[], [1]]
