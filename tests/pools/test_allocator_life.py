"""Random lives of allocators against a model that knows every request's tokens by number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from faback.core.errors import PoolError
from faback.pools import HybridAllocator, PageAllocator, TokenAllocator

from .snapshots import snapshot

LIFE = settings(max_examples=60, stateful_step_count=25, deadline=None)


class AllocatorLife(RuleBasedStateMachine):
    """Requests come, grow, branch and go. The model: one list of slots per request."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[list[int]] = []
        self.pool: PageAllocator

    def make(self, num_pages: int, page_size: int) -> PageAllocator:
        return TokenAllocator(num_pages) if page_size == 1 else PageAllocator(num_pages, page_size)

    @initialize(num_pages=st.integers(2, 14), page_size=st.sampled_from([1, 2, 3, 4, 16]))
    def start(self, num_pages: int, page_size: int) -> None:
        self.pool = self.make(num_pages, page_size)
        self.size = page_size

    def pages(self, slots: list[int]) -> set[int]:
        return {slot // self.size for slot in slots}

    def new_pages(self, grown: list[tuple[int, int]]) -> int:
        return sum(-(-new // self.size) - -(-old // self.size) for old, new in grown)

    def granted(self, pages: int, call: Any) -> Any:
        """The call's result; where it asks for more pages than there are, it must raise and change nothing."""
        before = snapshot(self.pool)
        if pages > self.pool.available_pages:
            with pytest.raises(PoolError):
                call()
            assert snapshot(self.pool) == before
            return None
        result = call()
        assert self.pool.available_pages == before_pages(before) - pages
        return result

    def index(self, values: list[int], form: Any) -> Any:
        return values if form is None else torch.tensor(values, dtype=form)

    def last(self, requests: list[list[int]]) -> list[int]:
        return [slots[-1] if slots else -7 for slots in requests]

    @rule(news=st.lists(st.integers(0, 20), max_size=3), form=st.sampled_from([None, torch.int32, torch.int64]))
    def admit(self, news: list[int], form: Any) -> None:
        args = self.index([0] * len(news), form), self.index(news, form)
        slots = self.granted(self.new_pages([(0, n) for n in news]), lambda: self.pool.alloc_extend(*args))
        if slots is not None:
            self.requests += [part.tolist() for part in slots.split(news)]

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), form=st.sampled_from([None, torch.int32, torch.int64]))
    def extend(self, data: st.DataObject, form: Any) -> None:
        chosen = self.choose(data)
        news = [data.draw(st.integers(0, 9)) for _ in chosen]
        old = [len(request) for request in chosen]
        new = [a + b for a, b in zip(old, news, strict=True)]
        args = self.index(old, form), self.index(new, form), self.index(self.last(chosen), form)
        pages = self.new_pages(list(zip(old, new, strict=True)))
        slots = self.granted(pages, lambda: self.pool.alloc_extend(*args))
        if slots is not None:
            for request, part in zip(chosen, slots.split(news), strict=True):
                request += part.tolist()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        chosen = self.choose(data)
        lens = [len(request) + 1 for request in chosen]
        pages = self.new_pages([(n - 1, n) for n in lens])
        slots = self.granted(pages, lambda: self.pool.alloc_decode(lens, self.last(chosen)))
        if slots is not None:
            for request, slot in zip(chosen, slots.tolist(), strict=True):
                request.append(slot)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), topk=st.integers(1, 3), steps=st.integers(1, 6), accepted=st.booleans())
    def fork(self, data: st.DataObject, topk: int, steps: int, accepted: bool) -> None:
        chosen = self.choose(data)
        lens = [len(request) for request in chosen]
        pages = topk * sum(-(-(n % self.size + steps) // self.size) for n in lens)
        fork = self.granted(pages, lambda: self.pool.alloc_branches(lens, self.last(chosen), topk, steps))
        if fork is None:
            return
        held = {page for request in self.requests for page in self.pages(request)}
        slots, copies = fork.slots.tolist(), list(zip(fork.copy_src.tolist(), fork.copy_dst.tolist(), strict=True))
        first = {row[0] // self.size: i // topk for i, row in enumerate(slots)}
        assert len({slot for row in slots for slot in row} | {dst for _, dst in copies}) == sum(
            topk * (n % self.size + steps) for n in lens
        )
        for i, row in enumerate(slots):
            assert len(row) == steps
            assert not self.pages(row) & held
            assert [slot % self.size for slot in row] == [(lens[i // topk] + s) % self.size for s in range(steps)]
        for src, dst in copies:
            committed = chosen[first[dst // self.size]]
            assert src in committed[len(committed) - len(committed) % self.size :]
            assert src % self.size == dst % self.size
        self.pool.free(fork.slots)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        gone = self.choose(data)
        slots = [slot for request in gone for slot in request]
        self.pool.free(torch.tensor(slots, dtype=torch.int64))
        if slots:
            before = snapshot(self.pool)
            with pytest.raises(PoolError):
                self.pool.free(slots[:1])
            assert snapshot(self.pool) == before
        self.requests = [request for request in self.requests if all(request is not other for other in gone)]

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), slot=st.integers(-20, 400))
    def free_wrongly(self, data: st.DataObject, slot: int) -> None:
        request = data.draw(st.sampled_from(self.requests))
        if slot // self.size not in {page for held in self.requests for page in self.pages(held)}:
            before = snapshot(self.pool)
            with pytest.raises(PoolError):
                self.pool.free([*request, slot])
            assert snapshot(self.pool) == before

    @rule()
    def clear(self) -> None:
        self.pool.clear()
        self.requests = []

    def choose(self, data: st.DataObject) -> list[list[int]]:
        picks = data.draw(st.lists(st.sampled_from(range(len(self.requests))), unique=True, max_size=4))
        return [self.requests[i] for i in picks]

    @invariant()
    def nothing_is_lost_or_owned_twice(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        slots = [slot for request in self.requests for slot in request]
        assert len(set(slots)) == len(slots), "a slot is owned twice"
        pages = [page for request in self.requests for page in self.pages(request)]
        assert len(set(pages)) == len(pages), "a page is owned twice"
        assert 0 not in pages
        assert all(slot % self.size == t % self.size for request in self.requests for t, slot in enumerate(request))
        assert all(
            request[t] == request[t - 1] + 1
            for request in self.requests
            for t in range(1, len(request))
            if t % self.size
        )
        assert self.pool.used_tokens == len(pages) * self.size
        self.totals()

    def totals(self) -> None:
        assert self.pool.used_tokens + self.pool.available_tokens == self.pool.num_slots - self.size


class HybridLife(AllocatorLife):
    """The same, with a smaller window side and eviction. The model adds: the tokens that still have window slots."""

    def make(self, num_pages: int, page_size: int) -> PageAllocator:
        return HybridAllocator(num_pages, page_size, num_window_pages=max(2, num_pages * 2 // 3))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        pool = self.hybrid
        request = data.draw(st.sampled_from(self.requests))
        before = {slot: self.window(slot) for held in self.requests for slot in held}
        end = data.draw(st.integers(0, len(request)))
        start = data.draw(st.integers(0, end // self.size)) * self.size
        listed = request[start:end]
        whole = {page for page in self.pages(listed) if sum(slot // self.size == page for slot in listed) == self.size}
        expected = {slot: 0 if slot // self.size in whole else window for slot, window in before.items()}
        freed = pool.evict(listed)
        assert {slot: self.window(slot) for held in self.requests for slot in held} == expected
        assert freed == sum(before[slot] != 0 for slot in listed if slot // self.size in whole)
        assert pool.evict(listed) == 0

    @property
    def hybrid(self) -> HybridAllocator:
        assert isinstance(self.pool, HybridAllocator)
        return self.pool

    def window(self, slot: int) -> int:
        return int(self.hybrid.full_to_window[slot])

    def totals(self) -> None:
        pool, size = self.hybrid, self.size
        windows = [self.window(slot) for request in self.requests for slot in request if self.window(slot)]
        assert len(set(windows)) == len(windows), "a window slot is owned twice"
        assert all(slot // size and slot < pool.num_window_pages * size for slot in windows)
        assert pool.used_window_tokens == len({slot // size for slot in windows}) * size
        assert pool.used_window_tokens + pool.available_window_tokens == (pool.num_window_pages - 1) * size
        assert pool.used_tokens + pool.available_full_tokens == (pool.num_pages - 1) * size
        assert pool.available_tokens == min(pool.available_full_tokens, pool.available_window_tokens)
        for request in self.requests:
            assert all(self.window(slot) % size == slot % size for slot in request if self.window(slot))


def before_pages(state: dict[str, Any]) -> int:
    """`available_pages` of a snapshot."""
    window = state.get("_window")
    return min(state["_top"], window["_top"]) if window else int(state["_top"])


TestAllocatorLife = AllocatorLife.TestCase
TestAllocatorLife.settings = LIFE
TestHybridLife = HybridLife.TestCase
TestHybridLife.settings = LIFE
