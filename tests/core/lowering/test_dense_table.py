"""start offset, slot map, keys of the batch, block table -> tables."""

import attrs
import pytest
import torch

from faback.core.lowering.dense_table import DenseTable
from faback.core.segment import KVView

from .problems import CONTEXT, PAGES, TAILS, Draw, check_equal, slot_of, workspace

KINDS = ("start", "slot_map", "raw_kv", "block_table")
UNSUITED = {"sharded", "tail_only"}
NEVER = UNSUITED | {"huge"}


@pytest.mark.parametrize("feature", KINDS)
@pytest.mark.parametrize("page", PAGES)
def test_dense_table_is_the_whole(page, feature):
    for seed in range(8):
        problem = Draw(seed, page, has={feature}, never=NEVER | {"raw_kv"} - {feature}).problem()
        check_equal(problem, problem.lowered(DenseTable()))


@pytest.mark.parametrize("tail", TAILS)
def test_dense_table_with_a_tail_is_the_whole(tail):
    for seed in range(16):
        has = {"tail", "behind", ("start", "slot_map", "block_table")[seed % 3]}
        problem = Draw(seed, PAGES[seed % 4], has=has, never=NEVER | {"raw_kv"}, tails=(tail,)).problem()
        check_equal(problem, problem.lowered(DenseTable()))


@pytest.mark.parametrize(
    "tail",
    [None, *TAILS],
)
def test_table_entries_that_no_token_owns_are_not_translated(tail):
    """2**30 is far outside the slot map; a row that is padding, or has no key yet, may hold it."""
    for seed in range(16):
        has = {"slot_map"} | ({"tail"} if tail else set())
        never = UNSUITED | {"raw_kv"} | (set() if tail else {"tail"})
        problem = Draw(seed, 4, has=has, never=never, tails=(tail,)).problem()
        check_equal(problem, problem.lowered(DenseTable()))


@pytest.mark.parametrize("page", PAGES)
def test_pages_stay_whole_under_a_slot_map(page):
    never = NEVER | {"start", "raw_kv", "tail", "block_table"}
    problem = Draw(4, page, has={"slot_map", "rows"}, never=never).problem()
    (part,) = DenseTable().lower(problem.segment, workspace(), CONTEXT)
    assert part.kv.page_size == page
    for row, length in enumerate(part.kv_len.tolist()):
        slots = part.kv.req_to_token[row, :length]
        assert slots.tolist() == [slot_of(problem.segment, row, t) for t in range(length)]
        assert all(slot % page == t % page for t, slot in enumerate(slots.tolist()))


@pytest.mark.parametrize("feature", sorted(UNSUITED))
def test_what_a_table_of_rows_cannot_say_is_refused(feature):
    problem = Draw(1, 4, has={"slot_map"}, never=NEVER | {"raw_kv"}).problem()
    assert DenseTable().becomes(problem.request())
    assert DenseTable().becomes(problem.request(feature)) == ()


def test_without_a_row_there_is_still_one_to_point_at():
    """Tokens of nobody become rows of their own where the next lowering comes."""
    segment = Draw(1, 4, has={"slot_map"}, never=NEVER | {"raw_kv"}).problem().segment
    nobody = attrs.evolve(segment, rows=0, cu_seqlens_q=segment.cu_seqlens_q[:1], kv_len=segment.kv_len[:0])
    nobody = attrs.evolve(
        nobody, kv=attrs.evolve(segment.kv, req_pool_indices=segment.kv.req_pool_indices[:0], start=None)
    )
    (lowered,) = DenseTable().lower(nobody, workspace(), CONTEXT)
    assert lowered.kv.req_to_token.shape[0] == 1 and not lowered.kv.req_to_token.any()


def test_pages_of_a_block_table_may_lie_apart():
    segment = Draw(1, 4, has={"rows"}, never=NEVER | {"raw_kv", "tail", "start"}).problem().segment
    blocks = KVView(torch.tensor([[9, 9, 9], [2, 5, 9]]), torch.tensor([1, 0]), 4, page_stride=10)
    two = attrs.evolve(
        segment,
        rows=2,
        cu_seqlens_q=segment.cu_seqlens_q[[0, 0, 0]],
        kv_len=torch.tensor([6, 3]),
        max_kv_len=7,
        kv=blocks,
    )
    (lowered,) = DenseTable().lower(two, workspace(), CONTEXT)
    assert lowered.kv.req_to_token.tolist() == [[20, 21, 22, 23, 50, 51, 0], [0] * 7]
    assert lowered.kv.page_size == 1 and lowered.kv.page_stride is None
    pages = workspace().page_table("pages", blocks, lowered.kv_len, 8)
    assert pages.tolist() == [[2, 5], [0, 0]]
