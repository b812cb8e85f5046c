"""Plugins: loading, blocking, conflicts, order; a bad one never takes the others with it."""

import itertools
import types

import attrs
import pytest
import torch

from core import plugins
from core.plugins import AnyMode, AnyOverlay, Point, fate, holder, load, plugin
from faback import BackendConfig, PluginError, hookimpl
from faback.builtins import BUILTINS
from faback.kernels.reference import Reference

CONFIG = BackendConfig(context_len=8)
CPU = torch.device("cpu")
GOOD = Point("good", plugin(faback_modes=[AnyMode("good")]))


def raising(**kwargs):
    raise RuntimeError("no such device")


def test_builtins_load_first_and_all():
    registry = load(GOOD)
    assert [r.name for r in registry.records] == [*BUILTINS, "good"]
    assert {r.status for r in registry.records} == {"loaded"}
    assert {"decode", "extend", "mixed", "idle", "good"} <= set(registry.modes(CONFIG))
    assert fate(registry, "good").distribution == "acme-good 1.0"


def test_a_broken_import_is_recorded_and_the_others_work():
    registry = load(Point("bad", ImportError("no module named cuda_magic")), GOOD)
    assert fate(registry, "bad").status == "broken"
    assert "cuda_magic" in fate(registry, "bad").problem and "Traceback" in fate(registry, "bad").problem
    assert "good" in registry.modes(CONFIG)


@pytest.mark.parametrize(
    "hook",
    [
        {"faback_mods": [AnyMode("typo")], "faback_modes": [AnyMode("typo")]},
        {"faback_modes": lambda wrong_argument: []},
    ],
    ids=["misspelt", "wrong argument"],
)
def test_a_wrong_hook_is_recorded_and_the_others_work(hook):
    registry = load(Point("a-typo", plugin(**hook)), GOOD)
    assert fate(registry, "a-typo").status == "broken"
    assert "PluginValidationError" in fate(registry, "a-typo").problem
    assert "typo" not in registry.modes(CONFIG)
    assert "good" in registry.modes(CONFIG)


def test_a_hook_that_raises_is_recorded_and_the_others_work():
    registry = load(Point("bad", plugin(faback_modes=lambda: raising())), GOOD)
    assert fate(registry, "bad").status == "loaded"
    assert "good" in registry.modes(CONFIG)
    assert fate(registry, "bad").status == "broken"
    assert "faback_modes raised" in fate(registry, "bad").problem
    assert "no such device" in fate(registry, "bad").problem


@pytest.mark.parametrize("name", ["good", "no:good"])
@pytest.mark.parametrize("way", ["config", "environment"])
def test_blocking(monkeypatch, name, way):
    if way == "environment":
        monkeypatch.setenv("FABACK_DISABLE_PLUGINS", f"other, {name} ,")
    registry = load(GOOD, disable_plugins=(name,) if way == "config" else ())
    assert fate(registry, "good").status == "blocked"
    assert "good" not in registry.modes(CONFIG)


def test_a_blocked_plugin_is_not_even_imported():
    assert fate(load(Point("bad", ImportError()), disable_plugins=["bad"]), "bad").status == "blocked"


def test_a_builtin_can_be_blocked():
    assert "decode" not in load(disable_plugins=("faback.modes.decode",)).modes(CONFIG)


@pytest.mark.parametrize(
    ("points", "config", "got"),
    [
        ((), {}, "not installed"),
        ((Point("p", ImportError("libmagic")),), {}, "libmagic"),
        ((Point("p", plugin()),), {"disable_plugins": ("p",)}, "blocked"),
    ],
)
def test_a_required_plugin(points, config, got):
    with pytest.raises(PluginError, match=f"(?s)required plugin 'p': wanted loaded.*{got}"):
        load(*points, require_plugins=("p",), **config)
    assert load(Point("p", plugin()), require_plugins=("p",))


def test_a_required_plugin_whose_hook_raises_is_an_error(world, layer):
    with pytest.raises(PluginError, match="required plugin 'p'"):
        world([layer()], [1], [1], points=[Point("p", plugin(faback_modes=lambda: raising()))], require_plugins=["p"])


