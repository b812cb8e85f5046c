"""The adapter of FlashAttention 2, against a stand-in that keeps its contract in plain torch."""

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
from faback.kernels import fa2
from faback.kernels.fa2 import FlashAttention2
from faback.testing import MODES, OVERLAYS, Options, Scenario, impossible, run_scenario
from faback.testing.conformance import VARIANTS, KernelConformance
from faback.testing.late import Replayed
from kernels import stubs_fa2

CPU = torch.device("cpu")
HALF = {"q_dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}
CELLS = [
    (mode, overlay) for mode in MODES for overlay in OVERLAYS if impossible(Options(mode=mode, overlay=overlay)) is None
]


@pytest.fixture(scope="module", autouse=True)
def operators():
    library = stubs_fa2.register()
    yield
    library._destroy()


@pytest.fixture(autouse=True)
def package(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, fa2.MODULE, stubs_fa2.module())


class OnCPU(FlashAttention2):
    """Allowed where the stand-in runs."""

    def probe(self, device):
        return None

    def capabilities(self, device):
        return attrs.evolve(super().capabilities(device), devices=frozenset({"cpu"}), min_arch=None)


class Replacing:
    """The adapter on the stand-in, in place of the built-in one."""

    @hookimpl
    def faback_kernels(self):
        kernel = OnCPU()
        kernel.replaces = "fa2"
        return [kernel]


def on_stub(replayed=False):
    def make(config, pools, layers):
        config = attrs.evolve(config, kernels="fa2")
        registry = Registry.load(config, BUILTINS, entry_points=[])
        registry.register(Replacing(), "stub")
        return (Replayed if replayed else AttentionBackend)(config, pools, layers, registry=registry)

    return make


@pytest.mark.parametrize("replayed", [False, True], ids=["eager", "replayed"])
@pytest.mark.parametrize(("number", "mode", "overlay"), [(i, *cell) for i, cell in enumerate(CELLS)])
def test_it_equals_the_oracle(number, mode, overlay, replayed):
    hybrid = overlay in ("window", "local", "prefill_aware") and mode != "embedding"
    sizes = {"padded_rows": number % 2, "padded_tokens": number % 3, "sinks": number % 2 == 0, "head_dim": 16}
    dtype = (torch.bfloat16, torch.float16)[number % 2]
    scenario = Scenario.make(
        mode=mode, overlay=overlay, seed=number, dtype=dtype, page_size=256, hybrid=hybrid, **sizes
    )
    results = run_scenario(scenario, on_stub(replayed))
    assert [str(result) for result in results if result.status == "wrong"] == []
    refused = any(result.status == "refused" for result in results)
    # Latents have unequal dims, and other rules are lowered to rows that begin within a page.
    assert refused == (overlay in ("mla", "local", "cross") or (overlay == "prefill_aware" and mode != "extend"))


@pytest.mark.parametrize("mode", ["decode", "extend", "embedding"])
@pytest.mark.parametrize("overlay", ["full", "window"])
@pytest.mark.parametrize("replayed", [False, True], ids=["eager", "replayed"])
def test_texts_of_several_pages(mode, overlay, replayed):
    lengths = ((700, 1), (255, 2), (0, 3)) if mode != "decode" else ((700, 1), (255, 1), (256, 1))
    scenario = Scenario.make(
        mode=mode, overlay=overlay, dtype=torch.bfloat16, page_size=256, lengths=lengths, windows=(300,), sinks=True,
        head_dim=16, padded_rows=1,
    )  # fmt: skip
    assert {result.status for result in run_scenario(scenario, on_stub(replayed))} == {"equal"}


def test_one_query_for_some_rows_and_none_for_others():
    scenario = Scenario.make(
        mode="extend", dtype=torch.bfloat16, page_size=256, lengths=((9, 1), (5, 0), (7, 1)), head_dim=16,
        padded_tokens=1,
    )  # fmt: skip
    assert {result.status for result in run_scenario(scenario, on_stub())} == {"equal"}


@pytest.mark.parametrize(("overlay", "window"), [("full", (-1, -1)), ("window", (5, 0))])
def test_only_a_window_is_passed_as_one(monkeypatch, overlay, window):
    """Or a decode step would not be taken for one whose heads can be packed."""
    seen = []

    def recording(*args, window_size, **options):
        seen.append(window_size)
        return stubs_fa2.flash_attn_with_kvcache(*args, window_size=window_size, **options)

    monkeypatch.setattr(sys.modules[fa2.MODULE], "flash_attn_with_kvcache", recording)
    scenario = Scenario.make(
        mode="decode", overlay=overlay, dtype=torch.bfloat16, page_size=256, windows=(5,), head_dim=16
    )
    run_scenario(scenario, on_stub())
    assert window in seen and set(seen) <= {window, (-1, -1)}


@pytest.mark.parametrize(
    ("changes", "aspect", "words"),
    [
        ({"page_size": 16}, "page size", "multiples of 256 (make the pools with pages of 256 tokens)"),
        ({"page_size": 128}, "page size", "multiples of 256"),
        ({"page_size": 384}, "page size", "multiples of 256"),
        ({"kv_dtype": torch.float8_e4m3fn}, "kv dtype", "the triton kernel reads 8-bit caches"),
        ({"kv_dtype": torch.float16}, "dtypes", "the triton kernel mixes dtypes"),
        ({"q_dtype": torch.float32, "kv_dtype": torch.float32}, "q dtype", "bfloat16, float16"),
        ({"head_dim": 288, "v_head_dim": 288}, "head dim", "up to 256 (the triton kernel takes any dims)"),
        ({"head_dim": 20, "v_head_dim": 20}, "head dim", "multiples of 8"),
        ({"head_dim": 192, "v_head_dim": 128}, "head dim", "equal dims of k and v"),
        ({"features": frozenset({"sinks"})}, "feature", "sinks"),
        ({"features": frozenset({"tree"})}, "feature", "tree"),
        ({"features": frozenset({"kv_scales"})}, "feature", "de-quantisation"),
    ],
    ids=str,
)
def test_what_it_cannot_is_refused_with_the_reason(changes, aspect, words):
    request = ask(**{**HALF, "page_size": 256, **changes})
    reasons = OnCPU().reject(request, CPU)
    assert any(reason.aspect == aspect and words in str(reason) for reason in reasons)


@pytest.mark.parametrize("changes", [{}, {"page_size": 512}, {"head_dim": 256, "v_head_dim": 256}], ids=str)
def test_what_it_can_is_accepted(changes):
    assert OnCPU().reject(ask(**{**HALF, "page_size": 256, **changes}), CPU) == ()


def test_keys_of_the_batch_have_no_pages():
    assert OnCPU().reject(ask("raw_kv", page_size=1, **HALF), CPU) == ()


def test_sinks_enter_at_a_merge():
    scenario = Scenario.make(mode="decode", dtype=torch.float16, page_size=256, sinks=True, head_dim=16)
    backend = on_stub()(scenario.config, scenario.pools(), scenario.layers)
    explanation = backend.explain(scenario.steps[0].batch, scenario.layers[0])
    assert explanation.kernel == "sink_merge(fa2)"


@pytest.mark.parametrize(
    ("version", "arch", "words"),
    [
        (None, 90, "flash-attn is not installed"),
        ("2.7.4.post1", 90, "knows flash-attn 2.8 and later 2.x, 2.7.4.post1 is installed"),
        ("3.0.0", 90, "3.0.0 is installed"),
        ("2.8.3.post2", 75, "needs an Ampere GPU"),
        ("2.8.3.post2", 0, "needs an Ampere GPU"),
        ("2.8.3.post2", 80, None),
        ("2.10.0", 120, None),
    ],
)
def test_why_it_cannot_run_here(monkeypatch, version, arch, words):
    install(monkeypatch, version, arch)
    reason = FlashAttention2().probe(CPU)
    assert reason is None if words is None else words in reason


def test_a_package_that_does_not_import_is_named(monkeypatch):
    install(monkeypatch, "2.8.3", 90)
    monkeypatch.setitem(sys.modules, fa2.MODULE, None)
    assert "cannot be used: ModuleNotFoundError" in FlashAttention2().probe(CPU)


def test_a_function_with_other_arguments_is_named(monkeypatch):
    def flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=None, softmax_scale=None, causal=False):
        raise AssertionError

    install(monkeypatch, "2.8.3", 90)
    monkeypatch.setattr(sys.modules[fa2.MODULE], "flash_attn_with_kvcache", flash_attn_with_kvcache)
    wanted = "lacks the arguments block_table, num_splits, return_softmax_lse, softcap, window_size"
    assert wanted in FlashAttention2().probe(CPU)


def install(monkeypatch, version, arch):
    def installed(name):
        if version is None or name != fa2.DISTRIBUTION:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", installed)
    monkeypatch.setattr(fa2, "arch_of", lambda device: arch)


class TestConformance(KernelConformance):
    """What the capabilities claim is right, and all of it is reached."""

    plugin, kernel = Replacing(), "fa2"

    def cells(self):
        for number, variant in enumerate(VARIANTS):
            halved = {"dtype": (torch.bfloat16, torch.float16)[number % 2], "head_dim": 16, **variant}
            for mode, overlay in CELLS:
                options = Options(mode=mode, overlay=overlay, seed=number, page_size=256, **halved)
                if impossible(options) is None:
                    yield options
