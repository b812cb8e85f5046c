"""Captured plans as real CUDA graphs: recorded on nothing, replayed on everything, equal to the oracle."""

from __future__ import annotations

import random

import pytest
import torch

from faback import (
    AttentionBackend,
    AttentionLayer,
    BackendConfig,
    ForwardBatch,
    GraphRunner,
    MultiStepDraft,
    Pools,
    SpeculativeConfig,
)
from faback.pools import MHAPool
from faback.testing import Scenario, run_scenario
from gpu.marks import on_gpu
from gpu.recording import Recording
from gpu.test_matrix import CELLS, INT32, features, on_triton
from gpu.test_waiting import no_waiting
from graphs.test_contract import MOST, largest

pytestmark = on_gpu

BF16 = torch.bfloat16
SIZES = {"batch_size": 3, "max_len": 80, "head_dim": 64, "padded_rows": 1, "dtype": BF16, **INT32}


def recorded(made=None):
    def make(config, pools, layers):
        backend = Recording(on_triton(config, pools, layers))
        if made is not None:
            made.append(backend)
        return backend

    return make


@pytest.mark.parametrize(("number", "mode", "overlay"), [(i, *cell) for i, cell in enumerate(CELLS)])
def test_replays_equal_the_oracle(number, mode, overlay):
    wanted = {**SIZES, "padded_tokens": number % 2, **features(mode, overlay, number)}
    made = []
    results = run_scenario(
        Scenario.make(mode=mode, overlay=overlay, seed=number, **wanted), recorded(made), device="cuda"
    )
    assert [str(result) for result in results if result.status != "equal"] == []
    assert made[0].replays


LAYER = AttentionLayer(layer_id=0, num_q_heads=8, num_kv_heads=2, head_dim=64, window=200)
OTHER = AttentionLayer(layer_id=1, num_q_heads=8, num_kv_heads=2, head_dim=64)
LAYERS, CONTEXT, ROWS, DRAFTS = (LAYER, OTHER), 512, 17, 5


