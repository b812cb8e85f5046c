"""The adapter of FlashAttention 3, against operators that keep its contract in plain torch."""

from __future__ import annotations

import sys
from types import ModuleType

import attrs
import pytest
import torch

from faback import AttentionBackend, AttentionLayer, BackendConfig, ForwardBatch, PoolError, Pools, hookimpl
from faback.builtins import BUILTINS
from faback.core.registry import Registry
from faback.kernels import fa3
from faback.kernels.fa3 import Build, FlashAttention3
from faback.pools import MHAPool
from faback.testing import MODES, OVERLAYS, Options, Scenario, impossible, run_scenario
from faback.testing.conformance import KernelConformance
from faback.testing.late import Replayed
from kernels import stubs_fa3

CELLS = [
    (mode, overlay) for mode in MODES for overlay in OVERLAYS if impossible(Options(mode=mode, overlay=overlay)) is None
]
TOKENSPEED = frozenset(f"FLASHATTENTION_DISABLE_{part}" for part in ("SOFTCAP", "HDIM96", "HDIMDIFF64", "HDIMDIFF192"))
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def operators():
    library = stubs_fa3.register()
    yield
    library._destroy()


class OnCPU(FlashAttention3):
    """Allowed where the stand-in runs."""

    def __init__(self, flags=TOKENSPEED, sinks=True):
        super().__init__()
        self._build = Build(flags, sinks)

    def probe(self, device):
        return None

    def capabilities(self, device):
        able = super().capabilities(device)
        return attrs.evolve(able, devices=frozenset({"cpu"}), min_arch=None, max_arch=None)


def on_stub(kernel, replayed=False):
    class Kernels:
        @hookimpl
        def faback_kernels(self):
            return [kernel]

    def make(config, pools, layers):
        config = attrs.evolve(config, kernels="fa3")
        registry = Registry.load(config, [name for name in BUILTINS if name != fa3.__name__], entry_points=[])
        registry.register(Kernels(), "stub")
        return (Replayed if replayed else AttentionBackend)(config, pools, layers, registry=registry)

    return make


@pytest.mark.parametrize("replayed", [False, True], ids=["eager", "replayed"])
@pytest.mark.parametrize(("number", "mode", "overlay"), [(i, *cell) for i, cell in enumerate(CELLS)])
def test_it_equals_the_oracle(number, mode, overlay, replayed):
    options = {"topk": 1 + number % 2} if mode in ("draft_decode", "target_verify") else {}
    hybrid = overlay in ("window", "local", "prefill_aware") and mode != "embedding"
    page_size = (1, 16, 4)[number % 3]
    sizes = {"dtype": torch.bfloat16, "padded_rows": number % 2, "padded_tokens": number % 3, "sinks": number % 2 == 0}
    scenario = Scenario.make(
        mode=mode, overlay=overlay, seed=number, page_size=page_size, hybrid=hybrid, head_dim=16, **sizes, **options
    )
    results = run_scenario(scenario, on_stub(OnCPU(), replayed))
    refused = {result.reason for result in results if result.status == "refused"}
    assert [str(result) for result in results if result.status == "wrong"] == []
    # Latents have unequal dims; chunks are lowered to rows of their own, which keys of the batch do not have.
    assert not refused or overlay == "mla" or (mode, overlay) == ("embedding", "local")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sinks_that_would_be_rounded_enter_at_a_merge(dtype):
    scenario = Scenario.make(mode="extend", dtype=dtype, sinks=True, head_dim=16, page_size=4)
    for call in (call for step in scenario.steps for call in step.calls):
        assert call.sinks.dtype != torch.bfloat16 or dtype == torch.bfloat16
    assert {result.status for result in run_scenario(scenario, on_stub(OnCPU()))} == {"equal"}


def test_builds_without_sinks_have_them_merged():
    scenario = Scenario.make(mode="decode", dtype=torch.bfloat16, sinks=True, head_dim=16)
    assert {result.status for result in run_scenario(scenario, on_stub(OnCPU(sinks=False)))} == {"equal"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_dtype": torch.float8_e4m3fn, "kv_scales": True}, "kv dtype"),
        ({"softcap": True}, "softcap"),
        ({"head_dim": 24, "v_head_dim": 16}, "equal dims of k and v in this build"),
        ({"head_dim": 20}, "multiples of 8"),
    ],
    ids=["fp8", "softcap", "dims", "odd dim"],
)
def test_what_the_build_cannot_is_refused_with_the_reason(options, words):
    scenario = Scenario.make(mode="decode", **{"dtype": torch.bfloat16, "head_dim": 16, **options})
    (result,) = run_scenario(scenario, on_stub(OnCPU()))
    assert result.status == "refused" and words in result.reason


