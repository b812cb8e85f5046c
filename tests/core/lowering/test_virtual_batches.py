"""chunk -> virtual batches: a row cut at chunk borders."""

import random

import attrs
import pytest
import torch

from faback.core.lowering.virtual_batches import UNSUITED, VirtualBatches
from faback.core.segment import KVView, Segment, Visibility

from .problems import CONTEXT, PAGES, Draw, check_equal, visible, workspace

NEVER = UNSUITED | {"window_right", "row_window"}


def lowered(segment):
    (part,) = VirtualBatches().lower(segment, workspace(), CONTEXT)
    return part


def row(length, chunk, queries, *, max_seqlen_q=None):
    return rows([(length, queries)], chunk, max_seqlen_q)


def rows(pairs, chunk, max_seqlen_q=None, loose=0):
    lens, new = [n for n, _ in pairs], [n for _, n in pairs]
    return Segment(
        rows=len(pairs),
        tokens=sum(new) + loose,
        cu_seqlens_q=torch.tensor([0, *new]).cumsum(0).int(),
        max_seqlen_q=max([0, *new]) if max_seqlen_q is None else max_seqlen_q,
        kv_len=torch.tensor(lens, dtype=torch.int64),
        max_kv_len=max([0, *lens]),
        kv=KVView(torch.zeros(len(pairs) + 1, 1, dtype=torch.int32), torch.arange(1, len(pairs) + 1), 1),
        visibility=Visibility(chunk=chunk),
    )


@pytest.mark.parametrize("page", PAGES)
def test_virtual_batches_are_the_whole(page):
    for seed in range(20):
        never = NEVER | {"more queries than keys"}
        problem = Draw(seed, page, has={"chunk"}, never=never).problem()
        check_equal(problem, problem.lowered(VirtualBatches()))


def test_with_more_queries_than_keys_the_first_see_nothing():
    for seed in range(30):
        problem = Draw(seed, PAGES[seed % 4], has={"chunk", "more queries than keys"}, never=NEVER).problem()
        check_equal(problem, problem.attend(lowered(problem.segment), problem.sinks))


def test_pieces_of_one_row():
    part = lowered(row(11, 4, 9))
    assert part.cu_seqlens_q.tolist()[:4] == [0, 2, 6, 9]
    assert part.kv_len.tolist()[:3] == [4, 4, 3]
    assert part.kv.start.tolist()[:3] == [0, 4, 8]
    assert not part.cu_seqlens_q.diff()[3:].any() and not part.kv_len[3:].any()


def test_a_decode_row_is_one_piece():
    part = lowered(rows([(9, 1), (4, 1), (1, 1)], 4))
    assert (part.rows, part.kv_len.tolist(), part.kv.start.tolist()) == (3, [1, 4, 1], [8, 0, 0])


def test_the_number_of_pieces_is_never_exceeded():
    """Every query is in a piece, however lengths, chunks and borders fall, and no piece crosses a border."""
    rng = random.Random(1)
    for _ in range(1500):
        chunk = rng.choice([1, 2, 3, 4, 5, 7, 16, 1000])
        lens = [rng.randint(1, 40) for _ in range(rng.randint(0, 6))]
        pairs = [(n, rng.choice([0, 1, n, rng.randint(0, n)])) for n in lens]
        longest = max([0, *(new for _, new in pairs)])
        segment = rows(pairs, chunk, rng.choice([longest, longest + 3]), loose=rng.choice([0, 3]))
        part = lowered(segment)
        new = part.cu_seqlens_q.diff()
        assert int(part.cu_seqlens_q[-1]) == sum(count for _, count in pairs)
        assert int(new.min() if part.rows else 0) >= 0
        assert bool((part.kv_len <= chunk).all()) and int(new.max() if part.rows else 0) <= part.max_seqlen_q
        assert int(part.kv_len.max() if part.rows else 0) <= part.max_kv_len
        assert bool((new <= part.kv_len).all()) and bool((part.kv.start % chunk == 0).all())


def test_the_bound_is_reached():
    """A row of n queries may touch (n - 2) // chunk + 2 chunks: the host bound is no larger than it must be."""
    for chunk, queries in ((4, 2), (4, 6), (3, 5), (1, 4)):
        part = lowered(row(chunk * 9 + 1 + (queries - 2) % chunk, chunk, queries))
        live = int((part.cu_seqlens_q.diff() > 0).sum())
        assert live == part.rows, (chunk, queries)


def test_host_bounds_hold_where_one_row_has_more_queries_than_keys():
    """The surplus joins the row's first piece; that another row is long must not hide it."""
    part = lowered(rows([(2, 10), (100, 1)], 4))
    assert int(part.cu_seqlens_q.diff().max()) <= part.max_seqlen_q


@pytest.mark.parametrize("page", PAGES)
def test_nothing_outside_the_pieces_is_read(page):
    """Slots of other chunks hold NaN and pieces do not notice; pieces list them nowhere."""
    for seed in range(10):
        never = NEVER | {"more queries than keys", "window", "block_table"}
        problem = Draw(seed, page, has={"chunk", "rows"}, never=never).problem()
        part = lowered(problem.segment)
        wanted = {slot for slots in visible(problem) for slot in slots}
        unseen = sorted(set(range(problem.k.shape[0])) - wanted)
        k, v = problem.k.clone(), problem.v.clone()
        k[unseen], v[unseen] = torch.nan, torch.nan
        poisoned = attrs.evolve(problem, k=k, v=v)
        check_equal(problem, poisoned.attend(part, problem.sinks))
        view, table = part.kv, part.kv.req_to_token
        for index in range(part.rows):
            start, length = int(view.start[index]), int(part.kv_len[index])
            slots = table[int(view.req_pool_indices[index]), start : start + length].long()
            if view.slot_map is not None and int(view.req_pool_indices[index]):
                slots = view.slot_map[slots].long()
            if int(view.req_pool_indices[index]) and int(part.cu_seqlens_q.diff()[index]):
                assert set(slots.tolist()) <= wanted


def test_windows_row_by_row_are_refused_or_right():
    for seed in range(8):
        problem = Draw(seed, 4, has={"chunk", "row_window", "window", "rows"}, never=UNSUITED).problem()
        if VirtualBatches().becomes(problem.request()):
            check_equal(problem, problem.lowered(VirtualBatches()))


@pytest.mark.parametrize("feature", sorted(UNSUITED))
def test_what_cannot_be_cut_is_refused(feature):
    problem = Draw(1, 4, has={"chunk"}, never=NEVER).problem()
    assert VirtualBatches().becomes(problem.request())
    assert VirtualBatches().becomes(problem.request(feature)) == ()
