"""Pictures of `faback.testing.pictures` with matplotlib, which the extras `docs` and `bench` bring."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from faback.core.errors import ConfigError
from faback.testing.pictures import NO_KEY, UNSEEN, WRONG, Block, Panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg")
MAX_QUERIES = 64
MAX_LINES = 400
"""Page borders of one panel; more than that would be all that one sees."""

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442", "#999999", "#000000")
PALE, DARK = "#E9E9E9", "#333333"

SETTINGS: Mapping[Any, Any] = MappingProxyType({"svg.fonttype": "none", "svg.hashsalt": "faback", "font.size": 8})


def available() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw(panels: Sequence[Panel], title: str = "", *, max_queries: int = MAX_QUERIES) -> Figure:
    """A figure with the panels side by side: queries from top to bottom, their keys from left to right.

    Args:
        panels: one at least, with a query in it.
        title: of all.
        max_queries: queries of a panel that are drawn; the figure says how many were left out.

    Raises:
        ConfigError: matplotlib is not installed, or there is nothing to draw.
    """
    if not available():
        hint = "pip install faback[docs]"
        raise ConfigError("pictures", wanted="matplotlib, of the extra `docs` or `bench`", got="none", hint=hint)
    if not any(panel.blocks for panel in panels):
        raise ConfigError("pictures", wanted="a batch with queries", got="one without")
    import matplotlib as mpl
    from matplotlib.figure import Figure

    canvases = [_Canvas(panel, max_queries) for panel in panels]
    widths = [canvas.width for canvas in canvases]
    with mpl.rc_context(dict(SETTINGS)):
        height = max(canvas.height for canvas in canvases) + 1.5 + 0.16 * max(len(c.legend()) for c in canvases)
        handles = {handle.get_label(): handle for canvas in canvases for handle in canvas.legend()}
        text = max([len(title), *(len(label) + 8 for label in handles)])
        width = max(sum(widths) + 0.6 * len(widths), 0.07 * text)
        figure = Figure(figsize=(width, height), layout="constrained")
        if title:
            figure.suptitle(title, fontsize=9)
        axes = figure.subplots(1, len(panels), width_ratios=widths, squeeze=False)[0]
        for canvas, place in zip(canvases, axes, strict=True):
            canvas.draw(place)
        axes[0].set_ylabel("query position")
        figure.legend(handles=list(handles.values()), loc="outside lower left", ncols=1, frameon=False)
    return figure


def save(figure: Figure, path: Path | str, description: str = "") -> None:
    """Writes a figure to a PNG or SVG file: either all of it is there afterwards, or the file is as it was.

    The same figure gives the same bytes with the same version of matplotlib.

    Args:
        figure: from `draw`.
        path: its suffix decides the format.
        description: kept in the file's metadata.

    Raises:
        ConfigError: another suffix, or nothing can be written there.
    """
    path = Path(path)
    check_suffix(path)
    import matplotlib as mpl

    form = path.suffix[1:].lower()
    metadata: dict[str, Any] = {"Description": description or None}
    metadata |= {"Date": None, "Creator": "faback"} if form == "svg" else {"Software": "faback"}
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(handle, "wb") as file, mpl.rc_context(dict(SETTINGS)):
                figure.savefig(
                    file, format=form, dpi=150, metadata={k: v for k, v in metadata.items() if v or form == "svg"}
                )
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise ConfigError(f"file {path}", wanted="a place to write to", got=str(error)) from error


def check_suffix(path: Path) -> None:
    """Raises a `ConfigError` unless the file's name says PNG or SVG."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(
            f"file {path}", wanted=f"a name that ends in {' or '.join(FORMATS)}", got=path.suffix or "none"
        )


