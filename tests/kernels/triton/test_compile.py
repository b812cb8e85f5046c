"""The compile gate: what the provider launches compiles for sm_80 and sm_90, and fits. Needs no GPU."""

from __future__ import annotations

import attrs
import pytest
import torch

from faback.core.segment import KVWrite
from faback.kernels.torch_ops import TorchOps
from faback.kernels.triton import provider
from faback.kernels.triton.ops import TritonOps
from faback.kernels.triton.provider import TritonAttention
from faback.kernels.triton.tiles import TABLE, pick
from kernels.triton.cases import Processors
from kernels.triton.compiling import REGISTER_FILE, SHARED_MEMORY, WARP, compiling
from kernels.triton.interpreter import needs_compiler
from kernels.triton.segments import make_case

needs_compiler()

KERNEL = TritonAttention()
BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
DECODE, VERIFY, PREFILL = [(1, 50)] * 3, [(8, 40)] * 2, [(130, 140)]
MLA = {"dims": (576, 512), "latent": True, "heads": (16, 1)}
FULL, LONG = {"processors": 1}, {"max_kv_len": 20000}
"""A device that a few rows fill, and room for long contexts: both decide which tile is chosen."""

CASES = {
    "decode": {"rows": DECODE},
    "decode long": {"rows": DECODE, "page": 16, "features": {"slot_map", "int64", "window", "keep"}, **LONG},
    "decode many": {"rows": DECODE, "page": 64, "features": {"softcap", "sinks"}, **FULL, "max_kv_len": 4096},
    "decode many short": {"rows": DECODE, "page": 16, "features": {"window"}, **FULL, **LONG},
    "decode many long": {"rows": DECODE, "page": 16, "processors": 5, **LONG},
    "decode blocks": {"rows": DECODE, "page": 16, "features": {"blocks", "dense", "window"}},
    "decode blocks apart": {"rows": DECODE, "page": 16, "features": {"blocks_apart", "dense", "sinks"}, **LONG},
    "decode e4m3": {"rows": DECODE, "kv_dtype": E4M3, "features": {"head_scales"}},
    "decode new": {"rows": DECODE, "page": 16, "features": {"slot_map", "new"}},
    "decode new many": {"rows": DECODE, "features": {"new"}, **FULL},
    "decode new e4m3": {"rows": DECODE, "kv_dtype": E4M3, "features": {"head_scales", "new"}},
    "decode new mla": {"rows": DECODE, "features": {"new"}, **MLA},
    "decode e5m2": {"rows": DECODE, "kv_dtype": E5M2, "features": {"scales"}},
    "decode d256": {"rows": DECODE, "dims": (256, 256)},
    "decode mla": {"rows": DECODE, **MLA},
    "decode mla e4m3": {"rows": DECODE, "kv_dtype": E4M3, "features": {"scales"}, **MLA},
    "decode mla float32": {"rows": DECODE, "dtype": torch.float32, **MLA},
    "tree": {"rows": VERIFY, "features": {"tree"}},
    "branches": {"rows": VERIFY, "features": {"branches"}},
    "verify d64": {"rows": VERIFY, "heads": (16, 2), "dims": (64, 64)},
    "verify many": {"rows": VERIFY, "heads": (16, 2), **FULL},
    "verify mla": {"rows": [(4, 40)] * 2, "features": {"tree"}, **MLA},
    "extend": {"rows": [(40, 70)], "features": {"window", "softcap", "sinks"}, **FULL},
    "extend long": {"rows": [(40, 70)], "features": {"chunk", "raw"}, **FULL, **LONG},
    "deterministic": {"rows": DECODE, "deterministic": True},
    "prefill": {"rows": PREFILL, **FULL},
    "prefill blocks": {"rows": PREFILL, "page": 16, "features": {"blocks", "dense"}, **FULL},
    "prefill long": {"rows": PREFILL, "page": 16, **FULL, **LONG},
    "verify 64": {"rows": [(64, 130)], "features": {"tree"}, **FULL},
    "prefill d64": {"rows": PREFILL, "dims": (64, 64), **FULL},
    "prefill d256": {"rows": PREFILL, "dims": (256, 256)},
}


OLDER = ("decode e5m2", "decode new", "tree", "prefill")
"""Cases that are compiled for sm_80. Its 8-bit floats are e5m2, and there alone they are compiled."""

SPILLS = {
    "decode many": 40,  # one warp: more such programs at a time are worth it
    "decode many short": 56,  # likewise
    "decode new many": 40,  # likewise
    "decode e4m3": 128,  # likewise
    "decode new e4m3": 144,  # likewise
    "decode mla float32": 24,
    "verify mla": 840,  # 64 queries of 512 sums each leave nothing for the tail; faster all the same
    "verify 64": 528,  # sixteen warps with half of the registers each, on purpose
    "extend": 48,
    "extend long": 72,
    "prefill d256": 648,
}
"""Bytes per thread that are spilled on sm_90, as measured. Everything else spills nothing."""

