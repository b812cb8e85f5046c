r"""Who sees what, as data for pictures: query by query and key by key, for each kind of layers of a batch.

    panels = planned(backend, batch)
    print("\n\n".join(map(str, panels)))
    save(draw(panels), "batch.svg")

A `Panel` is what `faback.testing.drawing` draws, and it prints as text where there is nothing to draw with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import attrs
import torch

from faback.core.backend import AttentionBackend
from faback.core.batch import ForwardBatch
from faback.core.contracts import PlanContext
from faback.core.explain import Explanation
from faback.core.layer import AttentionLayer, LayerKind
from faback.core.registry import Contribution
from faback.core.segment import Segment
from faback.core.select import Route
from faback.core.workspace import Workspace
from faback.kernels.definition import (
    key_lens,
    key_positions,
    owners,
    per_query,
    query_positions,
    slots_at,
    tail_slots,
    translated,
)

Tensor = torch.Tensor

UNSEEN, NO_KEY = -1, -2
"""Cells of a `Block` that no part shows: of a key that exists, and of none."""
GLYPHS = "#o*%@&$="
WRONG, MISSING = "#D55E00", "#F0E442"
"""Colours of what should not be; they and the palette of `faback.testing.drawing` can be told apart by people who see
few colours (Okabe and Ito, https://jfly.uni-koeln.de/color/)."""


@attrs.frozen
class Mark:
    """What a number in the cells of a `Block` means.

    Attributes:
        name: for the legend.
        glyph: one character, for text.
        colour: hexadecimal; "" for the next of the palette.
    """

    name: str
    glyph: str
    colour: str = ""


TWICE = Mark("seen twice", "!", WRONG)


@attrs.frozen(eq=False, kw_only=True)
class Block:
    """The queries of one request, and its keys.

    Attributes:
        title: whose they are.
        queries: a label for each query, its position as a rule.
        keys: a label for each key, its position as a rule; "" for the nodes of a tree, which are its queries.
        cells: int64 [queries, keys], the index of a `Mark`, or `UNSEEN`, or `NO_KEY`.
        borders: columns in which a page begins, the first left out.
        tail: the column in which the tail begins, None without one.
    """

    title: str
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    cells: Tensor
    borders: tuple[int, ...] = ()
    tail: int | None = None

    def first(self, count: int) -> Block:
        """The block with no more than that many of its queries."""
        return attrs.evolve(self, queries=self.queries[:count], cells=self.cells[:count])

    def lines(self, marks: Sequence[Mark]) -> list[str]:
        """Text: a line of keys per query. `|` stands before a page, `>` before the tail."""
        width = max([0, *(len(label) for label in self.queries)])
        signs = {self.tail: ">"} | {column: "|" for column in self.borders if column != self.tail}
        glyphs = {UNSEEN: ".", NO_KEY: " "} | {number: mark.glyph for number, mark in enumerate(marks)}
        return [
            f"{label:>{width}}  " + "".join(signs.get(column, "") + glyphs[cell] for column, cell in enumerate(cells))
            for label, cells in zip(self.queries, self.cells.tolist(), strict=True)
        ]


@attrs.frozen(eq=False, kw_only=True)
class Panel:
    """What layers of one kind see in one pass.

    Attributes:
        title: which layers.
        marks: what the cells mean.
        blocks: the requests that have queries, in batch order.
        axis: what the keys are.
        notes: what a reader should know besides.
    """

    title: str
    marks: tuple[Mark, ...]
    blocks: tuple[Block, ...]
    axis: str = "key position"
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [self.title] if self.blocks else [self.title, "no queries"]
        for block in self.blocks:
            lines += [f"{block.title}:", *block.lines(self.marks)]
        lines += [f"{mark.glyph} {mark.name}" for mark in self.marks] + [". not seen"]
        return "\n".join([*lines, *self.notes])


@attrs.frozen(eq=False)
class Part:
    """A segment as a kernel gets it: a part of what a layer sees.

    Attributes:
        segment: who sees what.
        route: the leaf that serves it.
        path: the lowerings that made it, each with the number of the part, like ("cascade 1",).
    """

    segment: Segment
    route: Route
    path: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{', '.join(self.path)} on {self.route}" if self.path else f"on {self.route}"


def planned(
    backend: AttentionBackend, batch: ForwardBatch, layers: Sequence[AttentionLayer] | None = None
) -> list[Panel]:
    """What a plan of a batch would show, one panel per kind of layer. The backend's state and plan are left alone.

    Args:
        backend: which plans it; only lengths and tables are read, no key and no query.
        batch: of any mode.
        layers: whose kinds are shown; all of the backend's unless given.

    Raises:
        FabackError: whatever planning would raise.
    """
    kinds: dict[LayerKind, list[AttentionLayer]] = {}
    for layer in backend.layers.values() if layers is None else layers:
        kinds.setdefault(layer.kind, []).append(layer)
    return [_panel(backend, batch, alike) for alike in kinds.values()]


def parts_of(backend: AttentionBackend, batch: ForwardBatch, layer: AttentionLayer) -> tuple[Explanation, list[Part]]:
    """What a layer sees as the mode and overlays describe it, and as the kernels get it. Raises like `planned`."""
    answer, ws = backend.explain(batch, layer), backend.workspace()
    ctx = PlanContext(backend.config, backend.pools, tuple(backend.layers.values()))
    found: list[Part] = []
    for segment, route in zip(answer.parts, answer.routes, strict=True):
        found += _leaves(Part(segment, route), backend, ws, ctx)
    return answer, found


def describe(layers: Sequence[AttentionLayer]) -> str:
    """The layers of one kind and what is particular to it: "layers 0, 2: window 5"."""
    kind = layers[0].kind
    words = {
        "cross-attention": kind.cross,
        "bidirectional": not kind.causal and not kind.cross,
        f"window {kind.window}": kind.window is not None and not kind.cross,
        f"chunks of {kind.chunk}": kind.chunk is not None and not kind.cross,
        "latent": kind.latent,
        "sinks": kind.sinks,
        f"softcap {kind.softcap:g}": kind.softcap > 0,
        "no cache": not kind.cached,
        f"KV group {kind.kv_group}": kind.cached and kind.kv_group != "full",
    }
    said = ", ".join(word for word, applies in words.items() if applies) or "full attention"
    numbers = ", ".join(str(layer.layer_id) for layer in layers)
    return f"layer{'s' if len(layers) > 1 else ''} {numbers}: {said}"


def _leaves(part: Part, backend: AttentionBackend, ws: Workspace, ctx: PlanContext) -> Iterator[Part]:
    lowering = part.route.lowering
    if lowering is None:
        yield part
        return
    segments = backend.selector.guard(lowering, lowering.lower, part.segment, ws, ctx)
    for number, (segment, route) in enumerate(zip(segments, part.route.parts, strict=True), 1):
        name = f"{lowering.key} {number}" if len(segments) > 1 else lowering.key
        yield from _leaves(Part(segment, route, (*part.path, name)), backend, ws, ctx)


def _panel(backend: AttentionBackend, batch: ForwardBatch, alike: Sequence[AttentionLayer]) -> Panel:
    answer, parts = parts_of(backend, batch, alike[0])
    owner = name(answer.stages[0].by)
    marks = [Mark(f"{owner} {part}", GLYPHS[number % len(GLYPHS)]) for number, part in enumerate(parts)]
    cells, strays = _cells(answer.segment, [part.segment for part in parts])
    if bool((cells == len(parts)).any()):
        marks.append(TWICE)
    notes = (f"{strays} keys of other requests, or of none, are seen besides",) if strays else ()
    varied = [name(after.by) for before, after in pairwise(answer.stages) if after.segment is not before.segment]
    overlays = ",\n".join(varied)
    cross = alike[0].cross
    return Panel(
        title=describe(alike) + (f"\n{overlays}" if overlays else ""),
        marks=tuple(marks),
        blocks=tuple(_blocks(answer.segment, cells, _asked_at(answer.segment, batch, cross), batch)),
        axis="encoder token" if cross else "key position",
        notes=notes,
    )


def name(contribution: Contribution[Any]) -> str:
    """Key and distribution of a mode or overlay, without the version, so that pictures do not change with it."""
    return f"{contribution.value.key} ({contribution.distribution.partition(' ')[0]})"


def _asked_at(segment: Segment, batch: ForwardBatch, cross: bool) -> list[str]:
    """Positions of the queries. Those of a cross-attention layer do not follow from its keys."""
    if not cross:
        return [str(position) for position in query_positions(segment).tolist()]
    if batch.positions is not None:
        return [str(position) for position in batch.positions.tolist()]
    return ["?"] * segment.tokens


def _cells(whole: Segment, parts: Sequence[Segment]) -> tuple[Tensor, int]:
    """int64 [tokens, keys]: which part shows a key, len(parts) for several of them; and the keys seen besides.

    Parts have tables and rows of their own, so a key is known by its slot.
    """
    slots, exists = _slots(whole)
    cells = torch.where(exists, UNSEEN, NO_KEY)
    strays = 0
    for number, part in enumerate(parts):
        visible = per_query(part)[0]
        own, _ = _slots(part)
        for token in range(whole.tokens):
            same = (own[token, visible[token]][:, None] == slots[token]) & exists[token]
            seen = same.any(0)
            strays += int((~same.any(1)).sum())
            again = seen & (cells[token] != UNSEEN)
            cells[token, seen] = number
            cells[token, again] = len(parts)
    return cells, strays


def _slots(segment: Segment) -> tuple[Tensor, Tensor]:
    """What each query could choose from, committed keys first and the tail behind them.

    Returns:
        slots: int64 [tokens, keys], of the layer's pool; where keys come with the batch, their number in it.
        exists: bool [tokens, keys].
    """
    view, tail, width = segment.kv, segment.tail, segment.max_kv_len
    row, _ = owners(segment.cu_seqlens_q, segment.tokens)
    column = torch.arange(width, device=row.device).expand(segment.tokens, width)
    exists = column < key_lens(segment)[row][:, None]
    if view is None:
        offsets = segment.cu_seqlens_q if segment.cu_seqlens_k is None else segment.cu_seqlens_k
        return offsets.long()[row][:, None] + column, exists
    slots = slots_at(view, row[:, None], column)
    if tail is not None:
        slots = torch.cat([slots, tail_slots(segment)], dim=1)
        within = torch.arange(tail.size, device=row.device)
        exists = torch.cat([exists, within < tail.lens.long()[row][:, None]], dim=1)
    # Entries that nobody owns may hold anything.
    return torch.where(exists, translated(view, torch.where(exists, slots, 0)), -1), exists


def _blocks(segment: Segment, cells: Tensor, positions: Sequence[str], batch: ForwardBatch) -> Iterator[Block]:
    """One block per row that has queries; request row 0 belongs to padding."""
    offsets, live = segment.cu_seqlens_q.tolist(), per_query(segment)[2].tolist()
    committed, view, tail = key_lens(segment).tolist(), segment.kv, segment.tail
    width = segment.max_kv_len
    stands = key_positions(segment, width).tolist()
    drafted = [0] * segment.rows if tail is None else tail.lens.tolist()
    owner = [1] * segment.rows if view is None or view.dense else view.req_pool_indices.tolist()
    is_tree, branches = tail is not None and tail.mask is not None, tail is not None and tail.per_query
    kind = " node {}" if is_tree else " branch {}" if branches else ""
    for row in range(segment.rows):
        start, end = offsets[row : row + 2]
        if start == end:
            continue
        count = committed[row]
        labels = [str(position) for position in stands[:count]]
        labels += ["" if is_tree else str(count + number) for number in range(drafted[row])]
        names = [positions[token] + kind.format(token - start) for token in range(start, end)]
        yield Block(
            title="padding" if owner[row] == 0 else f"request {row}",
            queries=tuple(name if live[start + at] else "padding" for at, name in enumerate(names)),
            keys=tuple(labels),
            cells=cells[start:end, [*range(count), *range(width, width + drafted[row])]],
            borders=tuple(_borders(segment, row, count)),
            tail=count if drafted[row] else _drafts(segment, batch, row, count),
        )


def _drafts(segment: Segment, batch: ForwardBatch, row: int, count: int) -> int | None:
    """Where the drafted tokens begin that continue the row's keys, None where there are none."""
    if segment.kv is None or segment.kv.shard is not None or segment.rows != batch.bs or not segment.visibility.causal:
        return None
    text = int(batch.seq_lens[row])
    return text if text < count else None


def _borders(segment: Segment, row: int, count: int) -> list[int]:
    """Columns of a row in which a page begins, the first left out; none where pages hold one token."""
    view = segment.kv
    if view is None or view.page_size == 1 or count == 0:
        return []
    slots = slots_at(view, torch.tensor(row, device=segment.kv_len.device), torch.arange(count))
    pages = (slots // view.page_size).tolist()
    return [column for column in range(1, count) if pages[column] != pages[column - 1]]
