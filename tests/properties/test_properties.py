"""The answer depends on the tokens that a query sees, and on nothing else."""

from __future__ import annotations

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from faback import AttentionBackend
from faback.builtins import BUILTINS
from faback.core.registry import Registry
from faback.testing import MODES, OVERLAYS, Options, Scenario, impossible
from faback.testing.poison import TABLE_FLAVOURS
from properties.story import LAYERS, Story, Telling

QUICK = settings(max_examples=40, deadline=None, derandomize=True)
KERNELS = st.sampled_from(["reference", "poor"])
PAGES = st.sampled_from([1, 2, 3, 4, 16])


@st.composite
def stories(draw, least=0):
    requests = draw(st.lists(st.tuples(st.integers(0, 12), st.integers(least, 7)), min_size=1, max_size=4))
    return Story(
        lens=tuple(old + new for old, new in requests),
        new=tuple(new for _, new in requests),
        rule=draw(st.sampled_from(sorted(LAYERS))),
        seed=draw(st.integers(0, 99)),
    )


def same(one, other, exact=True):
    assert one.keys() == other.keys()
    for token, out in one.items():
        if exact:
            assert torch.equal(out, other[token]), token
        else:
            torch.testing.assert_close(out, other[token], atol=2e-5, rtol=0)


@QUICK
@given(stories(), KERNELS, PAGES, st.sampled_from([float("inf"), 0.0, 1e30]), st.sampled_from([0, -1, 7, 2**31 - 1]))
def test_what_nobody_owns_does_not_matter(story, kernel, page, poison, garbage):
    told = Telling(kernel=kernel, page_size=page)
    same(told.tell(story), attrs.evolve(told, poison=poison, garbage=garbage).tell(story))


@QUICK
@given(stories(), KERNELS, PAGES, PAGES, st.integers(1, 99))
def test_where_tokens_lie_does_not_matter(story, kernel, page, other, layout):
    told = Telling(kernel=kernel, page_size=page)
    same(told.tell(story), attrs.evolve(told, page_size=other, layout=layout).tell(story), exact=False)


@QUICK
@given(stories(), KERNELS, st.randoms(use_true_random=False))
def test_the_order_of_requests_does_not_matter(story, kernel, pick):
    order = list(range(len(story.lens)))
    pick.shuffle(order)
    exact = kernel != "poor"  # which promises no bits
    told = Telling(kernel=kernel, deterministic=exact)
    same(told.tell(story), attrs.evolve(told, order=tuple(order)).tell(story), exact)


@QUICK
@given(stories(), KERNELS, PAGES, st.integers(2, 4))
def test_how_a_prompt_is_cut_does_not_matter(story, kernel, page, pieces):
    told = Telling(kernel=kernel, page_size=page)
    same(told.tell(story), attrs.evolve(told, pieces=pieces).tell(story), exact=False)


@QUICK
@given(stories(least=1), KERNELS, st.data())
def test_later_tokens_do_not_matter_and_earlier_ones_do(story, kernel, data):
    request = data.draw(st.integers(0, len(story.lens) - 1))
    position = data.draw(st.integers(0, story.lens[request] - 1))
    told, changed = Telling(kernel=kernel), attrs.evolve(story, changed=(request, position))
    before, after = told.tell(story), told.tell(changed)
    for (owner, at), out in before.items():
        if owner != request or at < position:
            torch.testing.assert_close(out, after[owner, at], atol=1e-6, rtol=0)
        elif at == position:
            assert not torch.allclose(out, after[owner, at], atol=1e-3)


def told_by(options):
    """All outputs and log-sum-exps of a scenario of the test kit."""
    scenario = Scenario.make(**attrs.asdict(options, recurse=False))
    pools = scenario.pools()
    registry = Registry.load(scenario.config, BUILTINS, entry_points=[])
    backend = AttentionBackend(scenario.config, pools, scenario.layers, registry=registry)
    found = []
    for step in scenario.steps:
        step.enter(pools)
        backend.plan(step.batch)
        for call in step.calls:
            found += backend.forward(call.q, call.k, call.v, call.layer, sinks=call.sinks, return_lse=True)
    return found


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("mode", MODES)
def test_tails_of_tables_and_dtypes_of_indices_do_not_matter(mode, overlay):
    """Every flavour of garbage behind the live entries, in every mode: not a bit moves."""
    options = Options(mode=mode, overlay=overlay, page_size=4, seed=2, batch_size=3, padded_rows=1)
    if impossible(options):
        pytest.skip(str(impossible(options)))
    plain, *others = (told_by(attrs.evolve(options, tails=flavour)) for flavour in TABLE_FLAVOURS)
    others += [told_by(attrs.evolve(options, tails=TABLE_FLAVOURS[0], index_dtype=torch.int32))]
    for other in others:
        assert all(map(torch.equal, plain, other))