SPILLS_OLDER = {"decode new": 8, "tree": 16}
"""Likewise on sm_80."""

SERIALIZED = {"verify 64"}
"""Cases whose asynchronous products wait for one another on sm_90; docs/triton-notes.md says what that costs."""


def prepared(name, arch):
    """A case, and its launch but for the layer's own tensors."""
    wanted = {"heads": (8, 2), "dims": (128, 128), "dtype": BF16, **CASES[name]}
    processors, longest = wanted.pop("processors", 132), wanted.pop("max_kv_len", 0)
    deterministic, features = wanted.pop("deterministic", False), wanted.pop("features", set())
    case = make_case(1, features=features - {"new"}, **wanted)
    segment = attrs.evolve(case.segment, max_kv_len=max(longest, case.segment.max_kv_len))
    if "new" in features:
        slots = torch.ones(segment.tokens, dtype=torch.int64)
        segment = attrs.evolve(segment, max_seqlen_q=1, write=KVWrite(slots, segment.kv.slot_map))
    request = attrs.evolve(case.request(deterministic=deterministic), device="cuda", arch=arch)
    assert not KERNEL.reject(request, torch.device("cuda"))
    ws = Processors(TorchOps(), torch.device("cpu"), {}, processors)
    return case, KERNEL.prepare(segment, case.layer, request, ws)


def build(name, arch, cache):
    """Compiles one launch of the attention kernel."""
    case, launch = prepared(name, arch)
    out = torch.empty(case.q.shape[0], case.layer.num_q_heads, case.layer.v_head_dim, dtype=case.q.dtype)
    options = {"k_scale": case.k_scale, "v_scale": case.v_scale}
    if KERNEL.stores(launch):
        k, v = (torch.empty(case.q.shape[0], *cache.shape[1:], dtype=BF16) for cache in (case.k, case.v))
        options["new"] = k, None if case.layer.latent else v
    with compiling(arch, cache) as built:
        KERNEL.run(launch, case.q, case.k, case.v, out, sinks=case.sinks, **options)
    (found,) = built
    return found


CELLS = [(90, name) for name in CASES if name != "decode e5m2"] + [(80, name) for name in OLDER]


@pytest.mark.parametrize(("arch", "name"), CELLS, ids=lambda value: str(value))
def test_attention(arch, name, tmp_path):
    built = build(name, arch, tmp_path)
    check(built, arch, (SPILLS if arch == 90 else SPILLS_OLDER).get(name, 0))
    assert built.serialized == (arch == 90 and name in SERIALIZED)


@pytest.mark.parametrize("arch", TABLE)
def test_every_tile_is_chosen(monkeypatch, arch):
    """Or the gate would not see it. On sm_80 most are compiled nowhere, for they differ little."""
    chosen = []
    monkeypatch.setattr(provider, "pick", lambda *args: chosen.append(pick(*args)) or chosen[-1])
    for name in CASES:
        if arch >= 89 or "e4m3" not in name:
            prepared(name, arch)
    assert [tile for tile in TABLE[arch].values() if tile not in chosen] == []


@pytest.mark.parametrize("arch", [80, 90])
def test_operations(arch, tmp_path):
    """KV writes with and without translation and scale, and merges."""
    ops, k = TritonOps(), torch.zeros(8, 2, 128, dtype=BF16)
    cache, latent = torch.zeros(32, 2, 128, dtype=BF16), torch.zeros(32, 1, 576, dtype=BF16)
    slots, slot_map = torch.ones(8, dtype=torch.int64), torch.ones(32, dtype=torch.int32)
    small = E5M2 if arch < 89 else E4M3
    with compiling(arch, tmp_path) as built:
        ops.set_kv(k, k, cache, cache, KVWrite(slots), None, None)
        ops.set_kv(k, k, cache.to(small), cache.to(small), KVWrite(slots, slot_map), torch.ones(2), torch.ones(2))
        ops.set_kv(latent[:8], None, latent, latent[..., :512], KVWrite(slots.int()), None, None)
        ops.merge([k, k], [torch.zeros(8, 2)] * 2, k, torch.zeros(8, 2), torch.zeros(2))
    assert [kernel.name for kernel in built] == ["store", "store", "store", "merge"]
    for kernel in built:
        check(kernel, arch, 0)


def check(built, arch, spills):
    """Fits into an SM of the architecture, and spills no more than it is known to."""
    assert built.shared <= SHARED_MEMORY[arch]
    assert built.registers * built.warps * WARP <= REGISTER_FILE
    assert built.spills <= spills, f"{built.spills} bytes per thread are spilled, {spills} are known"
