"""A model or a plugin raises while sizes are recorded: the runner is as it was, and can be recorded again."""

from __future__ import annotations

import pytest
import torch

from faback import AttentionBackend, BatchError, GraphRunner
from faback.graph_runner import capture_all
from graphs.test_runner import LAYER, attends, decode, make, queries


class Interrupted(Exception):
    """What the model raises."""


class Model:
    """One layer of attention that raises for batches of one size."""

    def __init__(self, backend):
        self.attend, self.bad = attends(backend), 0

    def __call__(self, batch, q):
        out = self.attend(batch, q)
        if batch.bs == self.bad:
            raise Interrupted
        return out


def answers(runner, lens):
    return runner.run(decode(lens), q=queries(len(lens))).clone()


@pytest.fixture
def backend():
    return make(AttentionBackend)


def expected(lens):
    plain = make(AttentionBackend, "reference")
    plain.plan(decode(lens))
    return plain.forward(queries(len(lens)), None, None, LAYER, save_kv_cache=False)


def test_recording_starts_over(backend, monkeypatch):
    captured = type(backend).capture

    def capture(self, batch, bounds=None):
        plan = captured(self, batch, bounds)
        if model.bad == batch.bs:
            raise Interrupted
        return plan

    monkeypatch.setattr(type(backend), "capture", capture)
    model = Model(backend)
    runner = GraphRunner(backend, model, decode([1] * 8), {"q": queries(8)}, sizes=(2, 4, 8))
    for model.bad in (8, 4, 2):
        with pytest.raises(Interrupted):
            runner.capture()
        assert runner.size_for(1) is None  # nothing is there by halves
        with pytest.raises(BatchError, match="at most 0 requests"):
            answers(runner, [5])
        backend.plan(decode([5]))  # and eager passes go on
        q = queries(1)
        torch.testing.assert_close(backend.forward(q, None, None, LAYER, save_kv_cache=False), expected([5]))
    model.bad = 0
    runner.capture()
    for lens in ([5], [3, 32, 1], [9] * 8):
        torch.testing.assert_close(answers(runner, lens), expected(lens))


def test_what_was_recorded_before_serves_on(backend):
    model = Model(backend)
    runners = [GraphRunner(backend, model, decode([1] * 8), {"q": queries(8)}, sizes=(4, 8)) for _ in range(2)]
    capture_all(runners)
    before = answers(runners[0], [3, 32, 1])
    model.bad = 4
    for runner in runners:
        with pytest.raises(Interrupted):
            runner.run(decode([3, 32, 1]), q=queries(3))
    model.bad = 0
    assert torch.equal(answers(runners[1], [3, 32, 1]), before)


def test_a_failed_replay_leaves_no_plan(backend):
    """The memory of the plan before may have been filled by halves."""
    backend.capture(decode([5, 7]))
    with pytest.raises(BatchError, match="replay"):
        backend.replay(decode([5, 7, 9]))
    with pytest.raises(BatchError, match="wanted a plan"):
        backend.forward(queries(2), None, None, LAYER, save_kv_cache=False)
    backend.replay(decode([5, 7]))
    torch.testing.assert_close(backend.forward(queries(2), None, None, LAYER, save_kv_cache=False), expected([5, 7]))
