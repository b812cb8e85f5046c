"""Whole conversations on every kernel, eager and replayed: each output is that of the definition."""

import attrs
import pytest
import torch
from small_engine import DIM, HEADS, WINDOW, Engine, layer

SIZES = [
    {"page": 1, "block": 1},
    {"page": 1, "block": 3},
    {"page": 16, "block": 16},
    {"page": 16, "block": 32},
    {"page": 64, "block": 64},
    {"page": 4, "block": 8},
]
every_size = pytest.mark.parametrize("sizes", SIZES, ids=lambda s: f"page {s['page']} block {s['block']}")
every_kernel = pytest.mark.parametrize("kernel", ["reference", "poor"])
eager_and_graphs = pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])


def engine(sizes, **more):
    settings = {"block_size": sizes["block"], "top_k": 2, "local_blocks": 2} | more.pop("settings", {})
    return Engine(settings, page=sizes["page"], **more)


def converse(made):
    """Prompts whole and in chunks, decode rows among them, then decoding; rows and tokens of padding."""
    made.step([(1, 70), (2, 33)])
    made.step([(1, 50), (3, 1), (2, 1)], padded_rows=2, padded_tokens=3)
    made.step([(2, 47), (4, 17)], padded_rows=1)
    made.step([(4, 1), (1, 1), (2, 1)], padded_rows=1)
    made.step([(3, 40), (1, 31)])
    for _ in range(3):
        made.step([(4, 1), (1, 1), (3, 1)], padded_rows=1)


@pytest.mark.parametrize("recent", ["all", "local"])
@eager_and_graphs
@every_kernel
@every_size
def test_conversations(sizes, kernel, graphs, recent):
    converse(engine(sizes, kernel=kernel, graphs=graphs, settings={"recent": recent}, checks=True))


@eager_and_graphs
@every_kernel
def test_no_block_is_chosen(kernel, graphs):
    converse(engine(SIZES[5], kernel=kernel, graphs=graphs, settings={"top_k": 0, "local_blocks": 1}))


@eager_and_graphs
@every_kernel
@pytest.mark.parametrize("limit", [1, 8, 100])
def test_what_plans_have_not_taken_in_yet_is_seen(kernel, graphs, limit):
    converse(engine(SIZES[5], kernel=kernel, graphs=graphs, settings={"catch_up": limit}))


@every_kernel
@pytest.mark.parametrize("sizes", [SIZES[1], SIZES[3]], ids=["page 1", "page 16"])
def test_with_room_for_all_blocks_it_is_plain_attention(sizes, kernel, monkeypatch):
    """The expectation here is causality and nothing of the plugin."""
    monkeypatch.setattr(Engine, "masks", lambda *_: {})
    converse(engine(sizes, kernel=kernel, settings={"top_k": 1000, "local_blocks": 1}))
    with pytest.raises(AssertionError, match="not close"):
        converse(engine(sizes, kernel=kernel, settings={"top_k": 1, "local_blocks": 1}))


@eager_and_graphs
def test_other_layers_see_what_they_always_see(graphs):
    layers = [layer(0, window=WINDOW), layer(1), layer(2, scale=0.2), layer(3)]
    made = engine(SIZES[5], graphs=graphs, layers=layers)
    assert [[one.layer_id for one in found.layers] for found in made.memory.kinds.values()] == [[1, 3], [2]]
    converse(made)


@eager_and_graphs
@every_kernel
def test_sinks_softcap_and_scales_go_with_it(kernel, graphs):
    scales = {"k_scale": torch.tensor([0.5, 3.0]), "v_scale": 2.0}
    converse(engine(SIZES[5], kernel=kernel, graphs=graphs, layers=[layer(0, sinks=True, softcap=2.0, **scales)]))


@eager_and_graphs
@every_kernel
def test_latent_layers(kernel, graphs):
    latent = {"num_kv_heads": 1, "head_dim": DIM, "v_head_dim": 5, "latent": True}
    converse(engine(SIZES[5], kernel=kernel, graphs=graphs, layers=[layer(0, **latent), layer(1, **latent)]))


@eager_and_graphs
def test_layers_of_groups_of_their_own_choose_for_themselves(graphs):
    made = engine(SIZES[5], graphs=graphs, apart=True)
    assert len(made.memory.kinds) == 2
    converse(made)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_a_query_summary_may_be_shared_by_heads(heads):
    made = engine(SIZES[5])
    made.step([(1, 90), (2, 60)])
    for _ in range(4):
        made.step([(1, 1), (2, 1)], query=made.noise(2, 2, heads, 8))


def test_a_query_summary_may_be_shared_by_layers():
    made = engine(SIZES[5])
    made.step([(1, 150)])
    for_all = made.noise(1, HEADS, DIM)
    batch, _ = made.step([(1, 1)], query=for_all.expand(2, -1, -1, -1))
    shared = attrs.evolve(batch, extras={"query_summary": for_all})
    apart, alike = (made.backend.build(one, made.backend.workspace()).steps[0].segment for one in (batch, shared))
    for kind, choice in apart.choices.items():
        assert int(choice.chosen.min()) > 0
        assert torch.equal(choice.chosen, alike.choices[kind].chosen)


def test_passes_of_padding_alone():
    made = engine(SIZES[5])
    made.step([], mode="decode", padded_rows=2)
    made.step([], mode="extend", padded_rows=2, padded_tokens=3)
    made.step([], mode="extend")
    assert not made.memory.done.any()
