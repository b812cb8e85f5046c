"""Continuous batching: which tokens of which requests run in the next forward pass, and who gets pages for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import attrs

from faback import BatchError
from faback.pools import PageAllocator, ReqToTokenPool
from faback_transformers.requests import Request


@attrs.frozen(eq=False)
class Chunk:
    """Tokens start ... start + count - 1 of a request, in the next forward pass.

    Attributes:
        request: whose.
        start: tokens cached before.
        count: tokens to run, at least 1.
        samples: the last of them predicts a new token.
    """

    request: Request
    start: int
    count: int
    samples: bool

    @property
    def end(self) -> int:
        """Tokens cached afterwards."""
        return self.start + self.count


@attrs.define(eq=False)
class Scheduler:
    """First come, first served; a prompt runs in chunks beside the requests that already generate.

    A step has a token budget. Each generating request takes one token of it, prompts share the rest. A waiting request
    is admitted when the pages for its prompt are free and not promised to another. When a generating request needs a
    page and none is free, the request admitted last gives up its pages and waits at the front of the queue; its tokens
    are kept and run again. The oldest request thus always moves on, and nothing is lost.

    Attributes:
        rows: the request table.
        allocator: the pages.
        tokens_per_step: the budget.
        waiting: not admitted, the next one first.
        running: admitted, in order of admission.
        preemptions: how often a request had to give up its pages.
    """

    rows: ReqToTokenPool
    allocator: PageAllocator
    tokens_per_step: int
    waiting: deque[Request] = attrs.field(factory=deque)
    running: list[Request] = attrs.field(factory=list)
    preemptions: int = 0

    @property
    def busy(self) -> bool:
        """Whether any request lives."""
        return bool(self.waiting or self.running)

    @property
    def total_pages(self) -> int:
        """Pages that one request could have."""
        return self.allocator.available_pages + self.allocator.used_pages

    def submit(self, request: Request) -> None:
        """Puts a request in the queue.

        Raises:
            BatchError: it could never be served, even alone.
        """
        if request.prompt_len < 1 or request.max_new_tokens < 1:
            got = f"{request.prompt_len} and {request.max_new_tokens}"
            raise BatchError("request", wanted="a prompt and max_new_tokens of at least 1 token", got=got)
        if request.limit > self.rows.context_len:
            hint = "Ask for fewer tokens, or make the generator with a longer context_len."
            raise BatchError(
                "prompt + max_new_tokens", wanted=f"<= {self.rows.context_len}", got=request.limit, hint=hint
            )
        if self._pages(request.limit) > self.total_pages:
            hint = "Ask for fewer tokens, or make the generator with more num_pages."
            got = f"{self._pages(request.limit)} for {request.limit} tokens"
            raise BatchError("pages of one request", wanted=f"<= {self.total_pages}", got=got, hint=hint)
        self.waiting.append(request)

    def schedule(self) -> list[Chunk]:
        """The next step's chunks; rows are taken, pages not yet (`allocate`)."""
        chunks: list[Chunk] = []
        free = self.allocator.available_pages
        budget = self.tokens_per_step - sum(request.pending == 1 for request in self.running)
        for request in list(self.running):
            if request.row is None:
                continue
            generates = request.pending == 1
            count = 1 if generates else min(request.pending, budget)
            if count == 0:
                continue
            need = self._more(request, count)
            while need > free and request.row is not None:
                free += self._preempt()
            if request.row is not None:
                chunks.append(self._chunk(request, count))
                free -= need
                budget -= 0 if generates else count
        self._admit(chunks, free, budget)
        return chunks

    def allocate(self, chunks: list[Chunk]) -> list[int]:
        """Slots for all tokens of the chunks, in order; the requests count them as cached from now on."""
        prefix = [chunk.start for chunk in chunks]
        last = [chunk.request.slots[-1] if chunk.start else 0 for chunk in chunks]
        slots: list[int] = self.allocator.alloc_extend(prefix, [chunk.end for chunk in chunks], last).tolist()
        taken = 0
        for chunk in chunks:
            chunk.request.slots += slots[taken : taken + chunk.count]
            taken += chunk.count
        return slots

    def spare_pages(self, chunks: Sequence[Chunk]) -> int:
        """Pages that stay free when the chunks have theirs."""
        return self.allocator.available_pages - sum(self._more(chunk.request, chunk.count) for chunk in chunks)

    def widened(self, chunk: Chunk, more: int, spare_pages: int) -> tuple[Chunk, int]:
        """A chunk with more tokens at its end, and the pages that it leaves of those that are spare.

        Args:
            chunk: one of `schedule`.
            more: tokens wanted; there may be fewer where pages or the request's row end.
            spare_pages: what may be taken.
        """
        have = self._pages(chunk.end)
        end = min(chunk.end + more, (have + spare_pages) * self.allocator.page_size, self.rows.context_len)
        return attrs.evolve(chunk, count=end - chunk.start), spare_pages - (self._pages(end) - have)

    def shrink(self, request: Request, length: int) -> None:
        """Forgets cached tokens past a length, and gives back the pages that hold nothing else."""
        unused = request.slots[self._pages(length) * self.allocator.page_size :]
        del request.slots[length:]
        if unused:
            self.allocator.free(unused)

    def release(self, request: Request) -> None:
        """Takes a request out, wherever it is, and gives its row and pages back."""
        if request.row is None:
            self.waiting.remove(request)
            return
        self.running.remove(request)
        self._give_back(request)

    def _admit(self, chunks: list[Chunk], free: int, budget: int) -> None:
        scheduled = {id(chunk.request): chunk.count for chunk in chunks}
        for request in self.running:  # pages that admitted prompts will still want
            free -= self._pages(self._soon(request)) - self._pages(len(request.slots) + scheduled.get(id(request), 0))
        while self.waiting and budget > 0 and self.rows.available:
            request = self.waiting[0]
            need = self._pages(self._soon(request))
            if need > free:
                return
            self.waiting.popleft()
            (request.row,) = self.rows.alloc(1)
            self.running.append(request)
            chunk = self._chunk(request, min(request.pending, budget))
            chunks.append(chunk)
            budget -= chunk.count
            free -= need

    def _preempt(self) -> int:
        """Sends the request admitted last back to the queue; returns the pages that this frees."""
        request = self.running.pop()
        before = self.allocator.available_pages
        self._give_back(request)
        self.waiting.appendleft(request)
        self.preemptions += 1
        return self.allocator.available_pages - before

    def _give_back(self, request: Request) -> None:
        assert request.row is not None
        if request.slots:
            self.allocator.free(request.slots)
        self.rows.free([request.row])
        request.slots, request.row = [], None

    def _chunk(self, request: Request, count: int) -> Chunk:
        return Chunk(request, len(request.slots), count, samples=count == request.pending)

    def _soon(self, request: Request) -> int:
        """Tokens that a request should find room for when it is admitted: what it has, and the next one."""
        return min(len(request.tokens) + 1, request.limit)

    def _more(self, request: Request, count: int) -> int:
        """Pages that a request needs for its next tokens."""
        return self._pages(len(request.slots) + count) - self._pages(len(request.slots))

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.allocator.page_size)
