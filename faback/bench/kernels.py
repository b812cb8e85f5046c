"""The suite `kernels`: one layer's attention, each figure beside its check and, where it is installed, beside FA3's.

FlashAttention 3 (`flash_attn_interface`) is timed in the same run, in turn, on the same cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from faback.bench import writes
from faback.bench.cases import CASES, Case
from faback.bench.problem import Problem
from faback.bench.rivals import attention
from faback.bench.timing import graph_us
from faback.core.errors import NoKernelError
from faback.kernels.triton.ops import TritonOps

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
        Per case: name, floor and target in microseconds, and of each kernel its median, error and ratio to FA3, then
        what results cost that depend on their request alone. A kernel that fails, or is wrong, has "failed" in place of
        its figures. Then KV writes beside a copy.
    """
    for case in CASES:
        if only in case.name:
            yield measure(case, kernels)
    yield from writes.run(TritonOps(), only)


def measure(case: Case, kernels: Sequence[str]) -> dict[str, Any]:
    """All kernels on one case, in turn."""
    problem = Problem(case)
    row: dict[str, Any] = {
        "case": case.name,
        "floor_us": round(problem.live_bytes() / COPY_BYTES_PER_US, 1),
        "target_us": case.target_us,
    }
    rival = attempt(row, "fa3", lambda: attention(problem))
    if rival is not None:
        attempt(row, "fa3", lambda: row.update(fa3_us=round(graph_us(rival), 2)))
    for kernel in kernels:
        found = attempt(row, kernel, partial(figures, problem, kernel))
        row.update(found or {})
        if f"{kernel}_us" in row and "fa3_us" in row:
            row[f"{kernel}_over_fa3"] = round(row[f"{kernel}_us"] / row["fa3_us"], 3)
        name = f"{kernel}_deterministic"
        row.update(attempt(row, name, partial(figures, problem, kernel, name, deterministic=True)) or {})
    return row


def figures(problem: Problem, kernel: str, name: str | None = None, deterministic: bool = False) -> dict[str, float]:
    """Median and error of a kernel, under its name or another. Raises like `checked`."""
    run = problem.run(problem.backend(kernel, deterministic))
    error = checked(problem, run)
    return {f"{name or kernel}_us": round(graph_us(run), 2), f"{name or kernel}_error": round(error, 5)}


def checked(problem: Problem, call: Callable[[], Any]) -> float:
    """The relative error of a call.

    Raises:
        ArithmeticError: it is too large for the figure to count.
    """
    error = problem.error(call)
    if not error < ERROR_BOUND:
        raise ArithmeticError(f"relative error {error:.4f}")
    return error


def attempt(row: dict[str, Any], name: str, call: Callable[[], Any]) -> Any:
    """The call's result; a refusal or failure becomes part of the row, and the other kernels and cases go on."""
    try:
        return call()
    except NoKernelError as error:
        row[f"{name}_refused"] = "; ".join(error.reasons)[:300]
    except Exception as error:  # noqa: BLE001
        row[f"{name}_failed"] = f"{type(error).__name__}: {error}"[:200]
    return None
