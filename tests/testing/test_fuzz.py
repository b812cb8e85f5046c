"""The fuzzer finds what is planted, makes it small, and says how to see it again."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys

import attrs

from faback.testing import MODES, OVERLAYS, Options, Scenario, impossible
from faback.testing.fuzz import CHOICES, SIZES, DeviceLost, Finding, drawn, fuzz, shrunk


def test_what_is_drawn_means_something_and_covers_everything():
    pick, seen = random.Random(0), {}
    for _ in range(1500):
        options = drawn(pick)
        assert impossible(options) is None
        for field in attrs.fields(Options):
            seen.setdefault(field.name, set()).add(getattr(options, field.name))
    assert seen["mode"] == set(MODES) and seen["overlay"] == set(OVERLAYS)
    for name, values in CHOICES.items():
        assert seen[name] == set(values), name


def test_every_drawing_can_be_made():
    pick = random.Random(1)
    for _ in range(60):
        Scenario.make(**attrs.asdict(drawn(pick), recurse=False))


def test_a_seed_draws_the_same():
    def first(seed):
        found = []
        fuzz(lambda options: found.append(options) or "stop", seconds=60, seed=seed)
        return found[0]

    assert first(3) == first(3) != first(4)


def test_a_planted_fault_is_found_and_made_small():
    def judge(options):
        return "off" if options.page_size > 2 and options.sinks and options.max_len > 4 else ""

    (found,) = fuzz(judge, seconds=60, seed=0)
    smallest = found.smallest
    assert judge(found.options) == found.reason == "off"
    assert smallest.sinks and smallest.page_size == 3 and smallest.max_len in (5, 24)
    changed = [f.name for f in attrs.fields(Options) if getattr(smallest, f.name) != f.default]
    assert set(changed) <= {"mode", "sinks", "page_size", "max_len"}


def test_nothing_is_found_where_nothing_is_wrong():
    counted = []
    assert fuzz(lambda options: "", seconds=0.2, seed=0, told=counted.append) == []
    assert counted == list(range(1, len(counted) + 1)) and counted


def test_a_device_that_is_lost_ends_it_and_the_scenario_is_told():
    def judge(options):
        if options.sinks:
            raise DeviceLost("stub: misaligned address")
        return ""

    (found,) = fuzz(judge, seconds=60, seed=0)
    assert found.options == found.smallest and found.smallest.sinks
    assert found.reason == "stub: misaligned address" and "sinks=True" in found.script("stub")


def test_other_sizes_of_a_scenario_come_before_another():
    seen = []
    fuzz(lambda options: seen.append(options) or ("stop" if len(seen) == 60 else ""), seconds=60, seed=5, each=6)
    sizes = {f.name: f.default for f in attrs.fields(Options) if f.name in ("seed", *SIZES)}
    kinds = [attrs.evolve(options, **sizes) for options in seen[:60]]
    runs = [len(list(group)) for _, group in itertools.groupby(kinds)]
    assert max(runs) == 6 and len(runs) >= 10
    assert len({options.seed for options in seen[:60]}) == 60


def test_shrinking_stops_at_what_means_nothing():
    hybrid = Options(mode="decode", overlay="window", hybrid=True)
    assert shrunk(hybrid, lambda options: "off" if options.hybrid else "") == hybrid


def test_the_script_runs(tmp_path):
    finding = Finding(Options(mode="decode"), Options(mode="decode", page_size=4), "off")
    path = tmp_path / "again.py"
    path.write_text(finding.script("reference"))
    result = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=True)
    assert "equal" in result.stdout and "page_size=4" in result.stdout
