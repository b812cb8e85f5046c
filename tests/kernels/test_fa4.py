"""The adapter of FlashAttention 4: what it claims, what it refuses and what it passes on. On a GPU: `faback check`."""

from __future__ import annotations

import sys
from importlib import metadata
from types import ModuleType

import attrs
import pytest
import torch

from core.test_select import ask
from faback import AttentionBackend, hookimpl
from faback.builtins import BUILTINS
from faback.core.registry import Registry
from faback.kernels import fa4
from faback.kernels.fa4 import FlashAttention4
from faback.testing import MODES, OVERLAYS, Options, Scenario, impossible, run_scenario
from faback.testing.conformance import KernelConformance
from kernels import stubs_fa3

CPU = torch.device("cpu")
HALF = {"q_dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}
CELLS = [
    (mode, overlay) for mode in MODES for overlay in OVERLAYS if impossible(Options(mode=mode, overlay=overlay)) is None
]


def varlen(q, k, v, *, learnable_sink, return_lse, page_table, window_size, causal, softcap, max_seqlen_k, **given):
    """As the package describes its function, by the stand-in for FlashAttention 3; sinks enter the log-sum-exp."""
    assert q.is_contiguous() and all(map(stubs_fa3.loadable, (q, k, v))) and max_seqlen_k > 0 and softcap == 0
    assert window_size == (None, None) or not causal or window_size[1] == 0
    left, right = (-1 if bound is None else bound for bound in window_size)
    out = torch.full((*q.shape[:2], v.shape[-1]), torch.nan, dtype=q.dtype)
    sides = {"window_size_left": left, "window_size_right": right, "is_causal": causal}
    sides["sink_dtypes"] = (torch.float32, torch.bfloat16, torch.float16)
    _, lse, *_ = stubs_fa3.fwd(q, k, v, out=out, page_table=page_table, sinks=learnable_sink, **sides, **given)
    if learnable_sink is not None:
        lse = torch.logaddexp(lse, learnable_sink.float()[:, None])
    return out, lse if return_lse else None


@pytest.fixture(autouse=True)
def package(monkeypatch):
    module = ModuleType("flash_attn.cute")
    module.flash_attn_varlen_func = varlen
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)


class OnCPU(FlashAttention4):
    """Allowed where the stand-in runs."""

    def probe(self, device):
        return None

    def capabilities(self, device):
        able = super().capabilities(device)
        return attrs.evolve(able, devices=frozenset({"cpu"}), min_arch=None, max_arch=None)


class Kernels:
    @hookimpl
    def faback_kernels(self):
        return [OnCPU()]


def on_stub(config, pools, layers):
    config = attrs.evolve(config, kernels="fa4")
    registry = Registry.load(config, [name for name in BUILTINS if name != fa4.__name__], entry_points=[])
    registry.register(Kernels(), "stub")
    return AttentionBackend(config, pools, layers, registry=registry)


@pytest.mark.parametrize(("number", "mode", "overlay"), [(i, *cell) for i, cell in enumerate(CELLS)])
def test_it_equals_the_oracle(number, mode, overlay):
    options = {"topk": 1 + number % 2} if mode in ("draft_decode", "target_verify") else {}
    sizes = {"page_size": (1, 16, 4)[number % 3], "padded_rows": number % 2, "padded_tokens": number % 3}
    scenario = Scenario.make(
        mode=mode, overlay=overlay, seed=number, head_dim=16, dtype=torch.bfloat16, sinks=True, **sizes, **options
    )
    results = run_scenario(scenario, on_stub)
    refused = any(result.status == "refused" for result in results)
    assert [str(result) for result in results if result.status == "wrong"] == []
    assert not refused or overlay == "mla" or (mode, overlay) == ("embedding", "local")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"page_size": 128}, "pages that are no multiple of 128"),
        ({"page_size": 256}, "pages that are no multiple of 128"),
        ({"page_size": 192, "head_dim": 192, "v_head_dim": 192}, "pages that are no multiple of 96"),
        ({"page_size": 64, "head_dim": 256, "v_head_dim": 256}, "use pages of 16 tokens"),
        ({"head_dim": 72, "v_head_dim": 72}, "multiples of 16"),
        ({"kv_dtype": torch.float8_e4m3fn}, "kv dtype"),
        ({"features": frozenset({"tree"})}, "tree"),
    ],
    ids=lambda value: str(value),
)
def test_what_it_cannot_is_refused_with_the_reason(changes, words):
    reasons = OnCPU().reject(ask(**{**HALF, **changes}), CPU)
    assert any(words in str(reason) for reason in reasons)


@pytest.mark.parametrize("changes", [{"page_size": 64}, {"page_size": 16, "head_dim": 256, "v_head_dim": 256}], ids=str)
def test_other_pages_are_accepted(changes):
    assert OnCPU().reject(ask(**{**HALF, **changes}), CPU) == ()


def test_keys_of_the_batch_have_no_pages():
    assert OnCPU().reject(ask("raw_kv", page_size=128, **HALF), CPU) == ()


@pytest.mark.parametrize(
    ("version", "arch", "broken", "words"),
    [
        (None, 90, False, "flash-attn-4 is not installed"),
        ("4.0", 80, False, "knows Hopper"),
        ("4.0", 100, False, "knows Hopper"),
        ("4.0", 90, True, "cannot be imported"),
        ("4.0", 90, False, None),
    ],
    ids=["absent", "older", "newer", "broken", "fine"],
)
def test_why_it_cannot_run_here(monkeypatch, version, arch, broken, words):
    def installed(name):
        if version is None or name != "flash-attn-4":
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", installed)
    monkeypatch.setattr(fa4, "arch_of", lambda device: arch)
    monkeypatch.delenv(fa4.KEPT, raising=False)
    if broken:
        monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    reason = FlashAttention4().probe(CPU)
    assert reason is None if words is None else words in reason


class Replacing:
    """The adapter on the stand-in, in place of the built-in one."""

    @hookimpl
    def faback_kernels(self):
        kernel = OnCPU()
        kernel.replaces = "fa4"
        return [kernel]


class TestConformance(KernelConformance):
    """What the capabilities claim is right, and all of it is reached."""

    plugin, kernel = Replacing(), "fa4"
    unreached = KernelConformance.unreached | {"softcap"}  # the stand-in has none
