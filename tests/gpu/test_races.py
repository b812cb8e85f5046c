"""Small calls of every form of the attention kernel, for tools that watch each memory access of a GPU.

    compute-sanitizer --tool racecheck --kernel-name kns=attend python -m pytest -m gpu tests/gpu/test_races.py

The expected results are computed on the CPU: cuBLAS kernels break under racecheck.
"""

from __future__ import annotations

import pytest

from gpu.marks import on_gpu
from gpu.test_kernels import E4M3, GQA, KERNEL, MLA, texts
from kernels.triton.segments import make_case

pytestmark = on_gpu

CASES = {
    "decode": {**GQA, "rows": texts(6, 3000), "page": 16, "features": {"sinks"}},
    "decode window": {**GQA, "rows": texts(6, 3000), "features": {"window", "keep"}, "window": 700},
    "decode e4m3": {**GQA, "rows": texts(6, 3000), "page": 16, "kv_dtype": E4M3, "features": {"head_scales"}},
    "decode mla": {**MLA, "rows": texts(4, 1500), "page": 64},
    "tree": {**GQA, "rows": texts(5, 2000, 8), "page": 16, "features": {"tree", "slot_map"}},
    "branches": {**GQA, "rows": texts(5, 1000, 4), "page": 16, "features": {"branches"}},
    "mixed": {**GQA, "rows": [(1, 2000), (300, 40), (16, 0), (1, 0), (0, 77)], "features": {"padded_tokens"}},
    "prefill": {**GQA, "rows": [(300, 500), (70, 0)], "page": 16},
    "prefill mla": {**MLA, "rows": [(90, 200)], "page": 64},
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_small_calls(name, deterministic):
    case = make_case(1, device="cuda", **CASES[name])
    found = case.run(KERNEL, deterministic=deterministic)
    case.on_cpu().judge(*(answer.cpu() for answer in found))
