from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from faback.core.errors import ConfigError, PoolError
from faback.pools import PageAllocator, TokenAllocator

from .snapshots import snapshot


def allocator(page_size: int = 4, num_pages: int = 8) -> PageAllocator:
    return PageAllocator(num_pages, page_size)


def test_a_new_request_gets_whole_aligned_pages_in_order() -> None:
    slots = allocator().alloc_extend([0, 0], [6, 3])
    assert slots.dtype == torch.int64
    assert slots.tolist() == [4, 5, 6, 7, 8, 9, 12, 13, 14]


def test_extend_fills_the_partial_page_before_taking_new_ones() -> None:
    pool = allocator()
    pool.alloc_extend([0, 0], [6, 3])
    slots = pool.alloc_extend([6, 3], [11, 4], [9, 14])
    assert slots.tolist() == [10, 11, 16, 17, 18, 15]
    assert pool.used_pages == 4


def test_extend_within_the_partial_page_takes_no_page() -> None:
    pool = PageAllocator(3, 4)
    pool.alloc_extend([0, 0], [1, 1])
    assert pool.available_pages == 0
    assert pool.alloc_extend([1, 1], [4, 3], [4, 8]).tolist() == [5, 6, 7, 9, 10]


def test_zero_new_tokens_and_zero_requests_are_legal() -> None:
    pool = allocator()
    before = snapshot(pool)
    assert pool.alloc_extend([3, 0], [3, 0], [-5, -5]).shape == (0,)
    assert pool.alloc_extend([], []).shape == (0,)
    assert pool.alloc_decode([]).shape == (0,)
    assert pool.alloc_pages(0).shape == (0,)
    pool.free([])
    assert snapshot(pool) == before


def test_last_slots_are_needed_only_in_the_middle_of_a_page() -> None:
    pool = allocator()
    pool.alloc_extend([0, 0], [4, 3])
    assert pool.alloc_extend([4], [5]).tolist() == [12]
    assert pool.alloc_extend([4, 3], [5, 4], [-99, 10]).tolist() == [16, 11]
    with pytest.raises(PoolError, match=r"last_slots: wanted one entry per request, got None, with request 1"):
        pool.alloc_extend([4, 3], [5, 4])


def test_decode_grows_by_the_token_that_seq_lens_counts() -> None:
    pool = allocator()
    pool.alloc_extend([0, 0], [4, 6])
    assert pool.alloc_decode([5, 7], [7, 13]).tolist() == [16, 14]
    with pytest.raises(PoolError, match="the new token included"):
        pool.alloc_decode([0], [7])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_index_dtypes_agree_and_inputs_stay_as_they_were(dtype: torch.dtype) -> None:
    plain, typed = allocator(), allocator()
    plain.alloc_extend([0, 0], [6, 3])
    typed.alloc_extend([0, 0], [6, 3])
    inputs = [torch.tensor(values, dtype=dtype) for values in ([6, 3], [11, 4], [9, 14])]
    copies = [value.clone() for value in inputs]
    slots = typed.alloc_extend(*inputs)
    assert slots.dtype == torch.int64
    assert torch.equal(slots, plain.alloc_extend([6, 3], [11, 4], [9, 14]))
    branches = typed.alloc_branches(torch.tensor([11, 4], dtype=dtype), torch.tensor([18, 15], dtype=dtype), 1, 2)
    assert all(value.dtype == torch.int64 for value in (branches.slots, branches.copy_src, branches.copy_dst))
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))


@pytest.mark.parametrize("bad", [torch.tensor([3.0]), torch.tensor([3], dtype=torch.int16), [3.5], [True], [2**70]])
def test_other_index_dtypes_raise(bad: Any) -> None:
    pool = allocator()
    with pytest.raises(PoolError, match="int32 or int64"):
        pool.alloc_extend([0], bad)
    with pytest.raises(PoolError, match="int32 or int64"):
        pool.free(bad)


FAILING: dict[str, Callable[[PageAllocator], object]] = {
    "exhausted by extend": lambda pool: pool.alloc_extend([6, 0], [8, 17], [9, 0]),
    "exhausted by decode": lambda pool: pool.alloc_decode([5] * 5, [0] * 5),
    "exhausted by branches": lambda pool: pool.alloc_branches([6, 3], [9, 14], 3, 1),
    "exhausted by pages": lambda pool: pool.alloc_pages(5),
    "negative pages": lambda pool: pool.alloc_pages(-1),
    "shrinking": lambda pool: pool.alloc_extend([0, 3], [1, 2], [0, 14]),
    "negative prefix": lambda pool: pool.alloc_extend([-1], [2], [0]),
    "lengths differ": lambda pool: pool.alloc_extend([0], [1, 1]),
    "too few last slots": lambda pool: pool.alloc_extend([6, 3], [7, 4], [9]),
    "two dimensions": lambda pool: pool.alloc_extend(torch.zeros((1, 1), dtype=torch.int32), [1]),
    "last slot at a wrong offset": lambda pool: pool.alloc_extend([6], [7], [8]),
    "last slot in the padding page": lambda pool: pool.alloc_extend([6], [7], [1]),
    "last slot below the pool": lambda pool: pool.alloc_extend([6], [7], [-3]),
    "last slot past the pool": lambda pool: pool.alloc_extend([6], [7], [33]),
    "last slot in a free page": lambda pool: pool.alloc_extend([6], [7], [29]),
    "two requests grow in one page": lambda pool: pool.alloc_extend([6, 6], [7, 7], [9, 9]),
    "branch of a foreign slot": lambda pool: pool.alloc_branches([6], [29], 1, 1),
    "branch of negative length": lambda pool: pool.alloc_branches([-2], [9], 1, 1),
    "branch without last slot": lambda pool: pool.alloc_branches([6], None, 1, 1),
    "no branches": lambda pool: pool.alloc_branches([6], [9], 0, 1),
    "no steps": lambda pool: pool.alloc_branches([6], [9], 1, 0),
    "double free": lambda pool: pool.free([4, 28]),
    "slot listed twice": lambda pool: pool.free([4, 5, 4]),
    "free of padding": lambda pool: pool.free([4, 3]),
    "free below the pool": lambda pool: pool.free([4, -1]),
    "free past the pool": lambda pool: pool.free([4, 32]),
}


