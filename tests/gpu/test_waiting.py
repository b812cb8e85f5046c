"""Neither planning nor attending waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from faback.testing import Scenario
from gpu.marks import on_gpu
from gpu.test_matrix import on_triton

pytestmark = on_gpu

STORIES = [
    {"mode": "decode"},
    {"mode": "decode", "overlay": "window", "hybrid": True},
    {"mode": "decode", "overlay": "prefill_aware"},
    {"mode": "extend", "overlay": "local"},
    {"mode": "mixed", "overlay": "cross"},
    {"mode": "target_verify", "topk": 2, "overlay": "mla"},
    {"mode": "draft_decode", "topk": 2},
    {"mode": "draft_extend"},
    {"mode": "embedding", "overlay": "encoder_only"},
]


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("story", STORIES, ids=lambda story: "-".join(map(str, story.values())))
@pytest.mark.parametrize("return_lse", [False, True])
def test_no_waiting(story, return_lse):
    sizes = {"head_dim": 64, "sinks": True, "padded_rows": 1, "page_size": 16, "seed": 2}
    scenario = Scenario.make(dtype=torch.bfloat16, **sizes, **story).to("cuda")
    pools = scenario.pools()
    backend = on_triton(scenario.config, pools, scenario.layers)

    def run():
        for step in scenario.steps:
            step.enter(pools)
            backend.plan(step.batch, return_lse=return_lse)
            for call in step.calls:
                backend.forward(call.q, call.k, call.v, call.layer, sinks=call.sinks, return_lse=return_lse)

    run()  # compiles, which may wait
    torch.cuda.synchronize()
    with no_waiting():
        run()
