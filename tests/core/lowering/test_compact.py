"""any visibility -> a table of exactly what each query sees."""

import attrs
import pytest
import torch

from faback.core.lowering.compact import Compact

from .problems import CONTEXT, PAGES, TAILS, Draw, check_equal, check_padding_tokens, visible, workspace

KINDS = ("keep", "window", "chunk", "non_causal", "positions", "sharded", "q_len", "row_window")


@pytest.mark.parametrize("feature", KINDS)
@pytest.mark.parametrize("page", PAGES)
def test_compact_is_the_whole(page, feature):
    has = {feature, "rows", "window"} if feature == "row_window" else {feature, "rows"}
    for seed in range(6):
        problem = Draw(seed, page, has=has, never={"raw_kv"}).problem()
        check_equal(problem, problem.lowered(Compact()))


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("committed", [True, False])
def test_compact_with_a_tail_is_the_whole(tail, committed):
    for seed in range(16):
        has, never = {"tail", "rows"}, set()
        (never if committed else has).add("tail_only")
        problem = Draw(seed, PAGES[seed % 4], has=has, never=never, tails=(tail,)).problem()
        check_equal(problem, problem.lowered(Compact()))


@pytest.mark.parametrize("page", PAGES)
def test_a_row_lists_exactly_what_its_query_sees(page):
    for seed in range(10):
        problem = Draw(seed, page, has={"rows"}, never={"raw_kv"}).problem()
        (rows,) = Compact().lower(problem.segment, workspace(), CONTEXT)
        lists = [line[:n].tolist() for line, n in zip(rows.kv.req_to_token, rows.kv_len.tolist(), strict=True)]
        assert lists == visible(problem)
        assert all(not line[n:].any() for line, n in zip(rows.kv.req_to_token, rows.kv_len.tolist(), strict=True))


def test_only_keys_of_the_batch_are_refused():
    request = Draw(0, 4, never={"raw_kv"}).problem().request()
    assert Compact().becomes(request)[0].page_size == 1
    assert Compact().becomes(Draw(0, 4, has={"raw_kv"}).problem().request()) == ()


def test_a_row_of_nothing_sees_nothing():
    """Rows with a length but no request are padding, before and after."""
    problem = Draw(11, 4, has={"rows"}, never={"raw_kv", "tail"}).problem()
    segment = problem.segment
    segment.kv.req_pool_indices.zero_()
    (rows,) = Compact().lower(segment, workspace(), CONTEXT)
    assert not rows.kv_len.any()
    out, lse = problem.attend(rows)
    assert not out.any() and bool((lse == -torch.inf).all())


def test_padding_tokens_without_a_row_see_nothing():
    check_padding_tokens(Compact())


def test_rows_of_padding_alone_have_a_table():
    """A pass in which every length is 0 still needs one column to point at."""
    segment = Draw(11, 4, has={"rows"}, never={"raw_kv", "tail"}).problem().segment
    segment.kv_len.zero_()
    (rows,) = Compact().lower(attrs.evolve(segment, max_kv_len=0), workspace(), CONTEXT)
    assert tuple(rows.kv.req_to_token.shape) == (segment.tokens, 1)
    assert not rows.kv_len.any() and not rows.kv.req_to_token.any()
