"""Rules are recognised in the masks that Transformers makes, and in none that follows no rule."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from faback_transformers.masks import recognised

KEYS = 12
PADDING = {
    "none": [[1] * KEYS] * 3,
    "left": [[1] * KEYS, [0] * 3 + [1] * (KEYS - 3), [0] * 8 + [1] * (KEYS - 8)],
    "right": [[1] * KEYS, [1] * (KEYS - 3) + [0] * 3, [1] * (KEYS - 8) + [0] * 8],
    "both": [[1] * KEYS, [0] * 2 + [1] * 7 + [0] * 3, [0] * 4 + [1] * 8],
    "row": [[1] * KEYS, [0] * KEYS, [0] + [1] * (KEYS - 1)],
}
LEFT = {name: [row.index(1) if 1 in row else KEYS for row in rows] for name, rows in PADDING.items()}


def made(rule, padding="none", queries=KEYS, offset=0, keys=KEYS):
    """bool [3, queries, keys], as Transformers makes it."""
    known = torch.tensor(PADDING[padding], dtype=torch.bool)
    return sdpa_mask(3, queries, keys, offset, 0, rule, known, allow_is_causal_skip=False)[:, 0]


def shown(sight, queries):
    """bool [3, queries, keys]: what a sight says, by the letter of `Sight`."""
    rows = 3
    start = torch.zeros(rows, dtype=torch.int64) if sight.start is None else sight.start
    length = torch.full((rows,), sight.keys) if sight.length is None else sight.length
    key = torch.arange(sight.keys) - start[:, None, None]
    query = torch.arange(queries)[:, None] + (length - queries)[:, None, None]
    if sight.stands is not None:
        query = sight.stands.view(rows, queries, 1)
    seen = (key >= 0) & (key < length[:, None, None]) & (query == query)
    if sight.causal:
        seen &= key <= query
    if sight.window is not None:
        seen &= (key >= query - sight.window) & (key <= query + sight.window)
    if sight.chunk is not None:
        seen &= key // sight.chunk == query // sight.chunk
    return seen


def agree(sight, mask):
    assert sight.seen is None
    assert torch.equal(shown(sight, mask.shape[1]), mask)


@pytest.mark.parametrize("padding", PADDING)
def test_causal(padding):
    mask = made(causal_mask_function, padding)
    sight = recognised(mask)
    agree(sight, mask)
    assert (sight.causal, sight.window, sight.chunk) == (True, None, None)
    assert (sight.stands is None) == (padding not in ("right", "both"))


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("width", [2, 4, 11])
def test_window(padding, width):
    mask = made(sliding_window_causal_mask_function(width), padding)
    sight = recognised(mask)
    agree(sight, mask)
    assert (sight.causal, sight.window, sight.chunk) == (True, width - 1, None)


def test_a_window_that_nothing_reaches_is_none():
    assert recognised(made(sliding_window_causal_mask_function(KEYS))).window is None


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("size", [3, 5])
def test_chunks_count_from_the_first_token(padding, size):
    mask = made(chunked_causal_mask_function(size, torch.tensor(LEFT[padding])), padding)
    sight = recognised(mask)
    agree(sight, mask)
    assert (sight.causal, sight.window, sight.chunk) == (True, None, size)


@pytest.mark.parametrize("padding", PADDING)
def test_all(padding):
    mask = made(bidirectional_mask_function, padding)
    sight = recognised(mask)
    agree(sight, mask)
    assert (sight.causal, sight.window, sight.stands) == (False, None, None)


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("distance", [1, 3])
def test_neighbours(padding, distance):
    mask = made(sliding_window_bidirectional_mask_function(distance), padding)
    sight = recognised(mask)
    agree(sight, mask)
    assert (sight.causal, sight.window) == (False, distance)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("rule", [causal_mask_function, sliding_window_causal_mask_function(4)])
def test_later_passes(rule, queries):
    """New tokens behind cached ones, the cache's storage longer than both."""
    mask = made(rule, "left", queries, KEYS - queries)
    agree(recognised(mask), mask)
    longer = torch.nn.functional.pad(mask, (0, 5))
    sight = recognised(longer)
    agree(sight, longer)
    assert sight.keys == KEYS + 5


def test_one_query_needs_no_rule():
    """Whatever the rule, a single query sees a stretch of keys."""
    chunk = chunked_causal_mask_function(5, torch.tensor([0, 3, 8]))
    for rule in (sliding_window_causal_mask_function(4), chunk, causal_mask_function):
        mask = made(rule, "left", 1, KEYS - 1)
        sight = recognised(mask)
        agree(sight, mask)
        assert (sight.causal, sight.window, sight.chunk) == (True, None, None)


def _holes(batch, head, query, key):
    return key != 5


def _prefix(batch, head, query, key):
    return (key < 4) & (query < 4)


def _sequences(batch, head, query, key):
    return query // 5 == key // 5 + (batch == 1).int()


@pytest.mark.parametrize(
    "rule",
    [
        and_masks(causal_mask_function, _holes),
        or_masks(causal_mask_function, _prefix),
        and_masks(sliding_window_causal_mask_function(4), _holes),
        and_masks(causal_mask_function, _sequences),
        chunked_causal_mask_function(5, torch.tensor([0, 1, 2])),
    ],
)
def test_other_masks_stay_what_they_are(rule):
    mask = made(rule)
    sight = recognised(mask)
    assert torch.equal(sight.seen, mask.flatten(0, 1))
    assert sight.seen.data_ptr() != mask.data_ptr()


def test_whatever_is_recognised_is_right():
    """Random stretches, with and without a rule: never another mask than the one that came."""
    make = torch.Generator().manual_seed(0)
    drawn = partial(torch.randint, generator=make)
    rules = 0
    for _ in range(300):
        low = drawn(0, KEYS, (3, 6, 1))
        if drawn(0, 2, ()):
            low = low[:, :1]
        high = low + drawn(0, 6, (3, 1, 1)) + torch.arange(6)[:, None] * drawn(0, 2, (3, 1, 1))
        mask = (torch.arange(KEYS) >= low) & (torch.arange(KEYS) < high)
        sight = recognised(mask)
        if sight.seen is None:
            rules += 1
            agree(sight, mask)
        else:
            assert torch.equal(sight.seen.view_as(mask), mask)
    assert 0 < rules < 300
