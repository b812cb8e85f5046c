"""Real CUDA graphs under the test kit: the metadata in one graph, each layer's pass in another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

from faback.core.batch import ForwardBatch
from faback.core.graphs import signature, tensors_of
from faback.testing.late import blank

Tensor = torch.Tensor


class Graph:
    """A function, recorded on a stream of its own after a run that compiles its kernels."""

    def __init__(self, call: Callable[[], Any], stream: torch.cuda.Stream) -> None:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self.found = call()

    def replay(self) -> Any:
        self._graph.replay()
        return self.found


@attrs.frozen(eq=False)
class Pass:
    """A recorded plan: its static batch, the graph that fills its metadata, and those of its layers by call."""

    batch: ForwardBatch
    metadata: Graph
    layers: dict[Any, tuple[Graph, tuple[Tensor | None, ...]]] = attrs.field(factory=dict)


class Recording:
    """A backend for `run_scenario` whose every pass on the device is a replay.

    A size of batch is recorded when it first comes, on lengths of 0, and never planned again.

    Args:
        backend: plans and attends while graphs are recorded.
    """

    def __init__(self, backend):
        self.backend, self.replays = backend, 0
        self._passes: dict[Any, Pass] = {}
        self._stream = torch.cuda.Stream()

    def plan(self, batch):
        key = signature(batch)
        if key not in self._passes:
            static = blank(batch, self.backend.config)
            self._passes[key] = Pass(static, Graph(lambda: self.backend.capture(static), self._stream))
        self._current = self._passes[key]
        theirs = tensors_of(batch)
        for name, mine in tensors_of(self._current.batch).items():
            mine[: theirs[name].shape[0]].copy_(theirs[name])
        self._current.metadata.replay()
        self.replays += 1

    def forward(self, q, k, v, layer, *, sinks=None, out=None, save_kv_cache=True, return_lse=False):
        plan, given = self._current.metadata.found, (q, k, v, sinks)
        key = layer.layer_id, save_kv_cache, return_lse
        if key not in self._current.layers:
            static = tuple(None if x is None else x.contiguous().clone() for x in given)

            def call():
                options = {"sinks": static[3], "save_kv_cache": save_kv_cache, "return_lse": return_lse}
                return self.backend.forward(*static[:3], layer, plan=plan, **options)

            self._current.layers[key] = Graph(call, self._stream), static
        graph, static = self._current.layers[key]
        for mine, theirs in zip(static, given, strict=True):
            if mine is not None:
                mine.copy_(theirs)
        found = graph.replay()
        answer, lse = found if return_lse else (found, None)
        answer = answer.clone() if out is None else out.copy_(answer)
        return answer if lse is None else (answer, lse.clone())
