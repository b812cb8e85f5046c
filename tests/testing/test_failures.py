"""A failed check says who saw what, in the smallest scenario that fails, and draws it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import attrs
import pytest

from conformance import test_builtins as kits
from faback import AttentionBackend
from faback.cli.check import load_registry
from faback.kernels.reference import Reference
from faback.testing import MODES, OVERLAYS, Options, Scenario, Token, failures, impossible, run_scenario
from faback.testing.failures import Runs, report, smallest
from faback.testing.observed import TOO_FEW, TOO_MANY, observe


def made(options):
    return Scenario.make(**attrs.asdict(options, recurse=False))


def on(kernel):
    return lambda config, *rest: AttentionBackend(attrs.evolve(config, kernels=kernel), *rest, registry=load_registry())


@pytest.mark.parametrize("kernel", ["reference", "poor"])
@pytest.mark.parametrize("mode", MODES)
def test_what_is_right_is_observed_to_be_right(mode, kernel):
    for overlay in OVERLAYS:
        options = Options(mode=mode, overlay=overlay, page_size=4, max_len=9, seed=1, padded_rows=1)
        if impossible(options) is not None:
            continue
        scenario = made(options)
        for layer in scenario.layers:
            seen = observe(scenario, on(kernel), step=len(scenario.steps) - 1, layer_id=layer.layer_id)
            assert seen.right and seen.complaints() == []
            cells = [cell for block in seen.panel().blocks for cell in block.cells.flatten().tolist()]
            assert cells.count(0) == sum(map(len, seen.expected)) and max(cells, default=0) <= 0


class Shifted(Reference):
    """A kernel whose queries see `more` keys than they must, or fewer: the rule is one for windows of 3."""

    name, priority = "shifted", 1000

    def __init__(self, more):
        super().__init__()
        self._more = more

    def prepare(self, segment, layer, request, ws):
        left = segment.visibility.window[0]
        if left is not None:
            rule = attrs.evolve(segment.visibility, window=(left + self._more, None))
            segment = attrs.evolve(segment, visibility=rule)
        return super().prepare(segment, layer, request, ws)


def shifted(more):
    from cli.stubs import Plugin

    def make(config, *rest):
        registry = load_registry()
        registry.register(Plugin(Shifted(more)), "shifted")
        return AttentionBackend(attrs.evolve(config, kernels="shifted"), *rest, registry=registry)

    return make


WINDOWED = Options(mode="extend", overlay="window", windows=(3,), lengths=((6, 2), (2, 5)), page_size=4)


@pytest.mark.parametrize(("more", "wrong"), [(1, TOO_MANY), (-1, TOO_FEW)])
def test_one_key_too_many_or_too_few_is_seen_in_the_picture(monkeypatch, tmp_path, more, wrong):
    drawn = []
    draw = failures.draw
    monkeypatch.setattr(failures, "draw", lambda panels, *rest: drawn.append(panels) or draw(panels, *rest))
    said = report(WINDOWED, made, Runs(shifted(more)), lambda: tmp_path)
    words = {TOO_MANY: "sees 1 too many", TOO_FEW: "does not see 1 that it must"}[wrong]
    assert words in said
    (picture,) = tmp_path.iterdir()
    assert f"Picture: {picture}" in said
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    ((panel,),) = drawn
    window = int(re.search(r"window (\d+)", panel.title)[1])
    found = []
    for block in panel.blocks:
        for query, cells in zip(block.queries, block.cells.tolist(), strict=True):
            off = [int(block.keys[column]) for column, cell in enumerate(cells) if cell == wrong]
            expected = int(query) - window - (wrong == TOO_MANY)
            assert off == ([expected] if expected >= 0 else [])
            found += off
    assert found and str(panel) in said


def test_tokens_are_named(tmp_path):
    seen = observe(made(WINDOWED), shifted(1), step=0, layer_id=1)
    assert Token(1, 2) in seen.actual[2 + 4] - seen.expected[2 + 4]
    assert "row 0 of q, request 0 text token 6, sees 1 too many: request 0 text token 2" in seen.complaints()


def test_the_smallest_scenario_is_small_and_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(failures, "PATIENCE", 60.0)
    big = attrs.evolve(WINDOWED, sinks=True, softcap=True, page_size=16, padded_rows=2)
    runs = Runs(shifted(1))
    (found, *_) = runs.failures(made(big))
    small = smallest(big, made, runs, like=found)
    assert runs.failures(made(small))
    ((cached, new),) = small.lengths
    assert cached + new <= 8 and not small.sinks and not small.softcap and small.padded_rows == 0
    assert f"  {small}\n" in report(big, made, runs, lambda: tmp_path)


def test_a_wrong_number_is_no_wrong_visibility(tmp_path):
    kit = kits.lying()
    said = report(Options(mode="extend", softcap=True), made, Runs(kit.made()), lambda: tmp_path)
    assert "the fault is in the numbers" in said


def test_slots_of_nobody_are_seen():
    class Greedy(Reference):
        """Every query also sees the slot of padding."""

        name, priority = "shifted", 1000

        def run(self, prepared, q, k, v, out, **rest):
            super().run(prepared, q, k, v, out, **rest)
            out.add_(v[0].float().nan_to_num().mean())

    def make(config, *rest):
        from cli.stubs import Plugin

        registry = load_registry()
        registry.register(Plugin(Greedy()), "greedy")
        return AttentionBackend(attrs.evolve(config, kernels="shifted"), *rest, registry=registry)

    seen = observe(made(Options(mode="decode", lengths=((3, 1),))), make, step=0, layer_id=0)
    assert seen.complaints() == ["row 0 of q, request 0 text token 3, sees 1 too many: slots of nobody"]


def test_without_matplotlib_there_is_text_and_the_reason(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = report(WINDOWED, made, Runs(shifted(1)), lambda: tmp_path)
    assert "too many" in said and "+" in said
    assert "No picture: matplotlib is not installed (pip install faback[docs])." in said
    assert list(tmp_path.iterdir()) == []


def test_a_folder_can_be_named(monkeypatch, tmp_path):
    monkeypatch.setenv(failures.FOLDER_VARIABLE, str(tmp_path / "mine"))
    report(WINDOWED, made, Runs(shifted(1)), lambda: tmp_path / "other")
    assert [path.parent.name for path in tmp_path.rglob("*.png")] == ["mine"]


def test_what_cannot_be_observed_is_said(tmp_path):
    def breaks(config, *rest):
        made_ = on("reference")(config, *rest)
        monster = type("Monster", (), {"plan": made_.plan, "forward": staticmethod(lambda *a, **k: 1 / 0)})
        return monster()

    said = report(WINDOWED, made, Runs(breaks), lambda: tmp_path)
    assert "forward raised ZeroDivisionError" in said
    assert "Who saw what could not be found out: ZeroDivisionError" in said


def test_what_fails_at_times_is_called_that(monkeypatch, tmp_path):
    monkeypatch.setattr(failures, "smallest", lambda options, *rest, **named: options)
    makers = iter([shifted(1), on("reference")])
    said = report(WINDOWED, made, Runs(lambda *args: next(makers)(*args)), lambda: tmp_path)
    assert "must see" in said and "fails at times only" in said


def test_a_right_scenario_says_nothing():
    assert report(WINDOWED, made, Runs(on("reference")), failures.temporary) == ""


def test_a_kit_leaves_its_picture_beside_tmp_path(tmp_path_factory):
    class Off(kits.TestNear):
        __test__ = False
        plugin = kits.near(reach=5)

    kit = Off()
    kit._folders = tmp_path_factory
    cell = next(cell for cell in kit.cells() if run_and_fails(kit, cell))
    with pytest.raises(AssertionError, match="too many") as caught:
        kit.test_it_sees_what_it_must(cell, "native")
    path = Path(re.search(r"Picture: (\S+)", str(caught.value))[1])
    assert path.parent.parent == tmp_path_factory.getbasetemp()
    assert path.read_bytes().startswith(b"\x89PNG")


def run_and_fails(kit, cell):
    from faback.testing.rejudged import rejudged

    return any(r.status == "wrong" for r in run_scenario(rejudged(made(cell), kit.sees), kit.made("native")))
