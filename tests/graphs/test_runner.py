"""GraphRunner on a CPU: sizes, padding and refusals. On a GPU: tests/gpu/test_graphs.py."""

from __future__ import annotations

import attrs
import pytest
import torch

from faback import (
    AttentionBackend,
    AttentionLayer,
    BackendConfig,
    BatchError,
    ConfigError,
    ForwardBatch,
    GraphRunner,
    MultiStepDraft,
    Pools,
    SpeculativeConfig,
)
from faback.graph_runner import capture_all, usual_sizes
from faback.pools import MHAPool
from graphs.test_simulated import registry

LAYER = AttentionLayer(layer_id=0, num_q_heads=2, num_kv_heads=1, head_dim=8)
CONTEXT, ROWS = 32, 9
SPECULATIVE = SpeculativeConfig(topk=2, num_steps=3, num_draft_tokens=3)


@pytest.fixture
def backend():
    return make(AttentionBackend)


def make(kind, kernel="late reference"):
    config = BackendConfig(context_len=CONTEXT, dtype=torch.float32, kernels=kernel, speculative=SPECULATIVE)
    kv = MHAPool(num_pages=CONTEXT * ROWS, layers=[LAYER], dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for buffer in kv.buffers(LAYER):
        buffer.normal_(generator=generator)
    table = torch.arange(CONTEXT * ROWS, dtype=torch.int32).view(ROWS, CONTEXT)
    return kind(config, Pools(req_to_token=table, kv=kv), [LAYER], registry=registry(config))


def decode(lens):
    rows, lens = torch.arange(1, len(lens) + 1), torch.tensor(lens)
    return ForwardBatch(
        forward_mode="decode", req_pool_indices=rows, seq_lens=lens, out_cache_loc=rows * CONTEXT + lens - 1
    )


def queries(tokens):
    return torch.randn(tokens, 2, 8, generator=torch.Generator().manual_seed(tokens))


def attends(backend):
    """A model of one layer whose queries come with the call; keys are in the cache."""
    return lambda batch, q: backend.forward(q, None, None, LAYER, save_kv_cache=False)


def runner(backend, largest=8, **options):
    return GraphRunner(backend, attends(backend), decode([1] * largest), {"q": queries(largest)}, **options)


def test_every_size_answers_as_a_plan_does(backend):
    graphs, plain = runner(backend), make(AttentionBackend, "reference")
    graphs.capture()
    for lens in ([5], [3, 32, 1], [0, 7], [9] * 8, [1], list(range(1, 8))):
        batch, q = decode(lens), queries(len(lens))
        got = graphs.run(batch, q=q).clone()
        plain.plan(batch)
        assert got.shape[0] == len(lens)
        torch.testing.assert_close(got, plain.forward(q, None, None, LAYER, save_kv_cache=False))


def test_sizes(backend):
    assert usual_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert usual_sizes(3) == [1, 2, 3]
    graphs = runner(backend, sizes=(2, 6))
    assert graphs.size_for(1) is None
    graphs.capture()
    assert [graphs.size_for(n) for n in (1, 2, 3, 6, 7)] == [2, 2, 6, 6, None]


@pytest.mark.parametrize("sizes", [(), (0, 1), (9,)], ids=str)
def test_sizes_that_cannot_be(backend, sizes):
    with pytest.raises(ConfigError, match="from 1 to 8"):
        runner(backend, sizes=sizes)


def test_tensors_that_cannot_be_cut(backend):
    with pytest.raises(ConfigError, match="multiple of 8"):
        GraphRunner(backend, attends(backend), decode([1] * 8), {"q": queries(9)})


def test_what_it_takes_is_reported(backend):
    memory = runner(backend).capture()
    assert memory.static == 3 * 8 * 8 + 8 * 2 * 8 * 4
    assert "static" in str(memory) and memory.graphs == 0


def test_runners_of_one_backend_are_recorded_together(backend):
    graphs = [runner(backend, largest) for largest in (2, 4)]
    memory = capture_all(graphs)
    assert [g.sizes for g in graphs] == [(1, 2), (1, 2, 4)]
    assert memory.static == sum(g.static_bytes for g in graphs)
    assert graphs[0].run(decode([5, 6]), q=queries(2)).shape[0] == 2
    with pytest.raises(ConfigError, match="several backends"):
        capture_all([runner(make(AttentionBackend)), runner(make(AttentionBackend))])


def test_a_bar_is_shown(backend, capsys):
    runner(backend, sizes=(1,)).capture(progress=True)
    assert "Recording CUDA graphs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda batch: (decode([1] * 9), {"q": queries(9)}), "at most 8 requests"),
        (lambda batch: (attrs.evolve(batch, positions=batch.seq_lens), {"q": queries(2)}), "batch.positions"),
        (lambda batch: (attrs.evolve(batch, out_cache_loc=None, num_tokens=2), {"q": queries(2)}), "out_cache_loc"),
        (lambda batch: (batch, {}), "^q: wanted torch.float32"),
        (lambda batch: (batch, {"q": queries(2), "k": queries(2)}), "^k: wanted no such tensor"),
        (lambda batch: (batch, {"q": queries(3)}), "^q: wanted at most"),
        (lambda batch: (batch, {"q": queries(2)[..., :4]}), "^q: wanted at most"),
    ],
    ids=["requests", "new field", "no field", "no input", "new input", "long input", "other shape"],
)
def test_what_does_not_fit_is_refused_and_nothing_runs(backend, change, words):
    graphs = runner(backend)
    graphs.capture()
    known = graphs.run(decode([5, 6]), q=queries(2)).clone()
    batch, inputs = change(decode([7, 8]))
    with pytest.raises(BatchError, match=words):
        graphs.run(batch, **inputs)
    static = graphs._recorded[2].batch
    assert static.seq_lens.tolist() == [5, 6]
    assert torch.equal(graphs.run(decode([5, 6]), q=queries(2)), known)


def test_bounds_hold(backend):
    graphs = runner(backend, bounds={"seq_lens": 10})
    graphs.capture()
    graphs.run(decode([10, 3]), q=queries(2))
    with pytest.raises(BatchError, match="at most 10, as captured.*bounds="):
        graphs.run(decode([11, 3]), q=queries(2))


def round_of(lens):
    """Two branches of three steps each."""
    rows, lens = torch.arange(1, len(lens) + 1), torch.tensor(lens)
    slots = rows[:, None] * CONTEXT + 20 + torch.arange(6)
    return ForwardBatch(
        forward_mode="draft_decode", req_pool_indices=rows, seq_lens=lens, out_cache_loc=slots.flatten(), draft_step=0
    )


def test_all_steps_of_a_draft_are_one_graph():
    def model(draft):
        def run(batch, q):
            out = q
            for step in range(draft.num_steps):
                out = draft.forward(step, out + q, None, None, LAYER, save_kv_cache=False)
            return out

        return run

    draft, plain = make(MultiStepDraft), make(MultiStepDraft, "reference")
    graphs = GraphRunner(draft, model(draft), round_of([1] * 4), {"q": queries(8)})
    graphs.capture()
    for lens in ([4, 17, 2], [20], [1, 1, 1, 1], [0, 9]):
        batch, q = round_of(lens), queries(2 * len(lens))
        got = graphs.run(batch, q=q).clone()
        plain.plan(batch)
        wanted = model(plain)(batch, q)
        assert got.shape == wanted.shape
        torch.testing.assert_close(got, wanted)
