"""Attention within torch.compile on a GPU: the Triton kernels between Inductor's, eagerly and in CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from compiled.small import DIM, HEADS, KV_HEADS, Engine, Model, expected, served
from compiled.test_compiled import compiled
from faback import ForwardBatch, GraphRunner
from gpu.marks import on_gpu
from gpu.test_waiting import no_waiting

pytestmark = on_gpu

HALF = torch.float16


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def made():
    engine = Engine("triton", "cuda", HALF)
    return engine, Model(engine.attention).to("cuda", HALF)


def expect_as_good(model, got):
    """The error of a model in half precision is near that of plain attention in the same precision."""
    for mine, rounded, true in zip(got, expected(model, HALF), expected(model, torch.float64), strict=True):
        allowed = 3 * (rounded.double() - true).abs().max() + 1e-3
        assert (mine.double() - true).abs().max() <= allowed


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_model_answers_as_plain_attention(mode):
    engine, model = made()
    run = torch.compile(model, fullgraph=True, mode=mode)

    def one_pass(batch, ids):
        engine.backend.plan(batch)
        torch._dynamo.mark_dynamic(ids, 0)
        return run(ids)

    expect_as_good(model, served(engine, one_pass))


def test_no_pass_is_compiled_anew_and_none_waits():
    engine, model = made()
    run = compiled(model, "inductor")

    def one_pass(batch, ids):
        engine.backend.plan(batch)
        return run(ids)

    served(engine, one_pass)  # compiles Triton's kernels too, which may wait
    assert run.counter.frame_count == 1
    batch, ids = engine.batch((1, 1)), torch.tensor([3, 4], device="cuda")
    torch._dynamo.mark_dynamic(ids, 0)
    torch.cuda.synchronize()
    with torch.no_grad(), no_waiting():
        one_pass(batch, ids)


def test_a_compiled_model_in_cuda_graphs():
    engine, model = made()
    run = compiled(model, "inductor")
    zeros = torch.zeros(2, dtype=torch.int64, device="cuda")
    largest = ForwardBatch(forward_mode="decode", req_pool_indices=zeros, seq_lens=zeros + 1, out_cache_loc=zeros)
    with torch.no_grad():
        runner = GraphRunner(engine.backend, lambda batch, ids: run(ids), largest, {"ids": zeros}, sizes=(2,))
        runner.capture()

    def one_pass(batch, ids):
        if batch.forward_mode == "decode":
            return runner.run(batch, ids=ids)
        engine.backend.plan(batch)
        return run(ids)

    expect_as_good(model, served(engine, one_pass))
    assert run.counter.frame_count == 1


def test_the_operator_is_proper():
    engine, _ = made()
    engine.backend.plan(engine.batch((3, 2)))
    q, k, v = (torch.randn(5, heads, DIM, dtype=HALF, device="cuda") for heads in (HEADS, KV_HEADS, KV_HEADS))
    lse = torch.empty(5, HEADS, device="cuda")
    rest = (None, None, None, engine.attention._number, 0, True)
    arguments = (engine.attention._order, torch.empty_like(q), lse, q, k, v, *rest)
    assert set(torch.library.opcheck(torch.ops.faback.attend.default, arguments).values()) == {"SUCCESS"}
