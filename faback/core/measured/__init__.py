"""Which kernel was the fastest where it was measured: what "auto" goes by.

A table lists points: a shape, and what each kernel took there. Selection looks for the point nearest to a request and
prefers the kernels in the order of their times. A table for sm_90 comes with the package; `faback tune` measures the
machine at hand and writes one that takes its place.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import attrs

from faback.core.errors import ConfigError
from faback.core.files import own_users, read_text
from faback.core.kernel import KernelProvider, KernelRequest

VARIABLE = "FABACK_MEASURED"
"""Environment variable: a table to use instead, or "off"."""
LARGE = "large pages"
"""The trait that counts least: it decides which kernels can serve rather than how fast one is."""


@attrs.frozen(kw_only=True)
class Point:
    """One measured shape.

    Attributes:
        rows, queries, keys: of the batch: sequences, the most queries of one, the most keys that a query may reach.
        traits: what else a kernel's speed depends on, names from `traits_of`.
        figures: kernel -> microseconds.
    """

    rows: int
    queries: int
    keys: int
    traits: frozenset[str]
    figures: Mapping[str, float]

    def distance(self, request: KernelRequest) -> float:
        """How far the request's shape is from this one, in powers of two; traits weigh more than any size."""
        pairs = ((self.rows, request.rows), (self.queries, request.queries), (self.keys, request.keys))
        apart = sum(abs(math.log2(max(1, a)) - math.log2(max(1, b))) for a, b in pairs)
        return apart + sum(50.0 if trait == LARGE else 100.0 for trait in self.traits ^ traits_of(request))

    def __str__(self) -> str:
        figures = ", ".join(f"{name} {time:g} us" for name, time in sorted(self.figures.items(), key=lambda f: f[1]))
        traits = f" ({', '.join(sorted(self.traits))})" if self.traits else ""
        return f"{figures} at {self.rows} rows, {self.queries} queries, {self.keys} keys{traits}"


@attrs.frozen(kw_only=True)
class Measured:
    """A table.

    Attributes:
        source: where it comes from, for reports.
        points: what was measured.
    """

    source: str
    points: tuple[Point, ...] = ()

    def nearest(self, request: KernelRequest) -> Point | None:
        """The point to go by; None where nothing was measured, or the request tells no sizes."""
        if not self.points or not request.rows:
            return None
        return min(self.points, key=lambda point: point.distance(request))

    def order(self, request: KernelRequest, candidates: Sequence[KernelProvider]) -> list[KernelProvider]:
        """Candidates by their time at the nearest point; those without one behind them, as they were."""
        point = self.nearest(request)
        figures = {} if point is None else point.figures
        return sorted(candidates, key=lambda kernel: figures.get(kernel.name, math.inf))


def traits_of(request: KernelRequest) -> frozenset[str]:
    """The traits of a request: "tree", "latent", "8-bit", "window", "raw", `LARGE` (multiples of 256 tokens)."""
    features = request.features
    found = {
        "tree": not features.isdisjoint({"tree", "tail"}),
        "latent": "latent" in features,
        "8-bit": request.kv_dtype.itemsize == 1,
        "window": not features.isdisjoint({"window", "row_window", "chunk"}),
        "raw": "raw_kv" in features,
        LARGE: request.page_size % 256 == 0 and "raw_kv" not in features,
    }
    return frozenset(name for name, present in found.items() if present)


def load(arch: int) -> Measured:
    """The table for an architecture: the user's own, or the one that was shipped, or an empty one.

    The user's own must belong to the user or to root, one that is named may belong to anyone; see also `read_text`.

    Args:
        arch: compute capability as two digits.

    Raises:
        ConfigError: the user's own is not a table, or others could have written it.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen == "off":
        return Measured(source=f"{VARIABLE}=off")
    path = Path(chosen) if chosen else user_file(arch)
    if path.exists():
        return parse(read_text(path, owners=None if chosen else own_users()), str(path))
    if chosen:
        raise ConfigError(VARIABLE, wanted="a table of `faback tune`, or 'off'", got=chosen)
    shipped = resources.files(__name__).joinpath(f"sm_{arch}.json")
    return parse(shipped.read_text(), f"sm_{arch}.json of faback") if shipped.is_file() else Measured(source="none")


def user_file(arch: int) -> Path:
    """Where `faback tune` writes: $XDG_CACHE_HOME/faback, by default in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "faback" / f"sm_{arch}.json"


def parse(text: str, source: str) -> Measured:
    """A table from JSON: an object with "points", each with the fields of `Point`.

    Raises:
        ConfigError: anything else.
    """
    try:
        points = tuple(_point(entry) for entry in json.loads(text)["points"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        hint = f"Write it anew with `faback tune`, or set {VARIABLE}=off."
        raise ConfigError(
            f"measured table {source}", wanted="what `faback tune` writes", got=repr(error), hint=hint
        ) from error
    return Measured(source=source, points=points)


def _point(entry: Mapping[str, Any]) -> Point:
    sizes = {name: entry[name] for name in ("rows", "queries", "keys")}
    if not all(isinstance(size, int) and size > 0 for size in sizes.values()):
        raise ValueError(f"sizes {sizes}")
    traits, figures = entry["traits"], entry["figures"]
    if not isinstance(traits, list) or not all(isinstance(trait, str) for trait in traits):
        raise ValueError(f"traits {traits}")
    if not all(isinstance(time, (int, float)) and 0 < time < math.inf for time in figures.values()):
        raise ValueError(f"figures {figures}")
    return Point(traits=frozenset(traits), figures=dict(figures), **sizes)


def bucket(size: int) -> int:
    """The power of two that holds a size, from 1."""
    return 1 << max(0, size - 1).bit_length()
