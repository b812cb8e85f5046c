"""On a GPU: the same numbers, without waiting, and recorded in a CUDA graph."""

from __future__ import annotations

import attrs
import pytest
import torch
from backends import backend, failures, registry

from faback import AttentionBackend
from faback.testing import Scenario

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

STORIES = [
    {"mode": "decode", "overlay": "window", "hybrid": True},
    {"mode": "mixed", "overlay": "local"},
    {"mode": "target_verify", "topk": 2},
    {"mode": "extend", "overlay": "mla"},
    {"mode": "embedding", "overlay": "encoder_only"},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("story", STORIES)
def test_equal(story, dtype):
    scenario = Scenario.make(page_size=4, seed=2, dtype=dtype, head_dim=64, **story)
    assert failures(scenario, backend, device="cuda") == []


@pytest.mark.parametrize("story", STORIES)
def test_nothing_waits(story):
    scenario = Scenario.make(page_size=4, seed=2, dtype=torch.bfloat16, head_dim=64, **story).to("cuda")
    pools = scenario.pools()
    made = AttentionBackend(pinned(scenario.config), pools, scenario.layers, registry=registry(scenario.config))

    def run():
        for step in scenario.steps:
            step.enter(pools)
            made.plan(step.batch)
            for call in step.calls:
                made.forward(call.q, call.k, call.v, call.layer)

    run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_recorded_graph_answers_as_the_plan_does():
    scenario = Scenario.make(mode="decode", page_size=4, seed=2, dtype=torch.bfloat16, head_dim=64).to("cuda")
    pools, [step] = scenario.pools(), scenario.steps
    made = AttentionBackend(pinned(scenario.config), pools, scenario.layers, registry=registry(scenario.config))
    step.enter(pools)
    call = step.calls[0]

    def attend():
        made.capture(step.batch)
        return made.forward(call.q, call.k, call.v, call.layer)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = attend()
    out.zero_()
    graph.replay()
    made.plan(step.batch)
    torch.testing.assert_close(out, made.forward(call.q, call.k, call.v, call.layer))
    assert bool(out.any())


def pinned(config):
    return attrs.evolve(config, kernels="sdpa")
