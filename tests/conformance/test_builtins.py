"""The kits, subclassed for what is built in; and that they notice what is wrong."""

from __future__ import annotations

import attrs
import pytest

from faback import hookimpl
from faback.core.contracts import Overlay
from faback.core.segment import Visibility
from faback.kernels.reference import Reference
from faback.modes.extend import Extend
from faback.testing import poor
from faback.testing.conformance import KernelConformance, ModeConformance, OverlayConformance, taken_over
from faback.testing.options import Options
from faback.testing.scenario import Scenario


class Nothing:
    """A plugin without a hook: what is tested is built in."""


class TestReference(KernelConformance):
    plugin, kernel = Nothing(), "reference"


class TestPoor(KernelConformance):
    plugin, kernel = poor, "poor"


class Near(Overlay):
    """Every causal layer sees four tokens to the left and the first two; `reach` is what it really does."""

    key, after = "near", ("no_cache",)

    def __init__(self, reach=4, keep=2):
        self._reach, self._keep = reach, keep

    def applies(self, layer):
        return layer.causal and not layer.cross

    def transform(self, segment, layer, batch, ws, ctx):
        keep = ws.row_lens("near", self._keep, active=segment.kv_len)
        rule = attrs.evolve(segment.visibility, window=(self._reach, None), keep=keep)
        return attrs.evolve(segment, visibility=rule)


def near(**settings):
    class Plugin:
        @hookimpl
        def faback_overlays(self, config):
            found = config.configured("near", lambda: Near(**settings))
            return [] if found is None else [found]

    return Plugin()


class TestNear(OverlayConformance):
    plugin, options = near(), {"near": {}}
    modes = ("decode", "extend", "mixed", "draft_decode", "target_verify", "idle")
    bad_options = ({"near": {"width": 3}},)

    def sees(self, query, key, layer):
        return key.position < 2 or key.position >= query.position - 4


class Peek(Extend):
    """Extends as usual, under a key of its own."""


class Peeks:
    @hookimpl
    def faback_modes(self, config):
        return [Peek("peek")]


class TestPeek(ModeConformance):
    plugin, mode, needs = Peeks(), "peek", ("out_cache_loc", "extend_seq_lens")

    def scenario(self, cell):
        return taken_over(Scenario.make(**attrs.asdict(cell, recurse=False)), "peek")


# ---- the kits notice


@pytest.fixture(autouse=True)
def pictures(tmp_path, monkeypatch):
    """What fails on purpose leaves nothing behind."""
    monkeypatch.setenv("FABACK_PICTURES", str(tmp_path))


def run(kit, test, **arguments):
    getattr(kit, test)(**arguments)


@pytest.mark.parametrize("settings", [{"reach": 3}, {"reach": 5}, {"keep": 1}, {"keep": 3}], ids=str)
def test_a_window_off_by_one_is_noticed(settings):
    class Off(TestNear):
        __test__ = False
        plugin = near(**settings)

    kit = Off()
    with pytest.raises(AssertionError, match="must see"):
        for cell in kit.cells():
            run(kit, "test_it_sees_what_it_must", cell=cell, way="native")


def test_a_rule_that_narrows_nothing_is_noticed():
    class Idle(TestNear):
        __test__ = False

        def sees(self, query, key, layer):
            return True

    with pytest.raises(AssertionError, match="true of everything"):
        Idle().test_it_does_something()


def test_an_overlay_that_nobody_asked_for_is_noticed():
    class Always:
        @hookimpl
        def faback_overlays(self, config):
            return [Near()]

    class Pushy(TestNear):
        __test__ = False
        plugin = Always()

    with pytest.raises(AssertionError, match="must see"):
        Pushy().test_nobody_asked("native")


class Lying(Reference):
    """Leaves the cap out, or claims what it never serves."""

    name, priority = "lying", -500

    def __init__(self, claim=()):
        super().__init__()
        self._claim = frozenset(claim)

    def capabilities(self, device):
        able = super().capabilities(device)
        return attrs.evolve(able, features=able.features | self._claim)

    def prepare(self, segment, layer, request, ws):
        return super().prepare(segment, attrs.evolve(layer, softcap=0.0), request, ws)


def lying(*claim):
    class Plugin:
        @hookimpl
        def faback_kernels(self):
            return [Lying(claim)]

    class Kit(KernelConformance):
        __test__ = False
        plugin, kernel = Plugin(), "lying"

    return Kit()


def test_a_kernel_that_ignores_what_it_claims_is_noticed():
    with pytest.raises(AssertionError, match="off by"):
        lying().test_equal_or_refused(Options(mode="decode", softcap=True, scale=3.0))


def test_a_claim_that_nothing_reaches_is_noticed():
    with pytest.raises(AssertionError, match="never served.*telepathy"):
        lying("telepathy").test_every_claim_is_kept()


class Blind(Extend):
    """Sees one token too few, or changes its batch."""

    def __init__(self, mischief):
        super().__init__("peek")
        self._mischief = mischief

    def build(self, batch, ws, ctx):
        return self._mischief(batch, super().build(batch, ws, ctx))


def changed(batch, segment):
    batch.out_cache_loc.add_(1)
    return segment


@pytest.mark.parametrize(
    ("mischief", "words"),
    [
        (lambda batch, segment: attrs.evolve(segment, visibility=Visibility(window=(3, None))), "must see"),
        (changed, "batch changed by peek"),
    ],
    ids=["blind", "changes"],
)
def test_a_mode_that_does_wrong_is_noticed(mischief, words):
    class Plugin:
        @hookimpl
        def faback_modes(self, config):
            return [Blind(mischief)]

    class Kit(TestPeek):
        __test__ = False
        plugin = Plugin()

    with pytest.raises(AssertionError, match=words):
        for cell in Kit().cells():
            Kit().test_it_sees_what_it_must(cell, "native")


def test_a_plugin_that_breaks_when_it_is_asked_is_noticed():
    class Plugin:
        @hookimpl
        def faback_modes(self, config):
            raise ZeroDivisionError("bug")

    class Kit(TestPeek):
        __test__ = False
        plugin = Plugin()

    with pytest.raises(AssertionError, match="ZeroDivisionError: bug"):
        Kit().test_it_sees_what_it_must(next(iter(Kit().cells())), "native")


def test_a_need_that_is_not_asked_for_is_noticed():
    class Kit(TestPeek):
        __test__ = False
        needs = ("positions",)

    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        Kit().test_what_it_needs_is_asked_for()
