"""Every mode and overlay of the test kit on the Triton kernels on a GPU, in three precisions, against the oracle.

What is tolerated is a multiple of the error that plain torch makes in the same dtype (`faback.testing.checks`). Nearly
all of the time goes into compiling some hundreds of kernels: run this with `-n 14` or so.
"""

from __future__ import annotations

import attrs
import pytest
import torch

from faback import AttentionBackend
from faback.builtins import BUILTINS
from faback.core.registry import Registry
from faback.testing import MODES, OVERLAYS, Options, Scenario, impossible, run_scenario
from gpu.marks import on_gpu

pytestmark = on_gpu

CELLS = [
    (mode, overlay) for mode in MODES for overlay in OVERLAYS if impossible(Options(mode=mode, overlay=overlay)) is None
]
INT32, INT64 = {"index_dtype": torch.int32}, {"index_dtype": torch.int64}
PRECISIONS = {
    "bf16": {"dtype": torch.bfloat16, **INT32},
    "fp16": {"dtype": torch.float16, **INT32},
    "fp8": {"dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn, "kv_scales": True, **INT64},
}


def on_triton(config, pools, layers):
    config = attrs.evolve(config, kernels="triton")
    return AttentionBackend(config, pools, layers, registry=Registry.load(config, BUILTINS, entry_points=[]))


class WithLSE:
    """A backend that computes the LSE even where nobody asks for it: half as many kernels to compile."""

    def __init__(self, config, pools, layers):
        self._backend = on_triton(config, pools, layers)

    def plan(self, batch):
        return self._backend.plan(batch, return_lse=True)

    def forward(self, *args, return_lse=False, **options):
        out, lse = self._backend.forward(*args, return_lse=True, **options)
        return (out, lse) if return_lse else out


def features(mode, overlay, number):
    """Few enough that kernels are shared between cells: each new mixture is compiled anew."""
    wanted = {
        "page_size": (1, 16, 64, 3)[number % 4],
        "sinks": True,
        "hybrid": overlay in ("window", "local", "prefill_aware") and mode != "embedding",
        "inclusive": number % 2 == 0,
    }
    if mode in ("draft_decode", "target_verify"):
        wanted["topk"] = 1 + number % 2
    if mode == "draft_extend":
        wanted["strided_rows"] = number % 2 == 0
    return wanted


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("number", "mode", "overlay"), [(i, *cell) for i, cell in enumerate(CELLS)])
def test_mode_and_overlay(number, mode, overlay, precision):
    scenario = Scenario.make(
        mode=mode,
        overlay=overlay,
        seed=number,
        batch_size=3,
        max_len=80,
        head_dim=64,
        padded_rows=1,
        padded_tokens=number % 2,
        **features(mode, overlay, number),
        **PRECISIONS[precision],
    )
    results = run_scenario(scenario, on_triton if precision == "bf16" else WithLSE, device="cuda")
    assert [str(result) for result in results if result.status != "equal"] == []


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("mode", "overlay"), [("decode", "window"), ("extend", "full"), ("target_verify", "mla")])
def test_long_texts_and_capped_scores(mode, overlay, precision):
    scenario = Scenario.make(
        mode=mode,
        overlay=overlay,
        seed=1,
        max_len=700,
        head_dim=64,
        softcap=True,
        page_size=16,
        **PRECISIONS[precision],
    )
    results = run_scenario(scenario, on_triton, device="cuda")
    assert [str(result) for result in results if result.status != "equal"] == []