@pytest.mark.parametrize("call", FAILING.values(), ids=list(FAILING))
def test_a_failing_call_changes_nothing(call: Callable[[PageAllocator], object]) -> None:
    pool = allocator()
    pool.alloc_extend([0, 0], [6, 3])
    before = snapshot(pool)
    with pytest.raises(PoolError):
        call(pool)
    assert snapshot(pool) == before
    pool.check()


def test_the_largest_call_that_fits_is_granted() -> None:
    pool = allocator()
    pool.alloc_extend([0, 0], [6, 3])
    assert pool.available_tokens == 16
    pool.alloc_extend([6, 0], [8, 16], [9, 0])
    assert (pool.available_tokens, pool.used_tokens) == (0, 28)


def test_free_of_any_slot_frees_its_page_once() -> None:
    pool = allocator()
    slots = pool.alloc_extend([0], [9])
    pool.free(slots[[0, 2, 5]])
    assert (pool.used_pages, pool.available_pages) == (1, 6)
    with pytest.raises(PoolError, match="double free"):
        pool.free(slots[[1]])
    with pytest.raises(PoolError, match=r"slots 4 to 31 \(page 0 is reserved for padding\), got 3"):
        pool.free([3])
    pool.free(slots[8:].view(1, 1))
    assert pool.used_tokens == 0
    pool.check()


def test_errors_name_what_was_wanted_and_what_came() -> None:
    pool = allocator()
    with pytest.raises(PoolError) as caught:
        pool.alloc_pages(9)
    assert caught.value.wanted == "9 free pages of 4 tokens"
    assert caught.value.got == "7 of 7"
    assert caught.value.hint


def test_clear_frees_everything() -> None:
    pool = allocator()
    fresh = snapshot(pool)
    pool.alloc_pages(5)
    pool.clear()
    assert snapshot(pool) == fresh


def test_branches_keep_offsets_and_copy_the_partial_page() -> None:
    pool = PageAllocator(16, 4)
    pool.alloc_extend([0, 0], [6, 4])  # pages 1 2 | 3
    branches = pool.alloc_branches([6, 4], [9, 15], topk=2, num_steps=3)
    assert branches.slots.tolist() == [[18, 19, 20], [26, 27, 28], [32, 33, 34], [36, 37, 38]]
    assert branches.copy_src.tolist() == [8, 9, 8, 9]
    assert branches.copy_dst.tolist() == [16, 17, 24, 25]
    assert pool.used_pages == 9
    pool.free(branches.slots)
    assert pool.used_pages == 3


def test_branches_of_nothing() -> None:
    pool = PageAllocator(16, 4)
    empty = pool.alloc_branches([], None, topk=2, num_steps=3)
    assert empty.slots.shape == (0, 3)
    fresh = pool.alloc_branches([0], None, topk=2, num_steps=3)
    assert fresh.slots.tolist() == [[4, 5, 6], [8, 9, 10]]
    assert fresh.copy_src.shape == fresh.copy_dst.shape == (0,)


def test_branches_with_page_one_copy_nothing() -> None:
    pool = TokenAllocator(20)
    pool.alloc(5)
    branches = pool.alloc_branches([3, 2], None, topk=2, num_steps=3)
    assert torch.unique(branches.slots).numel() == 12
    assert branches.copy_src.numel() == 0


def test_token_allocator_hands_out_single_slots() -> None:
    pool = TokenAllocator(6)
    assert pool.alloc(2).tolist() == [1, 2]
    assert pool.alloc_extend([7], [8]).tolist() == [3]
    assert pool.alloc_decode([3], [-1]).tolist() == [4]
    before = snapshot(pool)
    with pytest.raises(PoolError):
        pool.alloc(2)
    assert snapshot(pool) == before
    pool.free([2])
    with pytest.raises(PoolError, match="double free"):
        pool.free([2])
    assert pool.alloc(2).tolist() == [2, 5]


def test_returned_slots_are_not_shared_with_the_allocator() -> None:
    pool = TokenAllocator(6)
    pool.alloc(5).fill_(77)
    pool.clear()
    kept = pool.alloc(5)
    pool.free(kept)
    kept.fill_(77)
    pool.check()


@pytest.mark.parametrize("sizes", [(1, 4), (0, 4), (4, 0), (4, True), (2**20, 2**11)])
def test_sizes_are_checked(sizes: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="PageAllocator"):
        PageAllocator(*sizes)
    with pytest.raises(ConfigError, match="TokenAllocator"):
        TokenAllocator(sizes[0] if sizes[0] < 2 else 0)


@pytest.mark.parametrize("fault", ["lost", "owned twice", "padding"])
def test_check_notices_a_broken_state(fault: str) -> None:
    pool = allocator()
    (page,) = torch.unique(pool.alloc_pages(1) // 4).tolist()
    pool.check()
    if fault == "lost":
        pool._used[page] = False
    elif fault == "owned twice":
        pool._stack[0] = page
    else:
        pool._stack[0] = 0
    with pytest.raises(AssertionError):
        pool.check()