def make(kind=AttentionBackend):
    speculative = SpeculativeConfig(topk=2, num_steps=4, num_draft_tokens=DRAFTS)
    config = BackendConfig(context_len=CONTEXT, dtype=BF16, kernels="triton", speculative=speculative)
    kv = MHAPool(num_pages=CONTEXT * ROWS // 16, page_size=16, layers=LAYERS, dtype=BF16, device="cuda")
    for layer in LAYERS:
        for buffer in kv.buffers(layer):
            buffer.normal_(generator=torch.Generator("cuda").manual_seed(layer.layer_id))
            buffer[:16] = torch.nan  # what padding must never read
    pages = torch.randperm(CONTEXT * (ROWS - 1) // 16, generator=torch.Generator().manual_seed(1)) + CONTEXT // 16
    table = (pages[:, None] * 16 + torch.arange(16)).view(ROWS - 1, CONTEXT)
    table = torch.cat([torch.zeros(1, CONTEXT, dtype=torch.int64), table]).to("cuda", torch.int32)
    return kind(config, Pools(req_to_token=table, kv=kv), LAYERS)


def batch_of(mode, lens, pools):
    """Requests of these lengths in rows 1 and up; each brings one token, or a tree of drafts."""
    n, count = len(lens), DRAFTS if mode == "target_verify" else 1
    rows, lens = torch.arange(1, n + 1, device="cuda"), torch.tensor(lens, device="cuda")
    table = pools.req_to_token[1 : n + 1]
    first = lens if mode == "target_verify" else lens - 1
    slots = table.gather(1, (first.clamp(min=0)[:, None] + torch.arange(count, device="cuda")))
    more = {}
    if mode == "target_verify":
        tree = torch.tril(torch.ones(DRAFTS, DRAFTS, dtype=torch.bool))
        tree[3, 2] = tree[4, 1] = False
        blocks = [torch.cat([torch.ones(DRAFTS, m, dtype=torch.bool), tree], 1).flatten() for m in lens.tolist()]
        more = {"custom_mask": torch.cat(blocks).cuda()}
    return ForwardBatch(
        forward_mode=mode, req_pool_indices=rows, seq_lens=lens, out_cache_loc=slots.flatten().long(), **more
    )


def model_of(backend):
    """Two layers, the second over the first one's output. All keys are in the cache."""

    def model(batch, q):
        x = q
        for layer in LAYERS:
            x = x + backend.forward(x, None, None, layer, save_kv_cache=False)
        return x

    return model


def inputs(tokens, seed=0, **heads):
    generator = torch.Generator("cuda").manual_seed(seed)
    return {
        name: torch.randn(tokens, count, 64, dtype=BF16, device="cuda", generator=generator)
        for name, count in {"q": 8, **heads}.items()
    }


def runner_of(backend, mode, bounds=None):
    count = DRAFTS if mode == "target_verify" else 1
    most = [CONTEXT - DRAFTS] * 16
    largest = batch_of(mode, most, backend.pools)
    runner = GraphRunner(backend, model_of(backend), largest, inputs(16 * count), sizes=(1, 2, 4, 8, 16), bounds=bounds)
    memory = runner.capture()
    assert memory.graphs > 0 and memory.static > 0
    return runner


@pytest.mark.parametrize("mode", ["decode", "target_verify"])
def test_two_hundred_alternations(mode):
    """Small after large, ragged after uniform: each equals a plan of its own, and nothing is allocated or awaited."""
    backend, plain = make(), make()
    runner, model, pick = runner_of(backend, mode), model_of(plain), random.Random(mode)
    batches = []
    for number in range(20):
        n = pick.choice([1, 2, 3, 7, 8, 15, 16])
        uniform = pick.randint(1, CONTEXT - DRAFTS)
        lens = [uniform if number % 3 == 0 else pick.randint(1, CONTEXT - DRAFTS) for _ in range(n)]
        batch = batch_of(mode, lens, backend.pools)
        tensors = inputs(batch.num_tokens, number)
        plain.plan(batch)
        batches.append((batch, tensors, model(batch, **tensors).clone()))
    runner.run(batches[0][0], **batches[0][1])
    torch.cuda.synchronize()
    held = torch.cuda.memory_reserved()
    found = []
    with no_waiting():
        for _ in range(200):
            batch, tensors, wanted = batches[pick.randrange(len(batches))]
            got = runner.run(batch, **tensors)
            found.append((got.float() - wanted.float()).abs().max() + got.isnan().any())
    assert float(torch.stack(found).max()) <= 0.05
    assert torch.cuda.memory_reserved() == held


def test_memory_that_is_freed_while_recording():
    """What is said of the graphs is theirs alone, whatever else goes meanwhile."""
    backend = make()
    inner, others = model_of(backend), [torch.empty(2**26, dtype=torch.uint8, device="cuda")]

    def model(batch, q):
        others.clear()
        return inner(batch, q)

    largest = batch_of("decode", [CONTEXT - DRAFTS] * 16, backend.pools)
    memory = GraphRunner(backend, model, largest, inputs(16), sizes=(1, 16)).capture()
    assert 0 < memory.graphs < 2**26


def test_a_pass_of_padding_alone():
    runner = runner_of(make(), "decode")
    batch = batch_of("decode", [0, 0, 0], runner._backend.pools)
    q = inputs(3)
    assert torch.equal(runner.run(batch, **q), q["q"])


def test_the_next_pass_waits_for_one_on_another_stream():
    """B is loaded from a side stream while A still runs: A's lengths and metadata stay as they are."""
    backend, plain = make(), make()
    runner, model = runner_of(backend, "decode"), model_of(plain)
    a, b = batch_of("decode", [500] * 8, backend.pools), batch_of("decode", [3, 9] * 4, backend.pools)
    tensors, wanted = inputs(8), []
    for batch in (a, b):
        plain.plan(batch)
        wanted.append(model(batch, **tensors).clone())
    side = torch.cuda.Stream()
    for _ in range(20):
        torch.cuda._sleep(2_000_000)
        first = runner.run(a, **tensors).clone()
        with torch.cuda.stream(side):
            second = runner.run(b, **tensors).clone()
        torch.cuda.synchronize()
        torch.testing.assert_close(first, wanted[0], atol=0.05, rtol=0)
        torch.testing.assert_close(second, wanted[1], atol=0.05, rtol=0)


def test_plans_from_a_side_stream_outlive_their_successors():
    """Eager: plan B takes memory on the planning stream while A's kernels still wait to run on another one."""
    backend = make()
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    lens = [[500] * 8, [3, 9] * 4]
    batches = [batch_of("target_verify", some, backend.pools) for some in lens]
    tensors, wanted = inputs(8 * DRAFTS), []
    model = model_of(backend)
    for batch in batches:
        backend.plan(batch)
        wanted.append(model(batch, **tensors).clone())
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        for batch in (*batches, *batches):
            with torch.cuda.stream(side):
                backend.plan(batch)
            main.wait_stream(side)
            torch.cuda._sleep(500_000)
            found.append(model(batch, **tensors).clone())
        torch.cuda.synchronize()
        for got, expected in zip(found, wanted * 2, strict=True):
            torch.testing.assert_close(got, expected, atol=0.05, rtol=0)


def test_all_steps_of_a_draft_are_one_graph():
    def rounds(lens):
        rows, lens = torch.arange(1, len(lens) + 1, device="cuda"), torch.tensor(lens, device="cuda")
        slots = rows[:, None] * 8 + torch.arange(8, device="cuda")  # two branches of four steps, anywhere
        return ForwardBatch(
            forward_mode="draft_decode",
            req_pool_indices=rows,
            seq_lens=lens,
            out_cache_loc=slots.flatten(),
            draft_step=0,
        )

    def model_of(draft):
        def model(batch, q, k, v):
            x = q
            for step in range(draft.num_steps):
                for layer in LAYERS:
                    x = x + draft.forward(step, x, k, v, layer)
            return x

        return model

    draft, plain = make(MultiStepDraft), make(MultiStepDraft)
    runner = GraphRunner(draft, model_of(draft), rounds([1] * 8), inputs(16, k=2, v=2), sizes=(1, 4, 8))
    runner.capture()
    for lens in ([400, 3], [77], [5, 500, 6, 7, 8], [1] * 8):
        batch, tensors = rounds(lens), inputs(2 * len(lens), k=2, v=2)
        plain.plan(batch)
        wanted = model_of(plain)(batch, **tensors).clone()
        with no_waiting():
            got = runner.run(batch, **tensors)
        torch.testing.assert_close(got, wanted, atol=0.1, rtol=0.02)


def test_memory_is_bounded_by_the_configuration():
    """A million tokens of context, 256 requests, chunks of 8192 tokens, pages of one token."""
    speculative = SpeculativeConfig(topk=2, num_steps=3, num_draft_tokens=MOST["drafts"])
    layers = [AttentionLayer(layer_id=0, num_q_heads=32, num_kv_heads=8, head_dim=128)]
    config = BackendConfig(context_len=MOST["context"], kernels="triton", speculative=speculative)
    kv = MHAPool(num_pages=4, layers=layers, device="cuda")
    table = torch.zeros(1, dtype=torch.int32, device="cuda").expand(MOST["requests"] + 1, MOST["context"])
    backend = AttentionBackend(config, Pools(req_to_token=table, kv=kv), layers)
    assert 0 < backend.reserve(largest("cuda")) <= 64 << 20
