"""Who sees what, in every mode, on every page size, eagerly and replayed, on a rich and on a poor kernel."""

from __future__ import annotations

import attrs
import pytest
import torch
from backends import backend, replayed
from judge import full_layers, streaming

from faback.testing import MODES, Scenario, run_scenario

PAGE_SIZES = (1, 3, 4, 16, 64)
SIZES = ((2, 3), (4, 5), (1, 0), (0, 4), (5, 40))
"""Sinks and window; each smaller than a page, larger than one, nothing, or more than there is."""
KERNELS = (backend("reference"), backend("poor"), replayed("late reference"), replayed("poor"))
KERNEL_NAMES = ("reference", "poor", "replayed reference", "replayed poor")

LAYOUTS = {
    "draft_decode": ({}, {"topk": 2, "num_steps": 3}),
    "target_verify": ({}, {"ragged": True}, {"topk": 3, "num_draft_tokens": 4}),
    "draft_extend": ({}, {"strided_rows": True}),
    "embedding": ({}, {"padded_tokens": 3}),
}


def layouts(mode):
    """Arguments of scenarios: what a mode can look like, rows of padding among it."""
    return [more | {"padded_rows": number % 2} for number, more in enumerate(LAYOUTS.get(mode, ({}, {})))]


def failures(scenario, make):
    return [str(result) for result in run_scenario(scenario, make) if result.status != "equal"]


def scenes(mode, page_size):
    """Scenarios of a mode with sizes of sinks and windows that it can have."""
    for seed, (sinks, window) in enumerate(SIZES):
        for more in layouts(mode):
            if more.get("topk", 1) > 1 and window < 3:
                continue  # refused: see test_refusals.py
            yield Scenario.make(mode=mode, page_size=page_size, seed=seed, batch_size=3, **more), sinks, window


@pytest.mark.parametrize("make", KERNELS, ids=KERNEL_NAMES)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode(mode, page_size, make):
    for scenario, sinks, window in scenes(mode, page_size):
        assert failures(streaming(scenario, sinks, window), make) == []


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "idle"])
def test_the_judge_tells_it_from_full_attention(mode):
    """The test above can fail: the scenarios tell streaming layers from others."""
    changed = [
        wanted.keys != plain.keys
        for scenario, sinks, window in scenes(mode, 4)
        for step, before in zip(streaming(scenario, sinks, window).steps, scenario.steps, strict=True)
        for wanted, plain in zip(step.calls, before.calls, strict=True)
    ]
    assert changed.count(True) >= 2
    scenario = next(
        scenario
        for scenario, sinks, window in scenes(mode, 4)
        if [c.keys for c in streaming(scenario, sinks, window).steps[-1].calls]
        != [c.keys for c in scenario.steps[-1].calls]
    )
    assert failures(scenario, backend("reference")) == []


@pytest.mark.parametrize("make", KERNELS, ids=KERNEL_NAMES)
@pytest.mark.parametrize("overlay", ["window", "local", "cross", "mla"])
@pytest.mark.parametrize("mode", ["decode", "extend", "target_verify"])
def test_other_layers_are_left_alone(mode, overlay, make):
    """Models whose layers differ: only causal self-attention over the whole text is varied."""
    scenario = Scenario.make(mode=mode, overlay=overlay, page_size=4, seed=3, batch_size=3)
    varied = full_layers(scenario)
    assert 0 < len(varied) < len(scenario.layers)
    assert failures(streaming(scenario, 2, 3), make) == []


@pytest.mark.parametrize("make", KERNELS, ids=KERNEL_NAMES)
@pytest.mark.parametrize("mode", ["decode", "mixed", "target_verify"])
def test_numbers_go_with_it(mode, make):
    """Attention sinks as logits, softcap, scaled fp8 caches and unequal head dims are no concern of the overlay's."""
    more = {"topk": 2} if mode == "target_verify" else {}
    numbers = {"sinks": True, "softcap": True, "v_head_dim": 12, "kv_dtype": torch.float8_e4m3fn, "kv_scales": True}
    scenario = Scenario.make(mode=mode, page_size=3, seed=11, dtype=torch.bfloat16, batch_size=3, **numbers, **more)
    assert failures(streaming(scenario, 2, 4), make) == []


@pytest.mark.parametrize("make", KERNELS, ids=KERNEL_NAMES)
@pytest.mark.parametrize("window", [3, 4])
def test_trees_on_texts_shorter_than_the_sinks(window, make):
    """Sinks may be drafted tokens. A window over the whole tree has them in sight; a narrower one is refused."""
    lengths = tuple((length, 0) for length in (0, 1, 2, 5, 20))
    scenario = Scenario.make(mode="target_verify", topk=2, num_draft_tokens=4, lengths=lengths, page_size=4)
    assert failures(streaming(scenario, 4, window), make) == []


@pytest.mark.parametrize("make", KERNELS, ids=KERNEL_NAMES)
def test_chains_on_texts_shorter_than_the_sinks(make):
    lengths = tuple((length, 0) for length in (0, 1, 2, 5, 20))
    scenario = Scenario.make(mode="target_verify", num_draft_tokens=6, lengths=lengths, page_size=4)
    assert failures(streaming(scenario, 4, 1), make) == []


def test_all_steps_of_a_draft_share_their_sinks():
    """One fill serves every layer and step that is planned in one workspace."""
    scenario = streaming(Scenario.make(mode="draft_decode", batch_size=2, num_steps=3, draft_step=0), 2, 3)
    made = backend("reference")(scenario.config, scenario.pools(), scenario.layers)
    ws, batch = made.workspace(), scenario.steps[0].batch
    plans = [made.build(attrs.evolve(batch, draft_step=step), ws) for step in range(3)]
    keeps = [plan.steps[0].segment.visibility.keep for plan in plans]
    assert keeps[0] is keeps[1] is keeps[2]
