"""Tries of drafts against the definition: a node is a beginning of a continuation."""

from __future__ import annotations

import random

import pytest

from faback_transformers.tree import DraftTree

ROOT = 9


def paths(tree):
    """The tokens from the root to each node, the root's own left out."""
    found = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        found.append((*found[parent], token) if parent >= 0 else ())
    return found


def merged(continuations, max_nodes=1000, max_depth=1000):
    return DraftTree.merged(ROOT, continuations, max_nodes=max_nodes, max_depth=max_depth)


def random_continuations(rng):
    return [tuple(rng.randrange(3) for _ in range(rng.randrange(7))) for _ in range(rng.randrange(6))]


def test_shared_beginnings_share_nodes():
    tree = merged([(1, 2, 3), (1, 2, 4), (5,)])
    assert list(tree.tokens) == [ROOT, 1, 2, 3, 4, 5]
    assert list(tree.parents) == [-1, 0, 1, 2, 2, 0]
    assert list(tree.depths) == [0, 1, 2, 3, 3, 1]
    assert [[int(seen) for seen in row] for row in tree.mask()] == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 0, 1, 0],
        [1, 0, 0, 0, 0, 1],
    ]


def test_without_drafts_the_root_is_alone():
    for tree in (merged([]), merged([()]), merged([(1, 2)], max_nodes=1), merged([(1, 2)], max_depth=0)):
        assert (list(tree.tokens), tree.mask(), tree.accepted([1])) == ([ROOT], [[True]], [0])


@pytest.mark.parametrize("seed", range(50))
def test_nodes_are_the_beginnings_of_continuations(seed):
    rng = random.Random(seed)
    continuations, depth = random_continuations(rng), rng.randrange(7)
    wanted = {line[:end] for line in continuations for end in range(min(len(line), depth) + 1)} | {()}
    whole = merged(continuations, max_depth=depth)
    found = paths(whole)
    assert len(found) == len(set(found))
    assert set(found) == wanted
    assert [len(path) for path in found] == list(whole.depths)
    for path, row in zip(found, whole.mask(), strict=True):
        assert row == [path[: len(other)] == other for other in found]
    for size in range(1, len(found) + 1):
        small = merged(continuations, max_nodes=size, max_depth=depth)
        assert len(small) == size
        assert paths(small) == found[:size], "the likeliest come first"


@pytest.mark.parametrize("seed", range(50))
def test_acceptance_follows_the_model(seed):
    rng = random.Random(seed)
    tree = merged(random_continuations(rng))
    found = paths(tree)
    choices = [rng.randrange(3) for _ in found]
    path = ()
    wanted = [found.index(path)]
    while (*path, choices[found.index(path)]) in found:
        path = (*path, choices[found.index(path)])
        wanted.append(found.index(path))
    assert tree.accepted(choices) == wanted
    assert wanted == sorted(wanted), "nodes only ever move to the left"
