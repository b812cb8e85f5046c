"""What a plugin does wrong once it is asked to work is pinned on it, and everything else works on."""

import attrs
import pytest
import torch

from core.plugins import AnyMode, AnyOverlay, Point, fate, holder, load, plugin
from faback import BackendConfig, BatchError, CapacityError, FabackError, PluginError, hookimpl
from faback.core.hooks import CONTRACT
from faback.kernels.reference import Reference
from faback.modes.decode import Decode
from faback.testing.late import Late


def hook_raising(name):
    def faback_planned(plan):
        raise RuntimeError("metrics are down")

    def faback_rank(request):
        raise RuntimeError("metrics are down")

    return Point("meddler", holder(**{name: hookimpl(locals()[name])}))


@pytest.mark.parametrize("hook", ["faback_planned", "faback_rank"])
def test_a_late_hook_that_raises_is_named(world, layer, hook):
    with pytest.raises(PluginError, match="meddler.*metrics are down"):
        made = world([layer()], [2], [1], points=[hook_raising(hook)])
        made.backend.plan(made.batch("decode"))


def test_an_exception_in_a_mode_names_plugin_and_distribution(world, layer):
    made = world([layer()], [2], [1], points=[Point("p", plugin(faback_modes=[AnyMode("mine")]))])
    with pytest.raises(PluginError) as caught:
        made.backend.plan(made.batch("mine"))
    for part in ("build", "mine", "acme-p 1.0", "'p'", "bug in a plugin", "FABACK_DISABLE_PLUGINS=p"):
        assert part in str(caught.value)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_error_of_faback_passes_as_it_is(world, layer):
    class Picky(AnyMode):
        def build(self, batch, ws, ctx):
            raise BatchError("batch.extras", wanted="a colour")

    made = world([layer()], [2], [1], points=[Point("p", plugin(faback_modes=[Picky("mine")]))])
    with pytest.raises(BatchError, match="a colour"):
        made.backend.plan(made.batch("mine"))


@pytest.mark.parametrize("contract", [0, 2, "1"])
def test_a_plugin_of_another_contract_is_set_aside(contract):
    config, other = BackendConfig(context_len=8), plugin(faback_modes=[AnyMode("other")])
    other.faback_contract = contract
    good = Point("good", plugin(faback_modes=[AnyMode("good")]))
    registry = load(Point("other", other), good)
    assert fate(registry, "other").status == "broken" and f"got {contract}" in fate(registry, "other").problem
    assert "good" in registry.modes(config) and "other" not in registry.modes(config)
    other.faback_contract = CONTRACT
    assert "other" in load(Point("other", other)).modes(config)


class Plain(Decode):
    """Decodes as usual, after doing something that it must not do."""

    key = "plain"

    def __init__(self, mischief):
        self._mischief = mischief

    def build(self, batch, ws, ctx):
        return self._mischief(batch, ws, super().build(batch, ws, ctx))


def changes_the_batch(batch, ws, segment):
    batch.seq_lens.add_(1)
    return segment


def seen(**rule):
    return lambda batch, ws, segment: attrs.evolve(segment, visibility=attrs.evolve(segment.visibility, **rule))


MALFORMED = {
    "negative window": (seen(window=(-1, None)), "visibility.window.*0 or more, got -1"),
    "windows without a bound": (seen(row_window=torch.ones(2, dtype=torch.int32)), "window.*bounds those of"),
    "empty chunk": (seen(chunk=0), "visibility.chunk.*1 or more"),
    "no keys": (lambda batch, ws, segment: attrs.evolve(segment, committed=False), "tail.*wanted keys"),
    "odd shard": (
        lambda batch, ws, segment: attrs.evolve(segment, kv=attrs.evolve(segment.kv, shard=(2, 2))),
        "kv.shard.*index < count",
    ),
    "no segment": (lambda batch, ws, segment: None, "wanted a Segment, got NoneType"),
    "wrong rows": (lambda batch, ws, segment: attrs.evolve(segment, rows=segment.rows + 1), "cu_seqlens_q"),
    "wrong dtype": (lambda batch, ws, segment: attrs.evolve(segment, kv_len=segment.kv_len.float()), "kv_len"),
    "changed batch": (changes_the_batch, "batch changed by"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_a_mode_does_wrong_is_pinned_on_it(world, layer, name):
    mischief, words = MALFORMED[name]
    point = Point("p", plugin(faback_modes=[Plain(mischief)]))
    made = world([layer()], [2, 3], [1, 1], points=[point], checks=True)
    with pytest.raises(FabackError, match=words) as caught:
        made.backend.plan(made.batch("plain"))
    assert "plain (acme-p 1.0)" in str(caught.value)
    made.backend.plan(made.batch("decode"))  # the rest of the system works on


def test_who_asks_for_more_than_was_reserved_is_named(world, layer):
    class Greedy(Plain):
        size = 4

        def build(self, batch, ws, ctx):
            ws.buffer("mine", (self.size,), torch.int32)
            return super().build(batch, ws, ctx)

    class Kernels:
        @hookimpl
        def faback_kernels(self):
            return [Late(Reference())]

    greedy = Greedy(lambda batch, ws, segment: segment)
    points = [Point("p", plugin(faback_modes=[greedy])), Point("late", Kernels())]
    made = world([layer()], [2, 3], [1, 1], points=points, kernels="late reference")
    made.backend.reserve([made.batch("plain")])
    greedy.size = 5
    with pytest.raises(CapacityError, match="'mine', asked for by plain .acme-p 1.0., plugin 'p': wanted 5 elements"):
        made.backend.capture(made.batch("plain"))
    greedy.size = 4
    made.backend.capture(made.batch("plain"))


@pytest.mark.parametrize("method", ["applies", "transform"])
def test_an_exception_in_an_overlay_names_it(world, layer, method):
    overlay = AnyOverlay("odd")
    setattr(overlay, method, raising_method)
    with pytest.raises(PluginError, match="odd .acme-p 1.0."):
        made = world([layer()], [2], [1], points=[Point("p", plugin(faback_overlays=[overlay]))])
        made.backend.plan(made.batch("decode"))


def raising_method(*args):
    raise KeyError("odd")


@pytest.mark.parametrize(
    "method",
    ["probe", "capabilities", "reject", "prepare", "stores"],
)
def test_an_exception_in_a_kernel_names_it(world, layer, method):
    class Odd(Reference):
        name, priority = "odd", 99

    kernel = Odd()
    setattr(kernel, method, raising_method)
    with pytest.raises(PluginError, match="odd"):
        made = world([layer()], [2], [1], points=[Point("p", plugin(faback_kernels=[kernel]))])
        made.backend.plan(made.batch("decode"))
