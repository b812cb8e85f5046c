"""How long work takes on a GPU."""

from __future__ import annotations

from collections.abc import Callable
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


def _elapsed_us(call: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1000
