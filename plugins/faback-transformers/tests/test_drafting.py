"""Prompt look-up: what it finds, in which order, and how much of it."""

from __future__ import annotations

import random

import pytest

from faback import ConfigError
from faback_transformers import PromptLookup


def draft(tokens, **options):
    return PromptLookup(**{"branches": 9, "length": 3, "max_match": 1, **options}).draft(tokens, 100)


def test_the_latest_comes_first():
    assert draft([7, 1, 2, 3, 7, 4, 5, 6, 7]) == [(4, 5, 6), (1, 2, 3)]


def test_the_better_match_comes_first():
    assert draft([8, 7, 1, 2, 3, 7, 4, 5, 6, 8, 7], max_match=2) == [(1, 2, 3), (4,)]


def test_equal_continuations_count_once():
    assert draft([7, 1, 2, 3, 7, 1, 2, 3, 7, 4, 5, 6, 7], branches=2) == [(4, 5, 6), (1, 2, 3)]


def test_branches_bound_the_continuations():
    assert draft([7, 1, 7, 2, 7, 3, 7], branches=2, length=1) == [(3,), (2,)]


def test_a_loop_goes_on():
    assert draft([5, 1, 2, 1, 2], length=5, branches=1) == [(1, 2, 1, 2, 1)]
    assert draft([1, 1], length=4) == [(1, 1, 1, 1)]


def test_trust_grows_with_the_match():
    lengths = [len(draft([*range(10, 20), *range(20 - n, 20)], length=8, max_match=4)[0]) for n in range(1, 7)]
    assert lengths == [1, 2, 4, 8, 8, 8]


def test_nothing_to_look_up():
    assert draft([1]) == []
    assert draft([1, 2, 3]) == []
    assert draft([1, 2, 3, 2], min_match=2, max_match=2) == []


@pytest.mark.parametrize("seed", range(50))
def test_drafts_are_what_followed(seed):
    rng = random.Random(seed)
    tokens = [rng.randrange(4) for _ in range(rng.randrange(1, 40))]
    least, most = sorted((rng.randint(1, 3), rng.randint(1, 3)))
    lookup = PromptLookup(branches=rng.randint(1, 4), length=1, min_match=least, max_match=most)
    wanted = []
    for size in range(most, least - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:] and (tokens[end],) not in wanted:
                wanted.append((tokens[end],))
    assert lookup.draft(tokens, 100) == wanted[: lookup.branches]


def test_settings_are_checked():
    for name in ("branches", "length", "min_match", "max_match"):
        with pytest.raises(ConfigError, match=name):
            PromptLookup(**{name: 0})
    with pytest.raises(ConfigError, match="min_match"):
        PromptLookup(min_match=4, max_match=3)
