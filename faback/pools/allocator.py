"""Who owns which slots: allocation in whole pages, kept on the host.

Pages of a request are whole and aligned: token t sits at offset t % page_size of its page, always. Page 0 belongs to
padding and is never handed out. Lengths and slots that lie on the CPU cost no synchronisation; `last_slots` may stay
on the accelerator.
"""

from __future__ import annotations

from typing import Protocol

import attrs
import torch

from faback.core.errors import PoolError
from faback.pools.checks import (
    Index,
    at_least,
    check_count,
    check_distinct,
    check_length,
    check_num_slots,
    host_index,
    index_tensor,
    real_device,
    send,
)

Tensor = torch.Tensor


@attrs.frozen(eq=False)
class Branches:
    """Private slots of draft branches; row i * topk + b is branch b of request i.

    `free(slots)` gives all of their pages back.

    Attributes:
        slots: int64 [requests * topk, num_steps], slot of each draft token.
        copy_src: int64 [copies], committed slots of the requests' partial last pages.
        copy_dst: int64 [copies], where each branch wants its own copy of them.
    """

    slots: Tensor
    copy_src: Tensor
    copy_dst: Tensor


class SlotAllocator(Protocol):
    """What all allocators offer; a failing call raises a `PoolError` and changes nothing."""

    @property
    def page_size(self) -> int: ...

    @property
    def num_slots(self) -> int: ...

    @property
    def available_tokens(self) -> int: ...

    @property
    def used_tokens(self) -> int: ...

    def alloc_extend(self, prefix_lens: Index, seq_lens: Index, last_slots: Index | None = None) -> Tensor: ...

    def alloc_decode(self, seq_lens: Index, last_slots: Index | None = None) -> Tensor: ...

    def alloc_branches(self, seq_lens: Index, last_slots: Index | None, topk: int, num_steps: int) -> Branches: ...

    def alloc_pages(self, n: int) -> Tensor: ...

    def free(self, slots: Index) -> None: ...

    def clear(self) -> None: ...

    def check(self) -> None: ...


