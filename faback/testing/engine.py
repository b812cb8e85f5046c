"""A simulated engine: who lies where. Rows, whole aligned pages in random order, and a KV pool of its own.

This is the only part of the kit that knows slots. It is independent of `faback.pools` on purpose.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import attrs
import torch

from faback.core.errors import ConfigError
from faback.core.layer import AttentionLayer, LayerKind
from faback.testing.visibility import Token

Tensor = torch.Tensor


class PlacementError(AssertionError):
    """The simulated engine ran out of pages: an error of the scenario and not of the backend."""


class Placement:
    """Where every token of a scenario lies, in slots of the full group.

    Args:
        page_size: tokens per page.
        pages: physical pages besides page 0, which belongs to padding.
        rng: decides which page comes next.

    Attributes:
        rows: slots of each request's row so far, by request number.
        home: slot of every token.
        copies: further slots that hold a copy of a token (partial pages of draft branches).
    """

    def __init__(self, page_size: int, pages: int, rng: random.Random) -> None:
        self.page_size = page_size
        self.num_slots = (pages + 1) * page_size
        self.rows: dict[int, list[int]] = {}
        self.home: dict[Token, int] = {}
        self.copies: list[tuple[Token, int]] = []
        self._free = list(range(1, pages + 1))
        rng.shuffle(self._free)
        self._row_pages: dict[int, list[int]] = {}

    def append(self, token: Token) -> int:
        """Gives a token the next column of its request's row; returns its slot."""
        row = self.rows.setdefault(token.request, [])
        pages = self._row_pages.setdefault(token.request, [])
        if len(row) % self.page_size == 0:
            pages.append(self._page())
        slot = pages[-1] * self.page_size + len(row) % self.page_size
        row.append(slot)
        self.home[token] = slot
        return slot

    def branch(self, prefix: list[Token], tokens: list[Token]) -> list[int]:
        """Private pages of a draft branch: copies of a partial page's tokens, then the drafted tokens.

        Returns:
            slots of `tokens`.
        """
        count = len(prefix) + len(tokens)
        pages = [self._page() for _ in range(-(-count // self.page_size))]
        slots = [page * self.page_size + offset for page in pages for offset in range(self.page_size)][:count]
        self.copies += zip(prefix, slots, strict=False)
        self.home.update(zip(tokens, slots[len(prefix) :], strict=True))
        return slots[len(prefix) :]

    def free_slots(self) -> list[int]:
        """Slots of pages that belong to nobody."""
        return [page * self.page_size + i for page in self._free for i in range(self.page_size)]

    def _page(self) -> int:
        if not self._free:
            raise PlacementError("no page left")
        return self._free.pop()


class WindowPlacement:
    """The smaller group of a hybrid pool: pages of its own for a set of full-group pages.

    Args:
        full_pages: pages of the full group that the window group holds.
        spare: pages besides, which belong to nobody.
        rng: decides their order.
    """

    def __init__(self, full_pages: list[int], page_size: int, spare: int, rng: random.Random) -> None:
        ids = list(range(1, len(full_pages) + spare + 1))
        rng.shuffle(ids)
        self._page_of = dict(zip(full_pages, ids, strict=False))
        self._page_size = page_size
        self.num_slots = (len(ids) + 1) * page_size

    def slot(self, full_slot: int) -> int:
        """The group's slot of a full-group slot, 0 where it holds none."""
        page, offset = divmod(full_slot, self._page_size)
        found = self._page_of.get(page, 0)
        return found * self._page_size + offset if found else 0

    def slot_map(self, num_slots: int, freed: frozenset[int]) -> list[int]:
        """[num_slots] full-group slot -> slot of this group; pages in `freed` (full-group pages) map to 0."""
        return [0 if slot // self._page_size in freed else self.slot(slot) for slot in range(num_slots)]


@attrs.frozen(eq=False)
class SimulatedPool:
    """KV storage of the simulated engine; a `faback.KVPool`.

    Attributes:
        page_size: tokens per page.
        num_slots: slots of the full group.
        storage: (k, v) by layer id, [slots of its group, kv_heads, dim] each.
        maps: group -> slot map.
        dtypes: group -> storage dtype.
    """

    page_size: int
    num_slots: int
    storage: Mapping[int, tuple[Tensor, Tensor]]
    maps: Mapping[str, Tensor]
    dtypes: Mapping[str, torch.dtype]

    def buffers(self, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
        """k [slots, kv_heads, dim] and v [slots, kv_heads, v_dim] of a layer."""
        return self.storage[layer.layer_id]

    def dtype(self, kind: LayerKind) -> torch.dtype:
        """Storage dtype of a kind of layers."""
        return self.dtypes[kind.kv_group]

    def slot_map(self, group: str) -> Tensor | None:
        """Translation from the full group, None for the full group itself."""
        if group == "full":
            return None
        if group not in self.maps:
            raise ConfigError("kv_group", wanted=f"full or one of {sorted(self.maps)}", got=repr(group))
        return self.maps[group]


def allocate(slots: int, layer: LayerKind, dtype: torch.dtype, *, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Uninitialised k [slots, kv_heads, dim] and v [slots, kv_heads, v_dim] of one layer.

    Interleaved, they are two views of one allocation, so that neither is contiguous. A latent layer's v is the leading
    part of its k.
    """
    heads, dim, v_dim = layer.num_kv_heads, layer.head_dim, layer.v_head_dim
    if layer.latent:
        k = torch.empty(slots, heads, dim, dtype=dtype)
        return k, k[..., :v_dim]
    if interleaved:
        both = torch.empty(slots, heads, dim + v_dim, dtype=dtype)
        return both[..., :dim], both[..., dim:]
    return torch.empty(slots, heads, dim, dtype=dtype), torch.empty(slots, heads, v_dim, dtype=dtype)