@pytest.mark.parametrize(
    ("hook", "make", "collect"),
    [
        ("faback_modes", lambda: AnyMode("same"), lambda r: r.modes(CONFIG)),
        ("faback_overlays", lambda: AnyOverlay("same"), lambda r: r.overlays(CONFIG)),
        ("faback_kernels", Reference, lambda r: r.kernels(CPU)),
    ],
)
def test_one_key_twice_names_both_distributions(hook, make, collect):
    registry = load(Point("a", plugin(**{hook: [make()]})), Point("b", plugin(**{hook: [make()]})))
    with pytest.raises(PluginError) as caught:
        collect(registry)
    first, second = ("faback ", "acme-a 1.0") if hook == "faback_kernels" else ("acme-a 1.0", "acme-b 1.0")
    assert first in str(caught.value) and second in str(caught.value)
    assert "FABACK_DISABLE_PLUGINS" in caught.value.hint


@pytest.mark.parametrize("names", [("a", "zz"), ("zz", "a")])
def test_replaces_whatever_the_order(names):
    one = Point(names[0], plugin(faback_modes=[AnyMode("same")]))
    two = Point(names[1], plugin(faback_modes=[AnyMode("same", replaces="same")]))
    assert load(one, two).modes(CONFIG)["same"].plugin == names[1]


def test_replaces_a_builtin_mode_and_a_kernel_under_another_key():
    class Faster(Reference):
        name, replaces = "faster", "reference"

    modes, kernels = [AnyMode("decode", replaces="decode")], [Faster()]
    registry = load(Point("p", plugin(faback_modes=modes, faback_kernels=kernels)))
    assert registry.modes(CONFIG)["decode"].value is modes[0]
    names = [c.value.name for c in registry.kernels(CPU)]
    assert "faster" in names and "reference" not in names


def test_two_replacements_of_one_key_collide():
    points = [Point(n, plugin(faback_modes=[AnyMode("decode", replaces="decode")])) for n in "ab"]
    with pytest.raises(PluginError, match="acme-a 1.0.*acme-b 1.0"):
        load(*points).modes(CONFIG)


def test_two_plugins_of_one_name_do_not_silence_each_other():
    first = Point("same", plugin(faback_modes=[AnyMode("first")]), "one")
    second = Point("same", plugin(faback_modes=[AnyMode("second")]), "two")
    registry = load(first, second)
    loaded = [r for r in registry.records if r.name == "same" and r.status == "loaded"]
    assert {"first", "second"} & set(registry.modes(CONFIG)), f"{len(loaded)} loaded, none at work"


def test_an_entry_point_cannot_switch_a_builtin_off_by_its_name():
    assert "decode" in load(Point("faback.modes.decode", plugin())).modes(CONFIG)


def test_an_unhashable_plugin_does_not_take_all_others_down():
    namespace = types.SimpleNamespace(faback_modes=hookimpl(lambda: [AnyMode("odd")]))
    assert "good" in load(Point("odd", namespace), GOOD).modes(CONFIG)


@pytest.mark.parametrize("junk", [object(), "decode"])
def test_a_hook_that_returns_junk_is_named_or_recorded(junk):
    registry = load(Point("bad", plugin(faback_modes=[junk])), GOOD)
    try:
        modes = registry.modes(CONFIG)
    except PluginError as error:
        assert "bad" in str(error)
    else:
        assert "good" in modes and fate(registry, "bad").status == "broken"


def keys(overlays):
    orders = set()
    for order in itertools.permutations(overlays):
        points = [Point(f"p{i}", plugin(faback_overlays=[o])) for i, o in enumerate(order)]
        found = [c.value.key for c in load(*points).overlays(CONFIG)]
        orders.add(tuple(k for k in found if k in {o.key for o in overlays}))
    assert len(orders) == 1, "the order depends on the registration"
    return orders.pop()


def test_overlay_order_by_key_priority_and_after():
    assert keys([AnyOverlay("b"), AnyOverlay("a"), AnyOverlay("c")]) == ("a", "b", "c")
    assert keys([AnyOverlay("b"), AnyOverlay("a"), AnyOverlay("c", priority=1)]) == ("c", "a", "b")
    assert keys([AnyOverlay("b"), AnyOverlay("a", after=("b",)), AnyOverlay("c")]) == ("b", "a", "c")
    assert keys([AnyOverlay("b"), AnyOverlay("a", after=("b",), priority=9), AnyOverlay("c")]) == ("b", "a", "c")
    assert keys([AnyOverlay("b"), AnyOverlay("a", after=("nobody",))]) == ("a", "b")
    assert keys([AnyOverlay("a", after=("b",)), AnyOverlay("b", after=("c",)), AnyOverlay("c")]) == ("c", "b", "a")


def test_cyclic_after_names_the_members():
    overlays = [AnyOverlay("a", after=("b",)), AnyOverlay("b", after=("a",))]
    with pytest.raises(PluginError, match="no cycle in `after`.*a .acme-p 1.0.*b .acme-p 1.0."):
        load(Point("p", plugin(faback_overlays=overlays))).overlays(CONFIG)


