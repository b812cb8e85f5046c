"""How long work takes on a GPU, and on the host that asks for it."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

ENOUGH_US = 2000.0
MOST_CALLS = 10


def graph_us(call: Callable[[], Any], replays: int = 25) -> float:
    """Median microseconds of one call, from replays of a CUDA graph that holds several.

    Short calls are repeated within the graph, so that what is timed is the call and not the launch of the graph.

    Args:
        call: what is timed; it must not synchronise.
        replays: how many replays.
    """
    call()
    once = min(_elapsed_us(call) for _ in range(3))
    count = max(1, min(MOST_CALLS, int(ENOUGH_US / max(1.0, once))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    for _ in range(3):
        graph.replay()
    times = sorted(_elapsed_us(graph.replay) / count for _ in range(replays))
    return times[len(times) // 2]


def host_us(call: Callable[[], Any], calls: int = 50, *, wait: bool = False) -> float:
    """Median microseconds that the host spends in a call, as one of many: a process that serves is busy, too.

    Args:
        call: what is timed.
        calls: how many, after as many that are not counted.
        wait: count the time until the device has done what was asked for.
    """
    times = []
    for _ in range(2 * calls):
        start = perf_counter()
        call()
        if wait:
            torch.cuda.synchronize()
        times.append((perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return sorted(times[calls:])[calls // 2]


def launches(call: Callable[[], Any]) -> int:
    """Kernels, copies and fills that a call puts on the device."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" for event in profile.events())


def _elapsed_us(call: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1000
