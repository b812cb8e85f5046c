"""What a GPU adds to tests/faults: a graph that is given up half-way, and memory that is really short."""

from __future__ import annotations

import pytest
import torch

from faback import GraphRunner, PluginError
from gpu.marks import on_gpu
from gpu.test_graphs import BF16, CONTEXT, LAYER, batch_of, inputs, make, model_of

pytestmark = on_gpu


class Interrupted(Exception):
    """What the model raises."""


class Model:
    """Raises while the graph of one size is recorded."""

    def __init__(self, backend):
        self.attend, self.bad = model_of(backend), 0

    def __call__(self, batch, q):
        out = self.attend(batch, q)
        if batch.bs == self.bad and torch.cuda.is_current_stream_capturing():
            raise Interrupted
        return out


def test_a_model_raises_while_a_graph_is_recorded():
    backend, plain = make(), make()
    model = Model(backend)
    runner = GraphRunner(
        backend, model, batch_of("decode", [CONTEXT - 5] * 16, backend.pools), inputs(16), sizes=(1, 8, 16)
    )
    for model.bad in (16, 8, 1):
        with pytest.raises(Interrupted):
            runner.capture()
        assert runner.size_for(1) is None
    model.bad = 0
    batch, tensors = batch_of("decode", [3, 200, 77], backend.pools), inputs(3)
    plain.plan(batch)
    wanted = model_of(plain)(batch, **tensors)
    backend.plan(batch)
    torch.testing.assert_close(model(batch, **tensors), wanted, atol=2e-2, rtol=0)
    runner.capture()
    torch.testing.assert_close(runner.run(batch, **tensors), wanted, atol=2e-2, rtol=0)


def test_a_reservation_that_does_not_fit():
    """Everything that torch may take is taken; once it is given back, the same reservation is granted."""
    backend = make()
    batch = batch_of("target_verify", [9] * 16, backend.pools)
    with torch.cuda.device(0):
        torch.cuda.set_per_process_memory_fraction(1e-4)
        try:
            torch.cuda.empty_cache()
            hog = []
            with pytest.raises(torch.OutOfMemoryError):
                while True:
                    hog.append(torch.empty(1 << 20, dtype=torch.uint8, device="cuda"))
            with pytest.raises(torch.OutOfMemoryError):
                while True:  # until what the allocator has at hand is used up, too
                    hog.append(torch.empty(512, dtype=torch.uint8, device="cuda"))
            with pytest.raises(torch.OutOfMemoryError):
                backend.reserve([batch])
            hog.clear()
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    assert backend.reserve([batch]) > 0
    plan = backend.capture(batch)
    assert backend.current is plan
    q = torch.randn(batch.num_tokens, 8, 64, dtype=BF16, device="cuda")
    captured = backend.forward(q, None, None, LAYER, save_kv_cache=False)
    backend.plan(batch)
    torch.testing.assert_close(backend.forward(q, None, None, LAYER, save_kv_cache=False), captured, atol=2e-2, rtol=0)


def test_a_launch_that_cannot_be_made():
    """More shared memory than there is: Triton refuses, the error names the kernel, and the next pass is right."""
    backend = make()
    batch, tensors = batch_of("decode", [300, 4], backend.pools), inputs(2)
    wanted_by = make()
    wanted_by.plan(batch)
    wanted = model_of(wanted_by)(batch, **tensors)
    (_, launch), *_ = backend.plan(batch).steps[LAYER.layer_id].call.prepared.launches
    options = launch.kernel.options
    stages, options["num_stages"] = options["num_stages"], 16
    with pytest.raises(PluginError, match="run of triton"):
        backend.forward(tensors["q"], None, None, LAYER, save_kv_cache=False)
    options["num_stages"] = stages
    backend.plan(batch)
    torch.testing.assert_close(model_of(backend)(batch, **tensors), wanted, atol=2e-2, rtol=0)
