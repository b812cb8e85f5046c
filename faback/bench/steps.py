"""The suite `step`: what a plan costs the host, and what the attention of a whole forward pass costs the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from faback.bench import rivals
from faback.bench.builds import BUILDS, REQUESTS, Build
from faback.bench.cases import STEPS, Case
from faback.bench.kernels import attempt, checked
from faback.bench.problem import Problem
from faback.bench.timing import graph_us, host_us, launches
from faback.core.backend import AttentionBackend
from faback.kernels.triton.ops import TritonOps

LAYERS = 32
BUILD_US = 60.0
"""Host time of one build at 256 requests that is aimed at."""


def run(kernels: Sequence[str], only: str = "") -> Iterator[dict[str, Any]]:
    """Measures all builds and steps whose name contains `only`.

    Args:
        kernels: names of providers.
        only: part of a case's name.

    Yields:
        Per build and number of requests: host microseconds and device launches (kernels and copies) of an eager plan
        and of a replay that fills anew; of a replay within a graph both are none at all. Per step of 32 layers: median
        of graph replays, for some also of eager steps, the error, and FA3's figure and error from the same run.
    """
    for kernel in kernels:
        for build in BUILDS:
            for requests in REQUESTS:
                if only in build.name:
                    row: dict[str, Any] = {"case": f"plan {build.name}", "requests": requests, "target_us": BUILD_US}
                    row.update(attempt(row, kernel, partial(_build, build, requests, kernel)) or {})
                    yield row
    for case in STEPS:
        if only in case.name:
            yield _step(case, kernels)


def _build(build: Build, requests: int, kernel: str) -> dict[str, float]:
    """Host time and launches of one kind of plan; the captured one must answer as the eager one does."""
    made = build.make(requests, kernel)
    eager = made.plan()
    wanted = made.answer(eager)
    found: dict[str, float] = {"eager_us": host_us(made.plan), "eager_launches": launches(made.plan)}
    made.capture()
    got = made.answer(made.replay())
    error = float((got - wanted).norm() / wanted.norm().clamp(min=1e-9))
    if not error < 0.01:
        raise ArithmeticError(f"the replayed plan differs from the eager one by {error:.4f}")
    found |= {"refill_us": host_us(made.replay), "refill_launches": launches(made.replay)}
    return {f"{kernel}_{name}": round(figure, 2) for name, figure in found.items()} | {f"{kernel}_error": error}


def _step(case: Case, kernels: Sequence[str]) -> dict[str, Any]:
    problem = Problem(case, layers=LAYERS)
    row: dict[str, Any] = {"case": f"step {case.name}", "target_us": case.target_us}
    rival = attempt(row, "fa3", lambda: rivals.step(problem, TritonOps()))
    if rival is not None:
        attempt(row, "fa3", lambda: row.update(_figures(problem, "fa3", rival)))
    for kernel in kernels:
        attempt(row, kernel, partial(_kernel, row, problem, kernel))
    return row


def _kernel(row: dict[str, Any], problem: Problem, kernel: str) -> None:
    backend = problem.backend(kernel)
    row.update(_figures(problem, kernel, problem.step(backend)))
    if problem.case.eager_target_us is not None:
        row["eager_target_us"] = problem.case.eager_target_us
        row[f"{kernel}_eager_us"] = round(host_us(_eager(problem, backend), wait=True), 1)
    if "fa3_us" in row:
        row[f"fa3_over_{kernel}"] = round(row["fa3_us"] / row[f"{kernel}_us"], 3)


def _figures(problem: Problem, name: str, step: Callable[[], Any]) -> dict[str, float]:
    error = checked(problem, step)
    return {f"{name}_us": round(graph_us(step), 1), f"{name}_error": round(error, 5)}


def _eager(problem: Problem, backend: AttentionBackend) -> Callable[[], Any]:
    step = problem.step(backend)

    def run() -> None:
        backend.plan(problem.batch)
        step()

    return run
