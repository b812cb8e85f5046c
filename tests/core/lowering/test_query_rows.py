"""window, chunk, direction -> one row per query over one span of keys."""

import pytest
import torch

from faback.core.lowering.query_rows import UNSUITED, QueryRows

from .problems import CONTEXT, PAGES, Draw, check_equal, check_padding_tokens, visible, workspace

ANY = ("window", "chunk", "non_causal", "positions", "q_len", "window_right")


@pytest.mark.parametrize("feature", ANY)
@pytest.mark.parametrize("page", PAGES)
def test_query_rows_are_the_whole(page, feature):
    for seed in range(8):
        problem = Draw(seed, page, has={feature, "rows"}, never=UNSUITED).problem()
        check_equal(problem, problem.lowered(QueryRows()))


@pytest.mark.parametrize("page", PAGES)
def test_a_row_lists_exactly_what_its_query_sees(page):
    for seed in range(8):
        problem = Draw(seed, page, has={"window", "rows"}, never=UNSUITED).problem()
        (rows,) = QueryRows().lower(problem.segment, workspace(), CONTEXT)
        padded = rows.kv.req_pool_indices == 0
        counted = torch.where(padded, 0, rows.kv_len).tolist()
        assert counted == [len(slots) for slots in visible(problem)]


@pytest.mark.parametrize("feature", sorted(UNSUITED))
def test_what_is_not_one_span_is_refused(feature):
    problem = Draw(1, 4, has={"window"}, never=UNSUITED).problem()
    assert QueryRows().becomes(problem.request())
    assert QueryRows().becomes(problem.request(feature)) == ()


def test_nothing_is_copied():
    problem = Draw(2, 4, has={"window", "rows"}, never=UNSUITED).problem()
    (rows,) = QueryRows().lower(problem.segment, workspace(), CONTEXT)
    assert rows.kv.req_to_token is problem.segment.kv.req_to_token
    assert rows.kv.slot_map is problem.segment.kv.slot_map


def test_padding_tokens_without_a_row_see_nothing():
    check_padding_tokens(QueryRows())
