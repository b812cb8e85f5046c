from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from faback.core.errors import ConfigError, PoolError
from faback.pools import HybridAllocator, HybridPool

from .snapshots import snapshot
from .test_kv_pools import MIXED, hybrid, number


def allocator(num_pages: int = 9, num_window_pages: int = 5) -> HybridAllocator:
    return HybridAllocator(num_pages, 4, num_window_pages=num_window_pages)


def shuffled() -> HybridAllocator:
    """An allocator whose full and window pages have different numbers."""
    pool = allocator()
    held = pool.alloc_pages(3)
    pool.evict(held[4:8])
    pool.free(held[:4])
    return pool


def test_every_new_slot_has_a_window_slot_at_the_same_offset() -> None:
    pool = shuffled()
    slots = pool.alloc_extend([0], [6])
    windows = pool.full_to_window[slots]
    assert slots.tolist() != windows.tolist()
    assert bool((windows >= 4).all())
    assert torch.equal(windows % 4, slots % 4)
    assert torch.unique(windows).numel() == 6
    assert windows[1] - windows[0] == 1
    pool.check()


def test_the_padding_page_maps_to_padding() -> None:
    pool = allocator()
    pool.alloc_pages(4)
    assert pool.full_to_window[:4].tolist() == [0, 0, 0, 0]


def test_growth_in_a_partial_page_is_mapped_already() -> None:
    pool = shuffled()
    slots = pool.alloc_extend([0], [5])
    grown = pool.alloc_decode([6], slots[-1:])
    assert pool.full_to_window[grown] == pool.full_to_window[slots[-1]] + 1


def test_evict_frees_whole_pages_only_and_keeps_full_slots() -> None:
    pool = allocator()
    slots = pool.alloc_extend([0], [14])
    assert pool.evict(slots[:7]) == 4
    assert pool.full_to_window[slots].eq(0).tolist() == [True] * 4 + [False] * 10
    assert (pool.used_tokens, pool.used_window_tokens) == (16, 12)
    assert pool.evict(slots[:12].to(torch.int32).view(3, 4)) == 8
    assert pool.evict(slots[:12]) == 0
    assert pool.evict(slots[12:]) == 0, "a partly filled page stays: the request still grows in it"
    pool.check()


def test_a_slot_listed_twice_does_not_complete_a_page() -> None:
    pool = allocator()
    slots = pool.alloc_extend([0], [4])
    assert pool.evict(slots[[0, 1, 2, 2]]) == 0
    assert pool.evict(slots[[0, 1, 2, 3, 3]]) == 4


def test_free_frees_both_sides_evicted_or_not() -> None:
    pool = allocator()
    slots = pool.alloc_extend([0], [14])
    pool.evict(slots[:4])
    pool.free(slots)
    assert (pool.used_tokens, pool.used_window_tokens) == (0, 0)
    assert not pool.full_to_window.any()
    pool.check()


def test_eviction_lets_a_request_outgrow_the_window_pool() -> None:
    pool = allocator()
    window, length = 5, 0
    slots = torch.empty(0, dtype=torch.int64)
    while length < 32:
        new = pool.alloc_extend([length], [length + 4], slots[-1:] if length else None)
        slots, length = torch.cat((slots, new)), length + 4
        pool.evict(slots[: max(0, length - window)])
        assert bool((pool.full_to_window[slots[max(0, length - window) :]] > 0).all())
    assert pool.used_tokens == 32
    assert pool.used_window_tokens <= 8
    assert pool.available_tokens == 0


FAILING: dict[str, Callable[[HybridAllocator], object]] = {
    "window side exhausted": lambda pool: pool.alloc_pages(3),
    "window side exhausted by extend": lambda pool: pool.alloc_extend([6, 0], [9, 8], [9, 0]),
    "evict of padding": lambda pool: pool.evict([4, 5, 6, 7, 0]),
    "evict of a foreign slot": lambda pool: pool.evict([4, 5, 6, 7, 36]),
    "evict of a negative slot": lambda pool: pool.evict([4, 5, 6, 7, -1]),
    "evict of a free slot": lambda pool: pool.evict([4, 5, 6, 7, 35]),
    "double free": lambda pool: pool.free([4, 35]),
    "free of padding": lambda pool: pool.free([4, 3]),
}