def test_register_by_hand():
    registry = load()
    registry.register(plugin(faback_modes=[AnyMode("mine")]), "mine")
    assert registry.modes(CONFIG)["mine"].distribution == "registered by hand"
    with pytest.raises(PluginError, match="typo"):
        registry.register(plugin(faback_typo=[]), "typo")


def rank_with(hook):
    return load(Point("ranker", holder(faback_rank=hookimpl(hook))))


def test_rank_reorders_drops_and_abstains():
    def reverse(request, candidates):
        return candidates[::-1] if request == "reverse" else candidates[:1] if request == "drop" else None

    first, second = Reference(), Reference()
    registry = rank_with(reverse)
    assert registry.rank("reverse", [first, second]) == [second, first]
    assert registry.rank("drop", [first, second]) == [first]
    assert registry.rank("other", [first, second]) == [first, second]


def test_kernels_and_ranks_may_ask_for_the_configuration():
    class Configured:
        @hookimpl
        def faback_kernels(self, device, config):
            return [AnyKernel("mine")] if "mine" in config.options else []

        @hookimpl
        def faback_rank(self, candidates, config):
            return candidates[::-1] if config.deterministic else None

    registry = load(Point("p", Configured()))
    asked = attrs.evolve(CONFIG, options={"mine": {}}, deterministic=True)
    assert "mine" not in [c.value.name for c in registry.kernels(CPU)]
    assert "mine" in [c.value.name for c in registry.kernels(CPU, asked)]
    kernels = [Reference(), AnyKernel("mine")]
    assert registry.rank("x", kernels) == kernels
    assert registry.rank("x", kernels, asked) == kernels[::-1]


class AnyKernel(Reference):
    def __init__(self, name):
        super().__init__()
        self.name = name


def test_rank_never_adds():
    with pytest.raises(PluginError, match="selection of the candidates.*reference"):
        rank_with(lambda request, candidates: [Reference()]).rank("x", [Reference()])


def test_observers_see_each_plan(world, layer):
    seen = []

    def faback_planned(plan):
        seen.append(plan)

    point = Point("p", holder(faback_planned=hookimpl(faback_planned)))
    made = world([layer()], [2], [1], points=[point])
    plans = [made.backend.plan(made.batch("decode")) for _ in range(2)]
    assert seen == plans


def names(registry, status):
    return {r.name for r in registry.records if r.status == status} - set(BUILTINS)


@pytest.mark.parametrize(
    ("said", "config", "loaded"),
    [
        (None, {}, {"a", "b", "c"}),
        ("", {}, set()),
        (" , ", {}, set()),
        ("a", {}, {"a"}),
        (" c ,a,", {}, {"a", "c"}),
        ("nothing-like-it", {}, set()),
        (None, {"allow_plugins": ()}, set()),
        (None, {"allow_plugins": ["b"]}, {"b"}),
        ("a,b", {"allow_plugins": ("b", "c")}, {"b"}),
        ("", {"allow_plugins": ("b",)}, set()),
        ("a,b", {"disable_plugins": ("a",)}, {"b"}),
    ],
)
def test_only_what_is_allowed_is_imported(monkeypatch, said, config, loaded):
    if said is None:
        monkeypatch.delenv("FABACK_PLUGINS", raising=False)
    else:
        monkeypatch.setenv("FABACK_PLUGINS", said)
    imported = []

    class Watched(Point):
        def load(self):
            imported.append(self.name)
            return super().load()

    registry = load(*(Watched(name, plugin()) for name in "cab"), **config)
    assert set(imported) == names(registry, "loaded") == loaded
    assert names(registry, "not allowed") | names(registry, "blocked") == {"a", "b", "c"} - loaded
    assert set(BUILTINS) <= {r.name for r in registry.records if r.status == "loaded"}


def test_a_required_plugin_that_is_not_allowed_is_an_error(monkeypatch):
    monkeypatch.setenv("FABACK_PLUGINS", "other")
    with pytest.raises(PluginError, match="required plugin 'p': wanted loaded, got not allowed"):
        load(Point("p", plugin()), require_plugins=("p",))


def test_records_say_which_file_was_loaded():
    registry = load(Point("p", plugin()), Point("bad", ImportError()))
    assert fate(registry, "faback.modes.decode").path.endswith("faback/modes/decode.py")
    assert fate(registry, "p").path == plugins.__file__
    assert fate(registry, "bad").path == ""
