"""Two pools behind one slot number: every full page has a window page beside it, until it slides out of reach."""

from __future__ import annotations

import attrs
import torch

from faback.core.errors import PoolError
from faback.pools.allocator import PageAllocator
from faback.pools.checks import Index, at_least, send

Tensor = torch.Tensor


@attrs.define(eq=False)
class HybridAllocator(PageAllocator):
    """A `PageAllocator` of full slots that keeps a smaller pool of window slots in step.

    Taking a full page takes a window page as well, and offsets within a page agree, so that pages are whole and
    aligned on both sides. Freeing a full page frees its window page; `evict` frees window pages alone. A call that
    either side cannot grant raises a `PoolError` and changes neither.

    Attributes:
        num_window_pages: pages of the window pool, its padding page 0 included.
        full_to_window: int64 [num_slots] on `device`, window slot of each full slot; 0 where there is none. Changed
            in place, never replaced.
    """

    num_window_pages: int = attrs.field(kw_only=True, validator=at_least(2, "Page 0 is reserved for padding."))
    full_to_window: Tensor = attrs.field(init=False, repr=False)
    _window: PageAllocator = attrs.field(init=False, repr=False)
    _window_page: Tensor = attrs.field(init=False, repr=False)  # int64 [num_pages] on the CPU, 0 for none

    def __attrs_post_init__(self) -> None:
        self._window = PageAllocator(self.num_window_pages, self.page_size)
        self._window_page = torch.zeros(self.num_pages, dtype=torch.int64)
        self.full_to_window = torch.zeros(self.num_pages * self.page_size, dtype=torch.int64, device=self.device)
        super().__attrs_post_init__()

    @property
    def available_pages(self) -> int:
        """Pages that can be taken now: those free on both sides."""
        return min(self._top, self._window.available_pages)

    @property
    def available_full_tokens(self) -> int:
        """Free slots of the full pool."""
        return self._top * self.page_size

    @property
    def available_window_tokens(self) -> int:
        """Free slots of the window pool."""
        return self._window.available_tokens

    @property
    def used_window_tokens(self) -> int:
        """Slots of the window pages in use."""
        return self._window.used_tokens

    def evict(self, slots: Index) -> int:
        """Frees the window pages of tokens that no query can reach any more; their full slots stay.

        With a window of W, token t is out of reach when t < p - W for the position p of the next query. Only pages
        of which every slot is listed are freed, so list a request's tokens from a page boundary on; what was evicted
        before may be listed again.

        Args:
            slots: integers, or an int32/int64 tensor of any shape: full slots in use. A tensor on an accelerator
                costs a synchronisation.

        Returns:
            The number of window slots that came free.

        Raises:
            PoolError: a slot is not of this pool or of the padding page, or its page is free.
        """
        tokens = torch.unique(self._own(slots))
        pages, listed = torch.unique(tokens // self.page_size, return_counts=True)
        whole = pages[(listed == self.page_size) & (self._window_page[pages] > 0)]
        self._unmap(whole)
        return int(whole.numel()) * self.page_size

    def clear(self) -> None:
        """Frees every page on both sides."""
        super().clear()
        self._window.clear()
        self._window_page.zero_()
        self.full_to_window.zero_()

    def check(self) -> None:
        """Asserts the invariants of both sides, and that the map says of each used page what the host knows."""
        super().check()
        self._window.check()
        mapped = self._window_page.nonzero().view(-1)
        assert bool(self._used[mapped].all()), "a free page has a window page"
        windows = self._window_page[mapped].sort().values
        assert torch.equal(windows, self._window._used.nonzero().view(-1)), "a window page is lost or mapped twice"
        slots = self._window_page[:, None] * self.page_size + torch.arange(self.page_size)
        expected = torch.where(self._window_page[:, None] > 0, slots, 0).view(-1)
        assert torch.equal(self.full_to_window.cpu(), expected), "full_to_window differs from the page map"

    def _growable(self, pages: Tensor) -> Tensor:
        return super()._growable(pages) & (self._window_page[pages] > 0)

    def _choose(self, n: int) -> Tensor:
        if n > self._window.available_pages:
            raise PoolError(
                "HybridAllocator window pool",
                wanted=f"{n} free pages of {self.page_size} tokens",
                got=f"{self._window.available_pages} of {self.num_window_pages - 1}",
                hint="Evict tokens that slid out of the window, prefill in smaller chunks, or make this pool larger.",
            )
        return super()._choose(n)

    def _take(self, pages: Tensor) -> None:
        windows = self._window._choose(pages.shape[0])
        slots = windows[:, None] * self.page_size + torch.arange(self.page_size)
        self._map_pages()[send(pages, self.device)] = send(slots, self.device)
        super()._take(pages)
        self._window._take(windows)
        self._window_page[pages] = windows

    def _release(self, pages: Tensor) -> None:
        self._unmap(pages[self._window_page[pages] > 0])
        super()._release(pages)

    def _unmap(self, pages: Tensor) -> None:
        windows = self._window_page[pages]
        self._map_pages()[send(pages, self.device)] = 0
        self._window._release(windows)
        self._window_page[pages] = 0

    def _map_pages(self) -> Tensor:
        return self.full_to_window.view(self.num_pages, self.page_size)
