"""On a GPU: plans do not wait for the device, and a decode pass, plan and all, is one CUDA graph."""

import pytest
import torch
from small_engine import Engine, layer
from test_modes import converse

from faback.core.graphs import tensors_of
from faback.testing.late import blank

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
SETTINGS = {"block_size": 16, "top_k": 2, "local_blocks": 2}


class NotWaiting:
    """A backend whose plans and passes may not wait."""

    def __init__(self, backend):
        self._backend = backend

    def plan(self, batch):
        self._strictly(self._backend.plan, batch)

    def forward(self, *args, **options):
        return self._strictly(self._backend.forward, *args, **options)

    def _strictly(self, call, *args, **options):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return call(*args, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")


class OneGraph:
    """A backend of one layer whose decode passes are recorded once, plan and layer together, and replayed."""

    def __init__(self, backend):
        self._backend, self._graph, self.replays = backend, None, 0

    def plan(self, batch):
        self._batch = batch
        if not batch.forward_mode.endswith("decode"):
            self._backend.plan(batch)

    def forward(self, q, k, v, one, *, sinks, **options):
        given = (q, k, v, sinks)
        if not self._batch.forward_mode.endswith("decode"):
            return self._backend.forward(q, k, v, one, sinks=sinks, **options)
        if self._graph is None:
            self._record(given, one, options)
        mine = [*tensors_of(self._static).values(), *self._given]
        for static, fresh in zip(mine, [*tensors_of(self._batch).values(), *given], strict=True):
            static.copy_(fresh)
        self._graph.replay()
        self.replays += 1
        return self._found

    def _record(self, given, one, options):
        self._static = blank(self._batch, self._backend.config)
        self._given = [tensor.clone() for tensor in given]

        def call():
            self._backend.capture(self._static)
            return self._backend.forward(*self._given[:3], one, sinks=self._given[3], **options)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self._found = call()


def engine(layers=2, page=16, **more):
    made = [layer(index, head_dim=64, sinks=True) for index in range(layers)]
    settings = {**SETTINGS, **more.pop("settings", {})}
    return Engine(settings, page=page, kernel="triton", layers=made, dtype=torch.bfloat16, device="cuda", **more)


@pytest.mark.parametrize("recent", ["all", "local"])
@pytest.mark.parametrize("page", [1, 16])
def test_conversations_without_waiting(page, recent):
    made = engine(page=page, settings={"recent": recent})
    converse(made)
    again = engine(page=page, settings={"recent": recent})
    again.runner = NotWaiting(again.backend)
    converse(again)


@pytest.mark.parametrize("page", [1, 16])
def test_conversations_replayed(page):
    made = engine(page=page, graphs=True)
    converse(made)
    assert made.runner.replays == 8


@pytest.mark.parametrize("limit", [None, 1, 40])
def test_a_decode_pass_is_one_graph(limit):
    made = engine(layers=1, settings={"catch_up": limit})
    made.runner = OneGraph(made.backend)
    made.step([(1, 120), (2, 33), (3, 1)])
    for _ in range(5):
        made.step([(2, 1), (1, 1), (3, 1)], padded_rows=1)
    made.free(1)
    made.step([(1, 70)])
    for _ in range(20):
        made.step([(3, 1), (1, 1), (2, 1)], padded_rows=1)
    assert made.runner.replays == 25
