"""Every mode and overlay of the test kit on the Triton kernels, against the oracle, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from faback import MultiStepDraft
from faback.testing import MODES, OVERLAYS, Options, Scenario, impossible, run_scenario
from kernels.triton.interpreter import needs_interpreter
from kernels.triton.running import on_triton

needs_interpreter()

CELLS = [
    (mode, overlay) for mode in MODES for overlay in OVERLAYS if impossible(Options(mode=mode, overlay=overlay)) is None
]


def features(mode, overlay, seed):
    """Something of everything, spread over the cells."""
    wanted = {
        "page_size": (1, 3, 4, 16)[seed % 4],
        "sinks": seed % 2 == 0,
        "softcap": seed % 3 == 0,
        "hybrid": seed % 2 == 1 and overlay in ("window", "local", "prefill_aware") and mode != "embedding",
        "inclusive": seed % 4 < 2,
    }
    if mode in ("draft_decode", "target_verify"):
        wanted["topk"] = 1 + seed % 3
    if mode == "target_verify" and wanted["topk"] == 1:
        wanted["ragged"] = True
    if mode == "draft_extend":
        wanted["strided_rows"] = seed % 2 == 0
    return wanted


def check(scenario):
    results = run_scenario(scenario, on_triton)
    assert [str(result) for result in results if result.status != "equal"] == []


@pytest.mark.parametrize(("number", "mode", "overlay"), [(i, *cell) for i, cell in enumerate(CELLS)])
def test_mode_and_overlay(number, mode, overlay):
    check(
        Scenario.make(
            mode=mode,
            overlay=overlay,
            seed=number,
            batch_size=2,
            max_len=12,
            num_q_heads=3,
            num_kv_heads=1,
            padded_rows=1,
            padded_tokens=number % 2,
            **features(mode, overlay, number),
        )
    )


STORIES = (
    {"mode": "decode", "overlay": "window"},
    {"mode": "target_verify", "topk": 2, "overlay": "mla"},
    {"mode": "draft_decode", "topk": 2},
    {"mode": "extend", "overlay": "full"},
)


@pytest.mark.parametrize(
    ("number", "dtype", "kv_dtype", "scales"),
    [
        (0, torch.float16, None, False),
        (1, torch.bfloat16, None, False),
        (2, torch.float16, torch.float8_e4m3fn, True),
        (3, torch.bfloat16, torch.float8_e4m3fn, True),
        (0, torch.bfloat16, torch.float8_e5m2, False),
        (1, torch.float32, torch.float8_e4m3fn, True),
        (2, torch.float32, torch.float16, True),
        (3, torch.float32, torch.bfloat16, False),
        (1, torch.float16, torch.float8_e5m2, True),
        (2, torch.bfloat16, None, False),
    ],
    ids=str,
)
def test_precisions(number, dtype, kv_dtype, scales):
    sizes = {"batch_size": 2, "max_len": 10, "head_dim": 16, "page_size": 3}
    story = {"dtype": dtype, "kv_dtype": kv_dtype, "kv_scales": scales, "softcap": True, "seed": 3, **STORIES[number]}
    check(Scenario.make(**story, **sizes))


@pytest.mark.parametrize("mode", MODES)
def test_no_request(mode):
    padded = 0 if mode in ("decode", "idle") else 1
    check(Scenario.make(mode=mode, overlay="window", batch_size=0, num_q_heads=1, num_kv_heads=1, padded_rows=padded))


class AllSteps:
    """A `MultiStepDraft` that answers as the backend of the batch's own step."""

    def __init__(self, config, pools, layers):
        backend = on_triton(config, pools, layers)
        steps = config.speculative.num_steps
        self._draft = MultiStepDraft(backend.config, pools, layers, steps, registry=backend.registry)

    def plan(self, batch):
        self._step = batch.draft_step
        self._draft.plan(batch)

    def forward(self, q, k, v, layer, **options):
        return self._draft.forward(self._step, q, k, v, layer, **options)


@pytest.mark.parametrize(("topk", "step"), [(1, 0), (2, 0), (2, 2)])
def test_multi_step_draft(topk, step):
    story = {"mode": "draft_decode", "overlay": "window", "topk": topk, "num_steps": 3, "draft_step": step}
    results = run_scenario(Scenario.make(batch_size=2, max_len=9, seed=5, padded_rows=1, **story), AllSteps)
    assert [str(result) for result in results if result.status != "equal"] == []
