"""The suite `providers`: every kernel that runs here on every shape, and what "auto" makes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from faback.bench.cases import CASES, MORE, Case
from faback.bench.kernels import attempt, figures
from faback.bench.problem import Problem
from faback.core.measured import traits_of
from faback.kernels.reference import Reference

AUTO = "auto"


def run(kernels: Sequence[str], only: str = "") -> Iterator[dict[str, Any]]:
    """Measures all cases whose name contains `only`.

    Args:
        kernels: names of providers; all that run here, and "auto", if empty.
        only: part of a case's name.

    Yields:
        Per case: median and error of each kernel, or why it refused; the best of them; the time of "auto" in that of
        the best.
    """
    for case in (*CASES, *MORE):
        if only in case.name:
            row, _ = measure(case, kernels)
            yield row


def tuned(only: str = "") -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The rows of all kernels that run here, each with the point of a measured table that it makes."""
    for case in (*CASES, *MORE):
        if only in case.name:
            row, problem = measure(case, (), auto=False)
            yield row, point(problem, row)


def measure(case: Case, kernels: Sequence[str], auto: bool = True) -> tuple[dict[str, Any], Problem]:
    """All kernels on one case, in turn."""
    problem = Problem(case)
    row: dict[str, Any] = {"case": case.name}
    for kernel in kernels or available(problem) + [AUTO] * auto:
        row.update(attempt(row, kernel, partial(figures, problem, kernel)) or {})
    times = _times(row)
    chosen = times.pop(AUTO, None)
    if times:
        row["best"] = min(times, key=times.__getitem__)
        if chosen is not None:
            row["auto_over_best"] = round(chosen / times[row["best"]], 3)
            row["auto_kernel"] = problem.backend(AUTO).explain(problem.batch, problem.layer).kernel
    return row, problem


def available(problem: Problem) -> list[str]:
    """Kernels that run on the problem's device; the exact one, which nobody would choose for speed, left out."""
    found = problem.backend(AUTO).selector.kernels
    return [kernel.name for kernel in found if kernel.name != Reference.name]


def point(problem: Problem, row: dict[str, Any]) -> dict[str, Any]:
    """What a measured table says of a case."""
    (route,) = problem.backend(AUTO).explain(problem.batch, problem.layer).routes
    request = route.request
    sizes = {"rows": request.rows, "queries": request.queries, "keys": request.keys}
    return {**sizes, "traits": sorted(traits_of(request)), "figures": _times(row)}


def _times(row: dict[str, Any]) -> dict[str, float]:
    return {name.removesuffix("_us"): time for name, time in row.items() if name.endswith("_us")}