class _Canvas:
    """A panel laid out: one unit per key to the right, one per query downwards, a line for each block's title."""

    def __init__(self, panel: Panel, max_queries: int) -> None:
        self._panel = panel
        self._blocks: list[tuple[float, Block]] = []
        top, left = 0.0, max_queries
        for block in panel.blocks:
            if left <= 0:
                break
            shown = block.first(left)
            self._blocks.append((top + 1.1, shown))
            top, left = top + 1.1 + len(shown.queries) + 0.4, left - len(shown.queries)
        self._lines = max(top, 1.0)
        self._keys = max([1, *(len(block.keys) for _, block in self._blocks)])
        self._left_out = sum(len(block.queries) for block in panel.blocks) - max_queries + max(0, left)
        self.width = min(max(0.14 * self._keys, 2.2), 9.0)
        self.height = min(0.14 * self._lines, 14.0)

    def draw(self, axes: Any) -> None:
        """Fills the axes."""
        from matplotlib.collections import LineCollection, PolyCollection

        axes.set_title(self._panel.title, fontsize=8)
        axes.set_xlim(0, self._keys)
        axes.set_ylim(self._lines, 0)
        axes.set_xlabel(self._panel.axis)
        axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
        axes.tick_params(length=2, color=DARK)
        shapes: dict[str, list[Any]] = {}
        grid: list[Any] = []
        borders: list[Any] = []
        for top, block in self._blocks:
            for colour, run in self._runs(block):
                shapes.setdefault(colour, []).append(_box(*run, top))
            bottom = top + len(block.queries)
            if self._keys <= 100:
                grid += [[(x, top), (x, bottom)] for x in range(1, len(block.keys))]
            grid += [[(0, y), (len(block.keys), y)] for y in _steps(top + 1, bottom)]
            borders += [[(x, top - 0.15), (x, bottom + 0.15)] for x in block.borders]
            axes.text(0, top - 0.2, block.title, fontsize=7, color=DARK, va="bottom")
            if block.tail is not None:
                axes.add_patch(_tail(block.tail, top, len(block.keys), bottom))
        for colour, boxes in shapes.items():
            axes.add_collection(PolyCollection(boxes, facecolors=colour, linewidths=0))
        axes.add_collection(LineCollection(grid, colors="white", linewidths=0.5))
        if len(borders) <= MAX_LINES:
            axes.add_collection(LineCollection(borders, colors=DARK, linewidths=0.9))
        self._ticks(axes)
        for number, note in enumerate(self._notes(len(borders))):
            axes.text(0, -0.2 - 1.1 * number, note, fontsize=6.5, color=WRONG, va="bottom")

    def legend(self) -> list[Any]:
        """Handles for what occurs."""
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        found: list[Any] = [
            Patch(color=self._colour(number), label=mark.name) for number, mark in enumerate(self._panel.marks)
        ]
        found.append(Patch(color=PALE, label="not seen"))
        if any(block.borders for _, block in self._blocks):
            found.append(Line2D([], [], color=DARK, linewidth=0.9, label="page border"))
        if any(block.tail is not None for _, block in self._blocks):
            found.append(Patch(fill=False, edgecolor="black", linestyle="--", label="tail: drafted, not committed"))
        return found

    def _colour(self, number: int) -> str:
        if number == UNSEEN:
            return PALE
        marks = self._panel.marks
        return marks[number].colour or PALETTE[sum(not mark.colour for mark in marks[:number]) % len(PALETTE)]

    def _runs(self, block: Block) -> Iterator[tuple[str, tuple[int, int, int]]]:
        """Colour, and (line, first column, column behind the last) of neighbouring cells that are alike."""
        for line, cells in enumerate(block.cells.tolist()):
            start = 0
            for column in range(1, len(cells) + 1):
                if column == len(cells) or cells[column] != cells[start]:
                    if cells[start] != NO_KEY:
                        yield self._colour(cells[start]), (line, start, column)
                    start = column

    def _ticks(self, axes: Any) -> None:
        labelled = max((block for _, block in self._blocks), key=lambda block: len(block.keys), default=None)
        step = next(
            step for step in (1, 2, 5, 10, 20, 50, 100, 1000, 10_000, 10**9) if self._keys / step * 0.2 <= self.width
        )
        columns = range(0, self._keys, step)
        axes.set_xticks([column + 0.5 for column in columns])
        axes.set_xticklabels([labelled.keys[column] if labelled else "" for column in columns], fontsize=6)
        every = 1 if self._lines < 70 else 4
        rows = [
            (top + line + 0.5, label)
            for top, block in self._blocks
            for line, label in enumerate(block.queries)
            if line % every == 0
        ]
        axes.set_yticks([y for y, _ in rows])
        axes.set_yticklabels([label for _, label in rows], fontsize=6)

    def _notes(self, borders: int) -> list[str]:
        notes = list(self._panel.notes)
        if self._left_out > 0:
            notes.append(f"{self._left_out} more queries are not drawn")
        if borders > MAX_LINES:
            notes.append(f"{borders} page borders are not drawn")
        return notes


def _box(line: int, start: int, end: int, top: float) -> list[tuple[float, float]]:
    y = top + line
    return [(start, y), (end, y), (end, y + 1), (start, y + 1)]


def _steps(first: float, last: float) -> list[float]:
    return [first + step for step in range(max(0, round(last - first)))]


def _tail(left: int, top: float, right: int, bottom: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(
        (left, top), right - left, bottom - top, fill=False, edgecolor="black", linestyle="--", linewidth=1.1, zorder=3
    )