@pytest.mark.parametrize("call", FAILING.values(), ids=list(FAILING))
def test_a_failing_call_changes_nothing(call: Callable[[HybridAllocator], object]) -> None:
    pool = allocator()
    pool.alloc_extend([0], [6])
    before = snapshot(pool)
    with pytest.raises(PoolError):
        call(pool)
    assert snapshot(pool) == before
    pool.check()


def test_exhaustion_of_the_full_side_changes_neither() -> None:
    pool = allocator(num_pages=4, num_window_pages=6)
    pool.alloc_pages(2)
    before = snapshot(pool)
    with pytest.raises(PoolError, match=r"HybridAllocator: wanted 2 free pages"):
        pool.alloc_pages(2)
    assert snapshot(pool) == before
    assert pool.available_tokens == pool.available_full_tokens == 4
    assert pool.available_window_tokens == 12


def test_growth_into_an_evicted_page_is_refused() -> None:
    pool = allocator()
    slots = pool.alloc_pages(1)
    pool.evict(slots)
    before = snapshot(pool)
    with pytest.raises(PoolError, match=r"last_slots\[0\].*must not have evicted it"):
        pool.alloc_decode([4], slots[2:3])
    assert snapshot(pool) == before


def test_the_map_stays_the_same_tensor() -> None:
    pool = hybrid()
    address = pool.slot_map("window").data_ptr()  # type: ignore[union-attr]
    slots = pool.allocator.alloc_pages(3)
    pool.allocator.evict(slots[:4])
    pool.allocator.free(slots)
    pool.allocator.clear()
    assert pool.slot_map("window") is pool.allocator.full_to_window
    assert pool.allocator.full_to_window.data_ptr() == address


def test_check_notices_a_stale_map() -> None:
    pool = allocator()
    pool.alloc_pages(1)
    pool.full_to_window[4] = 5
    with pytest.raises(AssertionError, match="full_to_window"):
        pool.check()


def test_branch_copies_reach_both_groups() -> None:
    pool = hybrid()
    pool.allocator.evict(pool.allocator.alloc_pages(1))
    slots = pool.allocator.alloc_extend([0], [6])
    number(pool)
    before = {item.layer_id: pool.buffers(item)[0].clone() for item in MIXED}
    branches = pool.allocator.alloc_branches([6], slots[-1:], topk=1, num_steps=2)
    pool.copy_slots(branches.copy_src, branches.copy_dst)
    window = pool.slot_map("window")
    assert window is not None
    assert branches.copy_src.tolist() == slots[4:].tolist()
    assert not (window[branches.copy_dst] == branches.copy_dst).any()
    for item, translate in ((MIXED[0], torch.arange(36)), (MIXED[1], window)):
        for buffer, sign in zip(pool.buffers(item), (1, -1), strict=True):
            moved = buffer[translate[branches.copy_dst], 0, 0]
            assert torch.equal(moved, sign * translate[branches.copy_src].float())
        expected = before[item.layer_id]
        expected[translate[branches.copy_dst]] = expected[translate[branches.copy_src]].clone()
        assert torch.equal(pool.buffers(item)[0], expected)


def test_a_rank_may_hold_layers_of_one_group_only() -> None:
    for item in MIXED:
        pool = hybrid(layers=[item])
        assert pool.buffers(item)[0].shape[0] == (20 if item.kv_group == "window" else 36)
        pool.copy_slots(pool.allocator.alloc_pages(1), pool.allocator.alloc_pages(1))


def test_sizes_are_checked() -> None:
    with pytest.raises(ConfigError, match="num_window_pages"):
        allocator(num_window_pages=1)
    with pytest.raises(ConfigError, match=r"HybridAllocator\.num_pages"):
        allocator(num_pages=1)
    with pytest.raises(ConfigError, match=r"HybridPool\.dtype"):
        HybridPool(num_pages=4, num_window_pages=4, layers=MIXED, dtype=torch.int8)
