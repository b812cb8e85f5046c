"""Captured plans on a CPU: captured on nothing, replayed on everything, equal to the oracle.

Host integers are those of the capture, tensors are those of the capture with other contents: what a CUDA graph replays.
"""

import random

import attrs
import pytest
import torch

from faback import AttentionBackend, hookimpl
from faback.builtins import BUILTINS
from faback.core.registry import Registry
from faback.kernels.reference import Reference
from faback.testing import MODES, OVERLAYS, Options, Scenario, impossible, run_scenario
from faback.testing.late import Late, Replayed
from faback.testing.poor import Poor

CELLS = [
    (mode, overlay) for mode in MODES for overlay in OVERLAYS if impossible(Options(mode=mode, overlay=overlay)) is None
]


class Kernels:
    """Kernels that can be captured: everything natively, and hardly anything, so that lowerings are recorded too."""

    @hookimpl
    def faback_kernels(self):
        return [Late(Reference()), Poor()]


def registry(config):
    found = Registry.load(config, BUILTINS, entry_points=[])
    found.register(Kernels(), "late kernels")
    return found


def replayed(kernel, made=None):
    def make(config, pools, layers):
        config = attrs.evolve(config, kernels=kernel)
        backend = Replayed(config, pools, layers, registry(config))
        if made is not None:
            made.append(backend)
        return backend

    return make


def variants(mode, overlay):
    """Layouts that a mode has, each with a page size of its own."""
    found = [{"page_size": 1}, {"page_size": 4, "padded_rows": 2}]
    if mode in ("draft_decode", "target_verify"):
        found.append({"page_size": 16, "topk": 3})
    if mode == "embedding":
        found.append({"padded_tokens": 3})
    if mode == "draft_extend":
        found.append({"page_size": 3, "strided_rows": True})
    if overlay in ("window", "local", "prefill_aware") and mode != "embedding":
        found.append({"page_size": 3, "hybrid": True})
    return found


def wrong(results):
    return [str(result) for result in results if result.status != "equal"]


@pytest.mark.parametrize("kernel", ["late reference", "poor"])
@pytest.mark.parametrize(("mode", "overlay"), CELLS)
def test_replays_equal_the_oracle(mode, overlay, kernel):
    for seed, options in enumerate(variants(mode, overlay)):
        scenario = Scenario.make(mode=mode, overlay=overlay, seed=seed, sinks=seed == 1, **options)
        assert wrong(run_scenario(scenario, replayed(kernel))) == []


@pytest.mark.parametrize("kernel", ["late reference", "poor"])
def test_fills_that_are_not_issued_again_are_noticed(kernel, monkeypatch):
    """The test above can fail: here nothing is refilled."""
    from faback.core.graphs import Captured

    load = Captured.load
    monkeypatch.setattr(Captured, "load", lambda self, batch: load(attrs.evolve(self, record=()), batch))
    scenario = Scenario.make(mode="target_verify", topk=3, page_size=4)
    assert wrong(run_scenario(scenario, replayed(kernel)))


@pytest.mark.parametrize("kernel", ["late reference", "poor"])
@pytest.mark.parametrize("overlay", ["full", "window", "mla"])
def test_alternations_spoil_nothing(overlay, kernel):
    """One backend, many batches by turns: large after small, ragged after uniform, idle in between."""
    pick = random.Random(overlay)
    scenario = Scenario.make(mode="extend", overlay=overlay, seed=3, page_size=4, batch_size=3)
    made = []
    assert wrong(run_scenario(scenario, replayed(kernel, made))) == []
    backend, batches = made[0], [step.batch for step in scenario.steps]
    plain = AttentionBackend(attrs.evolve(scenario.config, kernels="reference"), backend.backend.pools, scenario.layers)
    for _ in range(200 // len(batches)):
        pick.shuffle(batches)
        for batch in batches:
            step = next(step for step in scenario.steps if step.batch is batch)
            step.enter(backend.backend.pools)
            backend.plan(batch)
            plain.plan(batch)
            for call in step.calls:
                got = backend.forward(call.q, None, None, call.layer, save_kv_cache=False)
                wanted = plain.forward(call.q, None, None, call.layer, save_kv_cache=False)
                live = torch.tensor([token is not None for token in step.queries])
                torch.testing.assert_close(got[live], wanted[live], atol=1e-5, rtol=0)
