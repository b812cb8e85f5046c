"""Random segments with their tensors, poisoned wherever nothing may be read, for any kernel on any device.

    case = make_case(7, rows=[(1, 300), (4, 17)], page=16, features={"window", "slot_map"})
    case.check(TritonAttention())

Expected results come from the reference kernel in float64, whose own tests know them from the definition.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import attrs
import torch

from faback import LayerKind
from faback.core.segment import KVView, Segment, Tail, Visibility
from faback.testing.layers import as_bits, quantised
from kernels.triton.cases import Case

Tensor = torch.Tensor
NOWHERE = 1 << 30
"""An entry of tables and maps that belongs to nobody."""
CALL_FEATURES = ("softcap", "sinks", "scales", "head_scales", "strided")
RULES = ("non_causal", "window", "window_right", "row_window", "chunk", "keep")
VIEWS = ("start", "slot_map", "shard", "dense", "raw", "blocks", "blocks_apart")
TAILS = ("tail", "tail_slots", "tree", "branches", "tail_positions")
ROWS = ("q_len", "positions", "padded_rows", "padded_tokens", "int64")


def make_case(
    seed: int,
    *,
    rows: Sequence[tuple[int, int]],
    page: int = 1,
    heads: tuple[int, int] = (2, 1),
    dims: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    latent: bool = False,
    features: Iterable[str] = (),
    window: int | None = None,
    chunk: int | None = None,
    device: torch.device | str = "cpu",
) -> Case:
    """A case.

    Args:
        seed: decides what is left open.
        rows: (queries, committed keys) of each row; a tail, where there is one, is as long as the row's queries.
        page: tokens per page.
        heads: of q, of k and v.
        dims: of k, of v.
        dtype, kv_dtype: of q and of the cache, `dtype` if None.
        latent: values are the leading part of the keys.
        features: from `CALL_FEATURES`, `RULES`, `VIEWS`, `TAILS` and `ROWS`.
        window, chunk: sizes, small ones drawn from the seed if None.
        device: of every tensor.
    """
    given = {key: value for key, value in locals().items() if key != "seed"}
    name = f"make_case({seed}, {', '.join(f'{key}={value!r}' for key, value in given.items())})"
    assert set(features) <= {*CALL_FEATURES, *RULES, *VIEWS, *TAILS, *ROWS}
    maker = _Maker(seed, list(rows), page, frozenset(features), torch.device(device))
    segment, live, slots = maker.segment(window, chunk)
    k_scale, v_scale = maker.scales(heads[1], latent)
    k, v = maker.caches(slots, live, heads[1], dims, kv_dtype or dtype, (k_scale, v_scale), latent)
    return Case(
        name=name,
        segment=segment.check("the test"),
        layer=LayerKind(
            num_q_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=dims[0],
            v_head_dim=dims[1],
            softcap=maker.pick.choice([0.7, 5.0]) if "softcap" in features else 0.0,
            sinks="sinks" in features,
            kv_scales=k_scale is not None,
            latent=latent,
        ),
        q=maker.queries_of(segment, heads[0], dims[0], dtype),
        k=k,
        v=v,
        sinks=maker.noise(heads[0]) * 3 if "sinks" in features else None,
        k_scale=k_scale,
        v_scale=v_scale,
        page=page,
    )


class _Maker:
    """Draws everything from one seed. `has` are the features."""

    def __init__(
        self, seed: int, rows: list[tuple[int, int]], page: int, has: frozenset[str], device: torch.device
    ) -> None:
        self.pick, self.page, self.has, self.device = random.Random(seed), page, has, device
        self._generator = torch.Generator(device).manual_seed(seed)
        self._order = torch.Generator().manual_seed(seed)
        self.padded = 2 if "padded_rows" in has and not {"raw", "dense"} & has else 0
        self.queries = [queries for queries, _ in rows] + [1] * self.padded
        self.kv_len = [keys for _, keys in rows] + [1] * self.padded
        self.live_rows = len(rows)
        self.tokens = sum(self.queries) + (3 if "padded_tokens" in has else 0)
        self.index_dtype = torch.int64 if "int64" in has else torch.int32
        self._free: Tensor = torch.zeros(0)
        self.page_stride = page + (5 if "blocks_apart" in has else 0)

    def noise(self, *shape: int) -> Tensor:
        """float32, normal."""
        return torch.randn(shape, generator=self._generator, device=self.device)

    def index(self, values: Sequence[int] | Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """An index tensor on the device."""
        return torch.as_tensor(values).to(self.device, dtype or self.index_dtype)

    def scales(self, kv_heads: int, latent: bool) -> tuple[Any, Any]:
        if "head_scales" in self.has:
            k, v = (2.0 ** torch.tensor([self.pick.randint(-2, 2) for _ in range(kv_heads)]).float() for _ in "kv")
            return k.to(self.device), (k if latent else v).to(self.device)
        return (0.5, 0.5 if latent else 2.0) if "scales" in self.has else (None, None)

    def segment(self, window: int | None, chunk: int | None) -> tuple[Segment, Tensor, int]:
        """The segment, the slots (of the layer's pool) that hold keys, and the number of slots."""
        has, tailed = self.has, bool(set(TAILS) & self.has)
        own_slots = {"tail_slots", "branches"} & has
        starts = [self.pick.randint(0, 9) if "start" in has else 0 for _ in self.kv_len]
        lens = [
            start + keys + (queries if tailed and not own_slots else 0)
            for start, keys, queries in zip(starts, self.kv_len, self.queries, strict=True)
        ][: self.live_rows]
        slots = self._pages(lens)
        view, tail = None, None
        if "raw" in has:
            used = [torch.arange(sum(self.kv_len))]
            slots = sum(self.kv_len)
        else:
            table, used = self._table(lens)
            rows = range(len(lens)) if "dense" in has else self.pick.sample(range(1, len(lens) + 2), len(lens))
            if "dense" not in has:
                shuffled = torch.full((len(lens) + 2, table.shape[1]), NOWHERE)
                shuffled[list(rows)] = table
                table = shuffled
            view = KVView(
                self.index(table),
                self.index([*rows, *[0] * self.padded]),
                self.page,
                start=self.index(starts) if "start" in has else None,
                dense="dense" in has,
                shard=self.pick.choice([(0, 2), (1, 2), (2, 3)]) if "shard" in has else None,
                page_stride=self.page_stride if {"blocks", "blocks_apart"} & has else None,
            )
        if tailed and view is not None:
            tail, more = self._tail()
            used += more
        live = torch.cat([*used, torch.zeros(0, dtype=torch.int64)])
        if view is not None and "slot_map" in has:
            target = torch.randperm(slots, generator=self._order)
            slot_map = torch.full((slots,), NOWHERE)
            slot_map[live] = live = target[live]
            view = attrs.evolve(view, slot_map=self.index(slot_map))
        return self._put_together(view, tail, self._rule(window, chunk)), live, slots

    def _put_together(self, view: KVView | None, tail: Tail | None, rule: Visibility) -> Segment:
        offsets = list(accumulate(self.queries, initial=0))
        starts = self.index(list(accumulate(self.kv_len, initial=0)), torch.int32) if view is None else None
        q_len = [self.pick.randint(0, n) for n in self.queries] if "q_len" in self.has and tail is None else None
        return Segment(
            rows=len(self.queries),
            tokens=self.tokens,
            cu_seqlens_q=self.index(offsets, torch.int32),
            max_seqlen_q=max([0, *self.queries]) + self.pick.choice([0, 3]),
            kv_len=self.index(self.kv_len),
            max_kv_len=max([0, *self.kv_len]) + self.pick.choice([0, 70]),
            kv=view,
            visibility=rule,
            tail=tail,
            positions=self._positions(view, tail),
            cu_seqlens_k=starts,
            q_len=None if q_len is None else self.index(q_len),
        )

    def _pages(self, lens: Sequence[int]) -> int:
        """Draws an order of pages, more than enough, page 0 not among them; returns the number of slots."""
        tails = sum(self.queries) * max([1, *self.queries]) if set(TAILS) & self.has else 0
        pages = 3 + sum(-(-n // self.page) for n in lens) + tails
        self._free = torch.randperm(pages, generator=self._order) + 1
        return pages * self.page_stride + self.page

    def _taken(self, count: int) -> Tensor:
        """int64 [count] slots, page by page."""
        pages = -(-count // self.page)
        mine, self._free = self._free[:pages], self._free[pages:]
        return (mine[:, None] * self.page_stride + torch.arange(self.page)).flatten()[:count]

    def _table(self, lens: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        used = [self._taken(n) for n in lens]
        table = torch.full((len(lens), max([0, *lens]) + 3), NOWHERE)
        for row, slots in enumerate(used):
            table[row, : len(slots)] = slots
        if {"blocks", "blocks_apart"} & self.has:
            pages = table[:, :: self.page]
            table = torch.where(pages == NOWHERE, NOWHERE, pages // self.page_stride)
        return table, used

    def _rule(self, window: int | None, chunk: int | None) -> Visibility:
        has, rows = self.has, len(self.queries)
        left = self.pick.randint(0, 6) if window is None else window
        return Visibility(
            causal="non_causal" not in has,
            window=(
                left if {"window", "row_window"} & has else None,
                self.pick.randint(0, 6) if "window_right" in has else None,
            ),
            chunk=(chunk or self.pick.choice([1, 3, 4, 7])) if "chunk" in has else None,
            keep=self.index([self.pick.randint(0, 12) for _ in range(rows)]) if "keep" in has else None,
            row_window=self.index([self.pick.randint(0, left) for _ in range(rows)]) if "row_window" in has else None,
        )

    def _tail(self) -> tuple[Tail, list[Tensor]]:
        has, size = self.has, max([1, *self.queries]) + 1
        lens = self.queries[: self.live_rows] + [0] * self.padded
        branches = "branches" in has
        slots, used = None, []
        if branches or "tail_slots" in has:
            owners = [n for n in lens for _ in range(n)] if branches else lens
            slots = torch.full((self.tokens if branches else len(lens), size), NOWHERE)
            for row, length in enumerate(owners):
                used.append(self._taken(length))
                slots[row, :length] = used[-1]
        mask = torch.rand(self.tokens, size, generator=self._order) < 0.5 if "tree" in has else None
        positions = torch.randint(0, 25, (self.tokens,), generator=self._order) if "tail_positions" in has else None
        tail = Tail(
            size,
            self.index(lens),
            slots=None if slots is None else self.index(slots),
            per_query=branches,
            mask=None if mask is None else mask.to(self.device),
            positions=None if positions is None or branches else self.index(positions, torch.int32),
        )
        return tail, used

    def _positions(self, view: KVView | None, tail: Tail | None) -> Tensor | None:
        if tail is not None and tail.per_query:  # the query of a branch stands at its end
            lasts = [keys + n - 1 for keys, n in zip(self.kv_len, self.queries, strict=True) for _ in range(n)]
        elif "positions" in self.has or (view is not None and view.shard is not None):
            count = 1 if view is None or view.shard is None else view.shard[1]
            spans = zip(self.kv_len, self.queries, strict=True)
            lasts = [self.pick.randint(0, keys * count + 4) for keys, n in spans for _ in range(n)]
        else:
            return None
        return self.index([*lasts, *[0] * (self.tokens - len(lasts))])

    def queries_of(self, segment: Segment, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
        """q, NaN where no live query is."""
        q = self.noise(self.tokens, heads, dim).to(dtype)
        starts, counts = segment.cu_seqlens_q.tolist(), [*self.queries[: self.live_rows], *[0] * self.padded]
        if segment.q_len is not None:
            counts = [min(pair) for pair in zip(counts, segment.q_len.tolist(), strict=True)]
        live = [start + i for start, n in zip(starts, counts, strict=False) for i in range(n)]
        dead = torch.ones(self.tokens, dtype=torch.bool)
        dead[live] = False
        q[dead.to(self.device)] = math.nan
        if "strided" not in self.has:
            return q
        fused = torch.full((self.tokens, (heads + 3) * dim), math.nan, dtype=dtype, device=self.device)
        fused[:, dim : (heads + 1) * dim] = q.flatten(1)
        return fused[:, dim : (heads + 1) * dim].view(self.tokens, heads, dim)

    def caches(
        self,
        slots: int,
        live: Tensor,
        heads: int,
        dims: tuple[int, int],
        dtype: torch.dtype,
        scales: tuple[Any, Any],
        latent: bool,
    ) -> tuple[Tensor, Tensor]:
        """k and v, NaN in every slot that holds no key; "strided" are two views of one tensor."""
        widths = (dims[0] + 16,) if latent else (sum(dims),) if "strided" in self.has else dims
        parts = [torch.full((slots, heads, n), math.nan, device=self.device).to(dtype) for n in widths]
        k = parts[0][..., : dims[0]]
        v = k[..., : dims[1]] if latent else parts[-1][..., widths[-1] - dims[1] :]
        live = live.to(self.device)
        for cache, scale in ((k, scales[0]), (v, scales[1]))[: 1 if latent else 2]:
            as_bits(cache)[live] = as_bits(quantised(self.noise(len(live), *cache.shape[1:]), scale, dtype))
        return k, v


def together(features):
    """A name for features that are tested together, the same in every process."""
    return "-".join(sorted(features)) or "plain"