class Shifted(MHAPool):
    """Heads that begin 2 bytes behind a multiple of 16."""

    def buffers(self, layer):
        wide = torch.zeros(2, self.num_slots, 2, 24, dtype=torch.bfloat16)
        return tuple(wide[..., 1:17])


def test_a_cache_that_cannot_be_loaded_in_vectors_is_refused():
    layer = AttentionLayer(layer_id=0, num_q_heads=4, num_kv_heads=2, head_dim=16)
    pool = Shifted(num_pages=5, page_size=4, layers=[layer], dtype=torch.bfloat16, device="cpu")
    pools = Pools(req_to_token=torch.arange(24, dtype=torch.int32).view(3, 8), kv=pool)
    backend = on_stub(OnCPU())(BackendConfig(context_len=8, dtype=torch.bfloat16), pools, (layer,))
    slots = torch.tensor([9, 17])
    lens = torch.tensor([2, 2])
    backend.plan(
        ForwardBatch(forward_mode="decode", req_pool_indices=torch.tensor([1, 2]), seq_lens=lens, out_cache_loc=slots)
    )
    with pytest.raises(PoolError, match="begin at multiples of 16 bytes.*takes any strides"):
        backend.forward(torch.zeros(2, 4, 16, dtype=torch.bfloat16), None, None, layer, save_kv_cache=False)


@pytest.mark.parametrize(
    ("off", "dims", "accepted"),
    [
        (frozenset(), (192, 128), True),
        (frozenset(), (64, 512), False),
        (frozenset(), (128, 64), False),
        (TOKENSPEED, (192, 128), False),
        (TOKENSPEED, (64, 512), False),
        (TOKENSPEED, (192, 192), True),
        (frozenset({"FLASHATTENTION_DISABLE_HDIM256"}), (256, 256), False),
    ],
)
def test_head_dims_are_those_that_were_compiled(off, dims, accepted):
    from core.test_select import ask

    half = {"q_dtype": torch.float16, "kv_dtype": torch.float16}
    request = ask(head_dim=dims[0], v_head_dim=dims[1], **half)
    assert (OnCPU(off).reject(request, CPU) == ()) is accepted


def test_builds_are_known_by_flags_and_arguments(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    config = ModuleType("flash_attn_config")
    config.CONFIG = {"build_flags": {"FLASH_ATTENTION_DISABLE_HDIMDIFF64": True, "FLASHATTENTION_DISABLE_SPLIT": False}}
    monkeypatch.setitem(sys.modules, "flash_attn_config", config)
    build = Build.installed()
    assert build.lacks("HDIMDIFF64") and not build.lacks("SPLIT") and build.sinks


@pytest.mark.parametrize(
    ("found", "arch", "words"),
    [
        (False, 90, "not installed"),
        (True, 80, "needs a Hopper GPU"),
        (True, 100, "needs a Hopper GPU"),
        (True, 90, "cannot be used: ImportError: no such symbol"),
    ],
    ids=["absent", "older", "newer", "broken"],
)
def test_why_it_cannot_run_here(monkeypatch, found, arch, words):
    def broken():
        raise ImportError("no such symbol")

    monkeypatch.setattr(fa3, "find_spec", lambda name: found or None)
    monkeypatch.setattr(fa3, "arch_of", lambda device: arch)
    monkeypatch.setattr(Build, "installed", broken)
    assert words in FlashAttention3().probe(CPU)


class Replacing:
    """The adapter on the stand-in, in place of the built-in one."""

    @hookimpl
    def faback_kernels(self):
        kernel = OnCPU()
        kernel.replaces = "fa3"
        return [kernel]


class TestConformance(KernelConformance):
    """What the capabilities claim is right, and all of it is reached."""

    plugin, kernel = Replacing(), "fa3"
