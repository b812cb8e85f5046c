"""The suite `kernels`: one layer's attention, each figure beside its check and, where it is installed, beside FA3's.

FlashAttention 3 (`flash_attn_interface`) is timed in the same run, in turn, on the same cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch

from faback.bench.cases import CASES, Case
from faback.bench.problem import DIM, KV_HEADS, SCALES, Problem
from faback.bench.timing import graph_us

COPY_BYTES_PER_US = 4.2e6
"""What a device copy moves on an H200, for the floor."""
ERROR_BOUND = 0.01
"""Relative error above which a figure does not count: plain bfloat16 attention is near 0.003."""


def run(kernels: Sequence[str], only: str = "") -> Iterator[dict[str, Any]]:
    """Measures all cases whose name contains `only`.

    Args:
        kernels: names of providers.
        only: part of a case's name.

    Yields:
        Per case: name, floor and target in microseconds, and of each kernel its median, error and ratio to FA3. A
        kernel that fails, or is wrong, has "failed" in place of its figures.
    """
    for case in CASES:
        if only in case.name:
            yield measure(case, kernels)


def measure(case: Case, kernels: Sequence[str]) -> dict[str, Any]:
    """All kernels on one case, in turn."""
    problem = Problem(case)
    row: dict[str, Any] = {
        "case": case.name,
        "floor_us": round(problem.live_bytes() / COPY_BYTES_PER_US, 1),
        "target_us": case.target_us,
    }
    rival = _attempt(row, "fa3", lambda: fa3(problem))
    if rival is not None:
        _attempt(row, "fa3", lambda: row.update(fa3_us=round(graph_us(rival), 2)))
    for kernel in kernels:
        found = _attempt(row, kernel, partial(_figures, problem, kernel))
        row.update(found or {})
        if f"{kernel}_us" in row and "fa3_us" in row:
            row[f"{kernel}_over_fa3"] = round(row[f"{kernel}_us"] / row["fa3_us"], 3)
    return row


def _figures(problem: Problem, kernel: str) -> dict[str, float]:
    backend = problem.backend(kernel)
    error = problem.error(backend)
    if not error < ERROR_BOUND:
        raise ArithmeticError(f"relative error {error:.4f}")
    return {f"{kernel}_us": round(graph_us(problem.run(backend)), 2), f"{kernel}_error": round(error, 5)}


def _attempt(row: dict[str, Any], name: str, call: Callable[[], Any]) -> Any:
    """The call's result; a failure becomes part of the row, and the other kernels and cases go on."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001
        row[f"{name}_failed"] = f"{type(error).__name__}: {error}"[:200]
        return None


def fa3(problem: Problem) -> Callable[[], Any] | None:
    """FlashAttention 3 on the same cache; None where it is not installed or has no such attention."""
    case = problem.case
    if case.tree or case.latent or find_spec("flash_attn_interface") is None:
        return None
    from flash_attn_interface import flash_attn_with_kvcache

    device, page = problem.device, case.page_size
    k, v = (buffer.view(-1, page, KV_HEADS, DIM) for buffer in problem.kv.buffers(problem.layer))
    new = [n for _, n in case.lens]
    total = torch.tensor([c + n for c, n in case.lens], dtype=torch.int32, device=device)
    table = (problem.pools.req_to_token[1:, ::page] // page).to(torch.int32).contiguous()
    offsets = torch.tensor(list(accumulate(new, initial=0)), dtype=torch.int32, device=device)
    q, extra = problem.q, {}
    if case.fp8:
        q = q.to(torch.float8_e4m3fn)
        ones = torch.ones(len(new), KV_HEADS, device=device)
        extra = {"q_descale": ones, "k_descale": ones * SCALES["k_scale"], "v_descale": ones * SCALES["v_scale"]}

    def call() -> Any:
        return flash_attn_with_kvcache(
            q,
            k,
            v,
            cache_seqlens=total,
            page_table=table,
            cu_seqlens_q=offsets,
            max_seqlen_q=max(new),
            causal=True,
            window_size=(-1, -1) if case.window is None else (case.window, 0),
            softmax_scale=problem.layer.scale,
            **extra,
        )

    return call
