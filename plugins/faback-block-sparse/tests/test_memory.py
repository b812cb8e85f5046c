"""Summaries follow the pages: partly filled ones, freed and reused ones, rewound ones, shared ones."""

import pytest
import torch
from small_engine import KV_HEADS, Engine, layer

from faback import AttentionBackend, ForwardBatch

SETTINGS = {"block_size": 8, "top_k": 1, "local_blocks": 1}
every_page = pytest.mark.parametrize("page", [1, 2, 4, 8])
eager_and_graphs = pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])


def summarised(made, row):
    """[layers, pages, 2, heads, dim] as the pages of a request have them now."""
    pages = made.table[row, : made.known[row] : made.page] // made.page
    return torch.cat([found.bounds[:, pages] for found in made.memory.kinds.values()])


def expected(made, row):
    """The same from the text: least and greatest of the tokens that have summaries, page by page."""
    texts = [made.keys(row, one.layer_id)[: made.known[row]].split(made.page) for one in made.sparse]
    return torch.stack([torch.stack([torch.stack([k.amin(0), k.amax(0)]) for k in text]) for text in texts])


def check(made, *rows):
    for row in rows:
        assert int(made.memory.done[row]) == made.known[row]
        assert torch.equal(summarised(made, row), expected(made, row))


@eager_and_graphs
@every_page
def test_the_last_page_is_brought_up_to_date_token_by_token(page, graphs):
    made = Engine(SETTINGS, page=page, graphs=graphs)
    made.step([(1, 9), (2, 22)])
    for _ in range(12):
        made.step([(2, 1), (1, 1)])
        check(made, 1, 2)
    assert made.known == {1: 20, 2: 33, 3: 0, 4: 0, 5: 0, 6: 0}


@eager_and_graphs
@every_page
@pytest.mark.parametrize("release", [True, False], ids=["released", "begun anew"])
def test_pages_that_are_used_again_have_nothing_of_their_past(page, graphs, release):
    """A past of large keys: their bounds would outdo all others. A request that begins anew needs no release."""
    made = Engine(SETTINGS, page=page, graphs=graphs)
    loud = {(1, one.layer_id, t): torch.full((KV_HEADS, 8), 50.0 - t) for one in made.layers for t in range(60)}
    made.step([(1, 60)], keys=loud)
    made.step([(1, 1)])
    check(made, 1)
    old = set((made.table[1, :61] // page).tolist())
    made.free(1, release=release)
    made.step([(1, 37)])
    assert old & set((made.table[1, :37] // page).tolist())
    for _ in range(6):
        made.step([(1, 1)])
        check(made, 1)


@pytest.mark.parametrize("page", [1, 4])
def test_another_request_takes_the_row_with_a_cached_prefix(page):
    """With a prefix in the cache nothing in the batch says that the row is someone else's: `release` does."""
    made = Engine(SETTINGS, page=page)
    made.step([(1, 60)])
    made.step([(1, 1)])
    made.free(1)
    made.step([(1, 70)], plain=True)
    made.known[1] = 0
    made.step([(1, 5)])
    check(made, 1)


@eager_and_graphs
@every_page
def test_tokens_that_are_taken_back_are_forgotten(page, graphs):
    made = Engine(SETTINGS, page=page, graphs=graphs)
    loud = {(1, one.layer_id, t): torch.full((KV_HEADS, 8), 90.0) for one in made.layers for t in range(27, 40)}
    made.step([(1, 40)], keys=loud)
    made.step([(1, 1)])
    made.allocator.free(made.table[1, -(-27 // page) * page : 41].clone())
    made.forget(1, 27)
    for _ in range(9):
        made.step([(1, 1)])
        check(made, 1)
    made.step([(1, 20)])
    check(made, 1)


@eager_and_graphs
def test_what_other_modes_wrote_is_taken_in(graphs):
    made = Engine(SETTINGS, page=4, graphs=graphs)
    made.step([(1, 50), (2, 7)], plain=True)
    made.step([(1, 1), (2, 1)], plain=True)
    made.step([(1, 1), (2, 1)])
    check(made, 1, 2)
    assert made.known[1] == 51


@eager_and_graphs
@pytest.mark.parametrize("limit", [1, 5, 8])
def test_a_limited_plan_goes_on_where_the_last_one_ended(limit, graphs):
    made = Engine({**SETTINGS, "catch_up": limit}, page=4, graphs=graphs)
    made.step([(1, 60)], plain=True)
    reached = []
    for _ in range(16):
        made.step([(1, 1)])
        check(made, 1)
        reached.append(made.known[1])
    assert reached[0] == {1: 4, 5: 8, 8: 12}[limit]
    assert reached[-1] == 75 if limit > 4 else reached[-1] == 64


@eager_and_graphs
def test_a_pass_without_tokens_takes_in_what_a_limit_would_leave(graphs):
    made = Engine({**SETTINGS, "catch_up": 1}, page=4, graphs=graphs)
    made.step([(1, 60), (2, 33)], plain=True)
    made.step([(1, 0), (2, 0)], mode="extend")
    assert (made.known[1], made.known[2]) == (60, 33)
    for _ in range(9):
        made.step([(1, 1), (2, 1)])
        check(made, 1, 2)
    assert (made.known[1], made.known[2]) == (68, 41)


def test_a_plan_that_is_made_twice_changes_nothing():
    made = Engine(SETTINGS, page=4)
    made.step([(1, 45)])
    batch, _ = made.step([(1, 1)])
    before = summarised(made, 1).clone()
    made.backend.plan(batch)
    assert torch.equal(summarised(made, 1), before)
    check(made, 1)


def test_an_explanation_leaves_everything_alone():
    made = Engine(SETTINGS, page=4)
    made.step([(1, 45)])
    made.length[1] += 1
    batch = ForwardBatch(
        forward_mode="block_sparse_decode",
        req_pool_indices=torch.tensor([1]),
        seq_lens=torch.tensor([46]),
        out_cache_loc=torch.tensor([1]),
        extras={"query_summary": made.noise(1, 1, 8)},
    )
    before = [made.memory.done.clone(), *(found.bounds.clone() for found in made.memory.kinds.values())]
    assert "block_table(reference)" in str(made.backend.explain(batch, made.layers[0]))
    after = [made.memory.done, *(found.bounds for found in made.memory.kinds.values())]
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)


def test_backends_of_one_registry_share_nothing():
    made = Engine(SETTINGS, page=4)
    other = AttentionBackend(made.backend.config, made.pools, made.layers, registry=made.backend.registry)
    made.step([(1, 45)])
    made.step([(1, 1)])
    memory = other.modes["block_sparse_decode"].value.memory
    assert memory is other.modes["block_sparse_extend"].value.memory
    assert memory is not made.memory and not memory.done.any()
    assert not any(found.bounds.any() for found in memory.kinds.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_summaries_hold_stored_keys_exactly(dtype):
    scales = {"k_scale": torch.tensor([0.5, 3.0]), "v_scale": 2.0} if dtype.itemsize == 1 else {}
    made = Engine(SETTINGS, page=4, layers=[layer(0, **scales)], kv_dtype=dtype)
    made.step([(1, 45)])
    made.step([(1, 1)])
    stored = made.kv.buffers(made.layers[0])[0].float()[made.table[1, :45]].split(4)
    wanted = torch.stack([torch.stack([keys.amin(0), keys.amax(0)]) for keys in stored])
    assert torch.equal(summarised(made, 1)[0].float(), wanted)