@attrs.define(eq=False)
class PageAllocator:
    """Owns the slots of a pool, a page at a time.

    Attributes:
        num_pages: pages of the pool, the padding page 0 included.
        page_size: tokens per page.
        device: where returned slots live.
        checks: also look at `last_slots` that lie on an accelerator, at the price of a synchronisation.
    """

    num_pages: int = attrs.field(validator=at_least(2, "Page 0 is reserved for padding."))
    page_size: int = attrs.field(validator=at_least(1))
    device: torch.device = attrs.field(default=torch.device("cpu"), converter=real_device)
    checks: bool = False
    _used: Tensor = attrs.field(init=False, repr=False)  # bool [num_pages]
    _stack: Tensor = attrs.field(init=False, repr=False)  # int64 [num_pages - 1]; the first _top are free
    _top: int = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        check_num_slots(type(self).__name__, self.num_pages, self.page_size)
        self.clear()

    @property
    def num_slots(self) -> int:
        """Slots of the pool, the padding page's included."""
        return self.num_pages * self.page_size

    @property
    def available_pages(self) -> int:
        """Pages that can be taken now."""
        return self._top

    @property
    def used_pages(self) -> int:
        """Pages in use, the padding page not among them."""
        return self.num_pages - 1 - self._top

    @property
    def available_tokens(self) -> int:
        """Slots of the pages that can be taken now."""
        return self.available_pages * self.page_size

    @property
    def used_tokens(self) -> int:
        """Slots of the pages in use, filled or not."""
        return self.used_pages * self.page_size

    def alloc_extend(self, prefix_lens: Index, seq_lens: Index, last_slots: Index | None = None) -> Tensor:
        """Slots for tokens prefix_lens[i] ... seq_lens[i] - 1 of each request, one request after another.

        The rest of a request's partly filled last page is used first, then whole new pages.

        Args:
            prefix_lens: [bs] tokens that have slots already.
            seq_lens: [bs] tokens with the new ones; zero new tokens are legal.
            last_slots: [bs] slot of token prefix_lens[i] - 1; entries of requests whose prefix ends on a page
                boundary (or is empty) are not looked at, and None will do where all do.

        Returns:
            int64 [sum of new tokens] on `device`.

        Raises:
            PoolError: not enough free pages; lengths that shrink or contradict each other; a last slot that is not
                at its token's offset, is in a page that is not allocated, or in one that another request grows.
        """
        prefix, seq = host_index("prefix_lens", prefix_lens), host_index("seq_lens", seq_lens)
        check_length("seq_lens", seq, prefix.shape[0])
        if bool(((prefix < 0) | (seq < prefix)).any()):
            row = int(((prefix < 0) | (seq < prefix)).nonzero()[0])
            got = f"prefix {int(prefix[row])}, length {int(seq[row])}"
            raise PoolError(f"request {row}", wanted="0 <= prefix_lens <= seq_lens", got=got)
        growing = (seq > prefix) & (prefix % self.page_size != 0)
        last = self._last_slots(last_slots, prefix, growing)
        self._check_unshared(last, growing)
        slots, pages = self._extend(prefix, seq, last)
        self._take(pages)
        return slots

    def alloc_decode(self, seq_lens: Index, last_slots: Index | None = None) -> Tensor:
        """Slots for one new token per request: token seq_lens[i] - 1.

        Args:
            seq_lens: [bs] tokens with the new one, at least 1, as in a decode batch.
            last_slots: [bs] slot of token seq_lens[i] - 2, as in `alloc_extend`.

        Returns:
            int64 [bs] on `device`.

        Raises:
            PoolError: as `alloc_extend`.
        """
        prefix = host_index("seq_lens", seq_lens) - 1
        if bool((prefix < 0).any()):
            raise PoolError("seq_lens", wanted="values >= 1, the new token included", got=int(prefix.min()) + 1)
        growing = prefix % self.page_size != 0
        last = self._last_slots(last_slots, prefix, growing)
        self._check_unshared(last, growing)
        pages = self._choose(int((~growing).sum()))
        base = torch.ones_like(prefix)
        base[~growing] = pages * self.page_size
        packed = send(torch.stack((base, growing.to(torch.int64))), last.device)
        slots = send(packed[0] + last * packed[1], self.device)
        self._take(pages)
        return slots

    def alloc_branches(self, seq_lens: Index, last_slots: Index | None, topk: int, num_steps: int) -> Branches:
        """Private pages for topk draft branches per request, num_steps tokens each.

        A branch's first page begins with room for a copy of the request's partly filled last page, so that draft
        token s keeps the offset (seq_lens[i] + s) % page_size. Copy with `pool.copy_slots(copy_src, copy_dst)`.

        Args:
            seq_lens: [bs] committed tokens.
            last_slots: [bs] slot of token seq_lens[i] - 1, as in `alloc_extend`.
            topk: branches per request, at least 1.
            num_steps: draft tokens per branch, at least 1.

        Raises:
            PoolError: as `alloc_extend`.
        """
        check_count("topk", topk, 1)
        check_count("num_steps", num_steps, 1)
        seq = host_index("seq_lens", seq_lens)
        if bool((seq < 0).any()):
            raise PoolError("seq_lens", wanted="values >= 0", got=int(seq.min()))
        partial = seq % self.page_size
        last = self._last_slots(last_slots, seq, partial > 0)
        partial = partial.repeat_interleave(topk)
        slots, pages = self._extend(torch.zeros_like(partial), partial + num_steps, torch.zeros_like(partial))
        rows, offsets = ragged(partial + num_steps)
        copied = (offsets < partial[rows]).nonzero().view(-1)
        drafts = (offsets >= partial[rows]).nonzero().view(-1)
        packed = send(torch.stack((rows // topk, offsets - partial[rows] + 1))[:, copied], last.device)
        copy_src = send(last[packed[0]] + packed[1], self.device)
        draft_slots = slots[send(drafts, self.device)].view(-1, num_steps)
        branches = Branches(draft_slots, copy_src, slots[send(copied, self.device)])
        self._take(pages)
        return branches

    def alloc_pages(self, n: int) -> Tensor:
        """Takes n whole pages and returns their slots, int64 [n * page_size] on `device`.

        Raises:
            PoolError: fewer than n pages are free.
        """
        check_count("alloc_pages.n", n)
        pages = self._choose(n)
        slots = send((pages[:, None] * self.page_size + torch.arange(self.page_size)).view(-1), self.device)
        self._take(pages)
        return slots

    def free(self, slots: Index) -> None:
        """Gives back the pages that hold these slots, each page once however many of its slots are listed.

        Args:
            slots: integers, or an int32/int64 tensor of any shape, of tokens whose pages nobody else uses. A tensor
                on an accelerator costs a synchronisation.

        Raises:
            PoolError: a slot is not of this pool or of the padding page, is listed twice, or its page is free.
        """
        listed = self._own(slots)
        check_distinct("free.slots", listed)
        self._release(torch.unique(listed // self.page_size))

    def clear(self) -> None:
        """Frees every page."""
        self._used = torch.zeros(self.num_pages, dtype=torch.bool)
        self._stack = torch.arange(self.num_pages - 1, 0, -1)
        self._top = self.num_pages - 1

    def check(self) -> None:
        """Asserts the invariants: each page but 0 is either free or in use, once."""
        free = self._stack[: self._top]
        owned = torch.cat((free, self._used.nonzero().view(-1)))
        assert torch.equal(owned.sort().values, torch.arange(1, self.num_pages)), "a page is lost or owned twice"

    def _extend(self, prefix: Tensor, seq: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """Slots of the new tokens, on `device`, and the pages that are still to be taken for them."""
        size = self.page_size
        rows, steps = ragged(seq - prefix)
        have = -(-prefix // size)  # pages of each request before, then the new ones
        need = -(-seq // size) - have
        positions = prefix[rows] + steps
        grows = positions < have[rows] * size
        first = need.cumsum(0) - need
        chosen = torch.where(grows, 0, first[rows] + positions // size - have[rows] + 1)
        pages = self._choose(int(need.sum()))
        page_of = torch.cat((torch.zeros(1, dtype=torch.int64), pages))
        base = torch.where(grows, steps + 1, page_of[chosen] * size + positions % size)
        packed = send(torch.stack((base, rows, grows.to(torch.int64))), last.device)
        return send(packed[0] + last[packed[1]] * packed[2], self.device), pages

    def _last_slots(self, last_slots: Index | None, lens: Tensor, needed: Tensor) -> Tensor:
        """`last_slots` as a tensor [bs], looked at where needed: bool [bs] says so."""
        if last_slots is None:
            if bool(needed.any()):
                hint = "Give the slot of each request's last token: req_to_token[row, length - 1]."
                got = f"None, with request {int(needed.nonzero()[0])} in the middle of a page"
                raise PoolError("last_slots", wanted="one entry per request", got=got, hint=hint)
            return torch.zeros_like(lens)
        last = index_tensor("last_slots", last_slots)
        check_length("last_slots", last, lens.shape[0])
        if last.device.type != "cpu" and not self.checks:
            return last
        host = last.to("cpu", torch.int64)
        inside = (host >= 0) & (host < self.num_slots)  # page 0 is never in use
        pages = torch.where(inside, host // self.page_size, 0)
        fits = inside & (host % self.page_size == (lens - 1) % self.page_size) & self._growable(pages)
        if bool((needed & ~fits).any()):
            row = int((needed & ~fits).nonzero()[0])
            offset = int((lens[row] - 1) % self.page_size)
            wanted = f"a slot at offset {offset} of a page of {self.page_size} that is allocated"
            hint = "It is the slot of the request's last token; a hybrid pool must not have evicted it."
            raise PoolError(f"last_slots[{row}]", wanted=wanted, got=int(host[row]), hint=hint)
        return last

    def _check_unshared(self, last: Tensor, growing: Tensor) -> None:
        if last.device.type != "cpu" and not self.checks:
            return
        pages = last.cpu()[growing] // self.page_size
        if torch.unique(pages).numel() != pages.numel():
            hint = "Copy the partly filled page first: alloc_branches says what to copy."
            raise PoolError("last_slots", wanted="one request per growing page", got="a page listed twice", hint=hint)

    def _own(self, slots: Index) -> Tensor:
        """Slots as int64 [n] on the CPU, all of them in pages in use."""
        listed = host_index("slots", slots, flat=True)
        outside = (listed < self.page_size) | (listed >= self.num_slots)
        if bool(outside.any()):
            slot = int(listed[outside][0])
            wanted = f"slots {self.page_size} to {self.num_slots - 1} (page 0 is reserved for padding)"
            raise PoolError(f"{type(self).__name__} slot", wanted=wanted, got=slot)
        unowned = ~self._used[listed // self.page_size]
        if bool(unowned.any()):
            slot = int(listed[unowned][0])
            got = f"slot {slot} of the free page {slot // self.page_size} (a double free)"
            raise PoolError(f"{type(self).__name__} slot", wanted="slots of pages in use", got=got)
        return listed

    def _growable(self, pages: Tensor) -> Tensor:
        return self._used[pages]

    def _choose(self, n: int) -> Tensor:
        """The n free pages that come next, int64 [n] on the CPU, or a `PoolError`. They stay free."""
        if n > self._top:
            raise PoolError(
                type(self).__name__,
                wanted=f"{n} free pages of {self.page_size} tokens",
                got=f"{self._top} of {self.num_pages - 1}",
                hint="Free finished requests, admit fewer, or make the pool larger.",
            )
        return self._stack[self._top - n : self._top].flip(0)

    def _take(self, pages: Tensor) -> None:
        """Takes the pages that `_choose` gave. Comes last: whatever else an allocation does may run out of memory."""
        self._top -= pages.shape[0]
        self._used[pages] = True

    def _release(self, pages: Tensor) -> None:
        n = pages.shape[0]
        self._used[pages] = False
        self._stack[self._top : self._top + n] = pages
        self._top += n


class TokenAllocator(PageAllocator):
    """A `PageAllocator` whose pages are single tokens: any free slot will do, and `last_slots` is never needed.

    Args:
        num_slots: slots of the pool, the padding slot 0 included.
        device: where returned slots live.
    """

    def __init__(self, num_slots: int, device: torch.device | str = "cpu") -> None:
        super().__init__(num_slots, 1, device)

    def alloc(self, n: int) -> Tensor:
        """Takes n slots, int64 [n] on `device`.

        Raises:
            PoolError: fewer than n slots are free.
        """
        return self.alloc_pages(n)


def ragged(lens: Tensor) -> tuple[Tensor, Tensor]:
    """Row and index within its row of each entry of a ragged array: both int64 [sum of lens], for lens [rows]."""
    rows = torch.arange(lens.shape[0]).repeat_interleave(lens)
    return rows, torch.arange(rows.shape[0]) - (lens.cumsum(0) - lens)[rows]
