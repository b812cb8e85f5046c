"""sinks -> merge of a single part."""

import pytest

from faback.core.lowering.sink_merge import SinkMerge

from .problems import CONTEXT, PAGES, Draw, check_equal, workspace


@pytest.mark.parametrize("page", PAGES)
def test_sinks_at_the_merge_are_sinks(page):
    for seed in range(12):
        problem = Draw(seed + 500, page).problem()
        check_equal(problem, problem.lowered(SinkMerge()))


def test_the_segment_is_left_alone():
    segment = Draw(0, 4).problem().segment
    assert SinkMerge().lower(segment, workspace(), CONTEXT) == (segment,)


def test_lse_takes_the_place_of_sinks():
    request = Draw(0, 4).problem().request()
    (asked,) = SinkMerge().becomes(request)
    assert asked.features == request.features - {"sinks"} | {"lse"}
