"""The definition itself: bounds bound, shares add up, and who sees what is what the README draws."""

import math

import pytest
import torch

from faback_block_sparse import Options
from faback_block_sparse.definition import block_scores, bound, seen_blocks, visible


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("seed", range(5))
def test_no_key_scores_above_its_bound_and_a_single_key_scores_as_much(seed):
    keys, query = noise(7, 6, seed=seed), noise(6, seed=seed + 100)
    products = keys @ query
    assert bound(query, keys) > products.max()
    for key, product in zip(keys, products, strict=True):
        assert bound(query, key[None]) == pytest.approx(float(product))


def test_every_head_of_every_layer_gives_away_one_share():
    keys, queries = [noise(40, 2, 4), noise(40, 2, 4, seed=1)], [noise(6, 4), noise(6, 4, seed=1)]
    scores = block_scores(keys, queries, 37, block=8, page=4, scale=0.5)
    assert len(scores) == 5
    assert sum(map(math.exp, scores)) == pytest.approx(2 * 6)


def test_pages_of_one_token_score_a_block_by_its_best_key():
    keys, query = noise(12, 1, 4), noise(1, 4)
    best = (keys[:, 0] @ query[0]).view(3, 4).amax(1)
    scores = block_scores([keys], [query], 12, block=4, page=1, scale=1.0)
    assert scores == pytest.approx((best - best.logsumexp(0)).tolist())


@pytest.mark.parametrize(
    ("own", "known", "recent", "seen"),
    [
        (9, 40, "all", {0, 3, 5, 8, 9}),  # the two best of 1 .. 7
        (9, 27, "all", {0, 3, 5, 6, 7, 8, 9}),  # there are no summaries from block 6 on
        (9, 27, "local", {0, 3, 5, 8, 9}),
        (9, 11, "local", {0, 1, 2, 8, 9}),  # the last summary is of half a block
        (9, 0, "all", set(range(10))),
        (9, 0, "local", {0, 8, 9}),
        (4, 40, "all", {0, 2, 1, 3, 4}),
        (2, 40, "all", {0, 1, 2}),
        (0, 40, "all", {0}),
    ],
)
def test_who_is_seen(own, known, recent, seen):
    scores = [9.0, 1.0, 2.0, 5.0, 0.0, 7.0, 2.0, 2.0, 8.0, 8.0][: -(-known // 4)]
    options = Options(block_size=4, top_k=2, local_blocks=2, recent=recent)
    assert seen_blocks(own, known, scores, options) == seen


def test_among_equals_the_earlier_block_is_chosen():
    assert seen_blocks(9, 40, [0.0] * 10, Options(block_size=4, top_k=3, local_blocks=1)) == {0, 1, 2, 3, 9}


def test_with_room_for_all_blocks_what_is_seen_is_causality():
    keys, queries = [noise(50, 1, 4)], [noise(2, 4)]
    options = Options(block_size=4, top_k=12, local_blocks=1)
    seen = visible(keys, queries, new=13, known=30, options=options, page=2, scale=0.5)
    assert torch.equal(seen, torch.ones(50, 50, dtype=torch.bool).tril()[37:])
