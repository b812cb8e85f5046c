"""tree or tail -> cascade: two parts, merged, sinks once."""

import attrs
import pytest
import torch

from faback.core.lowering.cascade import Cascade

from .problems import CONTEXT, PAGES, TAILS, Draw, check_equal, expected, visible, workspace


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("page", PAGES)
def test_cascade_is_the_whole(page, tail):
    for seed in range(8):
        problem = Draw(seed, page, has={"tail", "behind"}, never={"tail_only"}, tails=(tail,)).problem()
        check_equal(problem, problem.lowered(Cascade()))


@pytest.mark.parametrize("tail", ["continued", "slots"])
def test_a_tail_without_positions_is_refused_or_right(tail):
    for seed in range(12):
        problem = Draw(seed, 4, has={"tail"}, never={"tail_only", "positions"}, tails=(tail,)).problem()
        if Cascade().becomes(problem.request()):
            check_equal(problem, problem.lowered(Cascade()))


def test_the_committed_part_needs_no_causality_without_window_chunk_and_prefix():
    never = {"window", "window_right", "chunk", "keep", "tail_only"}
    problem = Draw(3, 4, has={"tail", "rows", "behind"}, never=never).problem()
    committed, tail = Cascade().lower(problem.segment, workspace(), CONTEXT)
    assert committed.tail is None and "non_causal" in committed.features() and committed.positions is None
    assert tail.tail is problem.segment.tail and not tail.committed


def test_a_part_that_is_tail_only_is_not_cut_again():
    request = Draw(0, 1, has={"tail"}).problem().request("tail_only")
    assert Cascade().becomes(request) == ()


def test_sinks_enter_once():
    """Twice would be another number: the merged result differs from the one with sinks in a part as well."""
    problem = Draw(5, 3, has={"tail", "rows", "behind"}, never={"tail_only", "more queries than keys"}).problem()
    sinks = torch.full((4,), 2.0)
    problem = attrs.evolve(problem, sinks=sinks)
    out, _ = problem.lowered(Cascade())
    wanted, lse = expected(problem)
    torch.testing.assert_close(out.double(), wanted, atol=2e-5, rtol=0)
    seeing = torch.tensor([bool(slots) for slots in visible(problem)])
    twice = wanted * torch.sigmoid(lse - 2)[..., None]
    assert seeing.any() and not torch.allclose(out.double()[seeing], twice[seeing], atol=1e-3)
