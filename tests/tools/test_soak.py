"""tools/soak.py: a short soak on a CPU finds nothing, and what grows, is wrong or gets lost is found."""

from __future__ import annotations

import json

import attrs
import pytest
import soak
import torch
from soak import Sample, judge, run
from traffic import CPU, Traffic

NOISE = 10.0
"""Times on a busy machine say little."""


def traffic():
    return Traffic(torch.device("cpu"), CPU, seed=1)


@pytest.fixture(scope="module")
def short():
    made = traffic()
    return made, run(made, 2 * soak.SAMPLES)


def test_a_short_soak_finds_nothing(tmp_path, capsys):
    path = tmp_path / "soak.json"
    assert soak.main(["--steps", "60", "--device", "cpu", "--drift", str(NOISE), "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["findings"] == [] and report["steps"] == 60
    assert len(report["samples"]) == soak.SAMPLES
    assert report["requests"] > 3 and report["tokens"] > 60
    assert "0 findings on cpu" in capsys.readouterr().out


def test_too_few_steps_are_refused(capsys):
    with pytest.raises(SystemExit):
        soak.main(["--steps", "10", "--device", "cpu"])
    assert "wanted at least 30, got 10" in capsys.readouterr().err


def test_every_kind_of_pass_is_served(monkeypatch):
    made, seen = traffic(), set()
    plan, replay = made.backend.plan, made.backend.replay
    monkeypatch.setattr(made.backend, "plan", lambda batch: (seen.add(batch.forward_mode), plan(batch))[1])
    monkeypatch.setattr(
        made.backend, "replay", lambda batch: (seen.add(f"replay {batch.forward_mode}"), replay(batch))[1]
    )
    for number in range(1, 80):
        made.step(number)
    made.finish()
    assert seen == {"extend", "mixed", "decode", "replay decode", "replay target_verify"}
    assert made.lost_pages == 0 and made.served > 3


GROWN = {
    "host_bytes": 64 << 20,
    "objects": 5000,
    "allocated_bytes": 1,
    "reserved_bytes": 1,
    "segments": 1,
    "replay_ms": 1e4,
    "plan_ms": 1e4,
}


@pytest.mark.parametrize("name", GROWN)
def test_what_grows_is_found(short, name):
    made, samples = short
    assert judge(made, samples, NOISE) == []
    late = len(samples) // 2
    grown = [
        attrs.evolve(s, **{name: getattr(s, name) + (GROWN[name] if i > late else 0)}) for i, s in enumerate(samples)
    ]
    (finding,) = judge(made, grown, NOISE)
    assert finding.startswith(name)


def test_what_grows_in_the_warm_up_is_not(short):
    made, samples = short
    few = [
        attrs.evolve(s, **{n: 0 for n in ("host_bytes", "objects", "segments")}) for s in samples[: len(samples) // 3]
    ]
    assert judge(made, [*few, *samples[len(few) :]], NOISE) == []


def test_a_lost_page_a_wrong_answer_and_an_allocation_are_found():
    made = traffic()
    for number in range(1, 60):
        made.step(number)
    made.slots.alloc_pages(2)
    made.finish()
    made.error, made.replay_allocations = 1.0, 3
    sample = Sample(**{field.name: 1 for field in attrs.fields(Sample)})
    found = judge(made, [sample] * 9, NOISE)
    assert [line.split()[0] for line in found] == ["replays", "graphs", "2"]


def test_a_graph_that_answers_otherwise_is_found(monkeypatch):
    made = traffic()
    replayed = made._replayed
    monkeypatch.setattr(made, "_replayed", lambda batch: replayed(batch) + 0.01)
    for number in range(1, 101):
        made.step(number)
    assert made.error > CPU.error
