"""Attention within torch.compile, on a CPU. On a GPU: tests/gpu/test_compiled.py."""

from __future__ import annotations

import gc
import shutil
import weakref

import attrs
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

from compiled.small import DIM, HEADS, KV_HEADS, WORDS, Engine, Model, expected, layers, served
from faback import (
    AttentionBackend,
    AttentionLayer,
    BackendConfig,
    BatchError,
    ForwardBatch,
    GraphRunner,
    MultiStepDraft,
    Pools,
    SpeculativeConfig,
    hookimpl,
)
from faback.compiled import NUMBERED, CompiledAttention
from faback.kernels.reference import Reference
from faback.pools import MHAPool, MLAPool
from faback.testing.late import Late

no_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++"))), reason="inductor compiles for a CPU with a C++ compiler"
)
COMPILERS = ["eager", "aot_eager", pytest.param("inductor", marks=[no_compiler, pytest.mark.slow])]


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class LateKernel:
    """The reference, for captured plans."""

    @hookimpl
    def faback_kernels(self):
        return [Late(Reference())]


def compiled(model, compiler):
    """The compiled model, any number of tokens; a second compilation is an error."""
    counter = CompileCounterWithBackend(compiler)
    run = torch.compile(model, fullgraph=True, backend=counter)

    def call(ids):
        torch._dynamo.mark_dynamic(ids, 0)
        with torch._dynamo.config.patch(error_on_recompile=True):
            return run(ids)

    call.counter = counter
    return call


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_model_answers_as_without_compilation_and_as_plain_attention(compiler):
    engine = Engine()
    model = Model(engine.attention)
    run = compiled(model, compiler)

    def one_pass(batch, ids):
        engine.backend.plan(batch)
        return run(ids)

    got = served(engine, one_pass)
    other = Engine()
    twin = Model(other.attention)
    twin.load_state_dict(model.state_dict())
    eager = served(other, lambda batch, ids: (other.backend.plan(batch), twin(ids))[1])
    for mine, uncompiled, plain in zip(got, eager, expected(model, torch.float32), strict=True):
        torch.testing.assert_close(mine, uncompiled, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(mine, plain, atol=1e-4, rtol=1e-5)
    assert run.counter.frame_count == 1
    (graph,) = run.counter.graphs
    operators = [str(node.target) for node in graph.graph.nodes if "faback" in str(node.target)]
    assert operators == ["faback.attend", "faback.attend", "faback.write_kv", "faback.attend"]


@no_compiler
@pytest.mark.slow
def test_nothing_is_copied_for_the_operators():
    engine = Engine()
    engine.backend.plan(engine.batch((7, 4)))
    run = torch.compile(Model(engine.attention), fullgraph=True)
    with torch.no_grad():
        _, (code,) = run_and_get_code(run, torch.randint(WORDS, (11,)))
    assert code.count("torch.ops.faback.attend.default(") == 3
    assert "copy_(" not in code and "clone" not in code


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_captured_plans_and_graph_runners(compiler):
    engine = Engine("late reference", plugins=[LateKernel()])
    model = Model(engine.attention)
    run = compiled(model, compiler)
    largest = ForwardBatch(
        forward_mode="decode", req_pool_indices=torch.zeros(2, dtype=torch.int64),
        seq_lens=torch.ones(2, dtype=torch.int64), out_cache_loc=torch.zeros(2, dtype=torch.int64),
    )  # fmt: skip
    ids = torch.zeros(2, dtype=torch.int64)
    runner = GraphRunner(engine.backend, lambda batch, ids: run(ids), largest, {"ids": ids}, sizes=(2,))
    runner.capture()

    def one_pass(batch, ids):
        if batch.forward_mode == "decode":
            return runner.run(batch, ids=ids)
        engine.backend.plan(batch)
        return run(ids)

    for mine, plain in zip(served(engine, one_pass), expected(model, torch.float32), strict=True):
        torch.testing.assert_close(mine, plain, atol=1e-4, rtol=1e-5)
    assert run.counter.frame_count == 1


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_steps_of_a_draft_take_turns(compiler):
    layer = AttentionLayer(layer_id=0, num_q_heads=2, num_kv_heads=1, head_dim=8)
    speculative = SpeculativeConfig(topk=2, num_steps=3, num_draft_tokens=4)
    config = BackendConfig(context_len=32, dtype=torch.float32, speculative=speculative, kernels="reference")
    kv = MHAPool(num_pages=64, layers=[layer], dtype=torch.float32)
    for buffer in kv.buffers(layer):
        buffer.normal_()
    table = torch.arange(64).view(2, 32)
    draft = MultiStepDraft(config, Pools(req_to_token=table, kv=kv), [layer])
    attention = CompiledAttention(draft.backend)

    @torch.compile(fullgraph=True, backend=compiler)
    def step(q, k, v):
        return attention.forward(q, k, v, layer)

    plans = draft.plan(
        ForwardBatch(
            forward_mode="draft_decode", req_pool_indices=torch.tensor([1]), seq_lens=torch.tensor([5]),
            out_cache_loc=torch.arange(40, 46),
        )
    )  # fmt: skip
    for number, plan in enumerate(plans):
        q, k, v = (torch.randn(2, heads, 8) for heads in (2, 1, 1))
        with attention.using(plan):
            got = step(q, k, v)
        assert torch.equal(got, draft.forward(number, q, k, v, layer))
    with pytest.raises(BatchError, match="a plan"):
        step(q, k, v)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_writes_stay_and_stay_in_their_order(compiler):
    engine = Engine()
    layer = engine.backend.layers[0]
    engine.backend.plan(engine.batch((3, 2)))
    q, k, v, k2, v2 = (torch.randn(5, heads, DIM) for heads in (HEADS, *(KV_HEADS,) * 4))

    def twice(q, k, v, k2, v2):
        engine.attention.write_kv(k, v, layer)
        first = engine.attention.forward(q, None, None, layer, save_kv_cache=False)
        engine.attention.write_kv(k2, v2, layer)
        second = engine.attention.forward(q, None, None, layer, save_kv_cache=False)
        engine.attention.write_kv(k, v, layer)
        return first, second

    caches = engine.backend.pools.kv.buffers(layer)
    found = []
    for run in (twice, torch.compile(twice, fullgraph=True, backend=compiler)):
        for cache in caches:
            cache.zero_()
        found.append((*run(q, k, v, k2, v2), *(cache.clone() for cache in caches)))
    torch.testing.assert_close(found[1], found[0], atol=0, rtol=0)
    first, second, *_ = found[0]
    assert not torch.equal(first, second)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_latents_whose_values_are_part_of_the_keys(compiler):
    layer = AttentionLayer(layer_id=0, num_q_heads=4, num_kv_heads=1, head_dim=24, v_head_dim=16, latent=True)
    kv = MLAPool(num_pages=32, layers=[layer], dtype=torch.float32)
    config = BackendConfig(context_len=16, dtype=torch.float32)
    backend = AttentionBackend(config, Pools(req_to_token=torch.arange(32).view(2, 16), kv=kv), [layer])
    attention = CompiledAttention(backend)
    backend.plan(
        ForwardBatch(
            forward_mode="extend", req_pool_indices=torch.tensor([1]), seq_lens=torch.tensor([4]),
            extend_seq_lens=torch.tensor([4]), out_cache_loc=torch.arange(16, 20),
        )
    )  # fmt: skip
    q, q_rope = torch.randn(4, 4, 16), torch.randn(4, 4, 8)
    k, k_rope = torch.randn(4, 1, 16), torch.randn(4, 1, 8)

    def attend(q, k, q_rope, k_rope):
        return attention.forward(q, k, None, layer, q_rope=q_rope, k_rope=k_rope, return_lse=True)

    got = torch.compile(attend, fullgraph=True, backend=compiler)(q, k, q_rope, k_rope)
    torch.testing.assert_close(got, attend(q, k, q_rope, k_rope), atol=0, rtol=0)


CALLS = {
    "plain": {},
    "log-sum-exp": {"lse": True},
    "sinks": {"layer": 1},
    "scales": {"layer": 2},
    "keys in the cache": {"fresh": False},
}


@pytest.mark.parametrize("call", CALLS)
def test_attend_is_a_proper_operator(call):
    layer, lse, fresh = ({"layer": 0, "lse": False, "fresh": True} | CALLS[call]).values()
    engine = Engine()
    engine.backend.plan(engine.batch((3, 2)))
    q, k, v = (torch.randn(5, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    engine.backend.write_kv(k, v, engine.backend.layers[layer])
    arguments = (
        engine.attention._order, torch.empty_like(q), torch.empty(5, HEADS) if lse else None, q,
        k if fresh else None, v if fresh else None, torch.randn(HEADS) if layer == 1 else None, None, None,
        engine.attention._number, layer, fresh,
    )  # fmt: skip
    checked = torch.library.opcheck(torch.ops.faback.attend.default, arguments)
    assert set(checked.values()) == {"SUCCESS"}


def test_write_kv_is_a_proper_operator():
    engine = Engine()
    engine.backend.plan(engine.batch((3, 2)))
    k, v = torch.randn(5, KV_HEADS, DIM), torch.randn(5, KV_HEADS, DIM)
    arguments = (engine.attention._order, k, v, None, engine.attention._number, 0)
    checked = torch.library.opcheck(torch.ops.faback.write_kv.default, arguments)
    assert set(checked.values()) == {"SUCCESS"}


def attend_with(engine, layer, compiler="eager"):
    return torch.compile(lambda q, k, v: engine.attention.forward(q, k, v, layer), fullgraph=True, backend=compiler)


def test_what_is_wrong_with_a_pass_is_said_when_it_runs():
    engine = Engine()
    q, k, v = (torch.randn(5, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    run = attend_with(engine, engine.backend.layers[0])
    with pytest.raises(BatchError, match="wanted a plan"):
        run(q, k, v)
    engine.backend.plan(engine.batch((3, 2)))
    with pytest.raises(BatchError, match="wanted 5 tokens"):
        run(q[:4], k[:4], v[:4])
    assert run(q, k, v).isfinite().all()


@pytest.mark.parametrize("change", [{"layer_id": 9}, {"window": 3}], ids=str)
def test_another_layer_is_refused(change):
    engine = Engine()
    engine.backend.plan(engine.batch((3, 2)))
    q, k, v = (torch.randn(5, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    with pytest.raises(Exception, match="BatchError"):
        attend_with(engine, attrs.evolve(layers()[0], **change))(q, k, v)


def test_nothing_is_kept_alive_and_no_number_given_twice():
    engine = Engine()
    number, gone = engine.attention._number, weakref.ref(engine.attention)
    assert NUMBERED.get(number) is engine.attention
    del engine
    gc.collect()
    assert gone() is None
    with pytest.raises(BatchError, match="still there"):
        NUMBERED.get(number)
    assert Engine().attention._number > number
