"""`faback modes --plan`: which plugin contributed what to a batch, for each kind of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import attrs
import torch
from rich.console import Console

from faback.cli.explain import segment_data
from faback.cli.output import table
from faback.cli.scenes import Scene
from faback.core.explain import Stage, sizes_of
from faback.core.layer import AttentionLayer, LayerKind
from faback.core.registry import Contribution
from faback.core.segment import Segment
from faback.testing.pictures import Part, describe, parts_of


@attrs.frozen
class Line:
    """One thing that a plugin contributed.

    Attributes:
        role: "mode", "overlay", "lowering" or "kernel".
        key: its name.
        plugin: the entry point, or the module of a built-in.
        distribution: the package that the plugin comes from.
        what: what it made, changed or serves.
    """

    role: str
    key: str
    plugin: str
    distribution: str
    what: str


@attrs.frozen(eq=False)
class KindOfLayers:
    """What happens to all layers of one kind.

    Attributes:
        layers: which.
        lines: the mode, the overlays in order, and for each segment its lowerings and its kernel.
        segments: those that kernels get, as plain data.
    """

    layers: str
    lines: tuple[Line, ...]
    segments: tuple[dict[str, Any], ...]


def contributions(scene: Scene) -> list[KindOfLayers]:
    """Asks the backend about each kind of layers. Raises whatever planning would raise."""
    kinds: dict[LayerKind, list[AttentionLayer]] = {}
    for layer in scene.backend.layers.values():
        kinds.setdefault(layer.kind, []).append(layer)
    return [_of_kind(scene, alike) for alike in kinds.values()]


def as_data(found: Sequence[KindOfLayers]) -> list[dict[str, Any]]:
    """Contributions as plain data, for JSON."""
    return [attrs.asdict(kind) for kind in found]


def show(found: Sequence[KindOfLayers], name: str, console: Console) -> None:
    """Prints one table for each kind of layers."""
    console.print(name, markup=False, highlight=False)
    for kind in found:
        rows = [(line.role, line.key, line.distribution, line.plugin, line.what) for line in kind.lines]
        console.print(table(kind.layers, ("role", "key", "distribution", "plugin", "what it contributes"), rows))


def _of_kind(scene: Scene, alike: Sequence[AttentionLayer]) -> KindOfLayers:
    answer, parts = parts_of(scene.backend, scene.batch, alike[0])
    first = answer.stages[0]
    lines = [_line("mode", first.by, f"the segment: {_sizes(first.segment)}")]
    lines += [_line("overlay", after.by, _changes(before, after)) for before, after in pairwise(answer.stages)]
    owners = _owners(scene)
    segments = []
    for number, part in enumerate(parts, 1):
        name = f"segment {number}" if len(parts) > 1 else "the segment"
        lines += [_line("lowering", owners[step.partition(" ")[0]], f"{name}: {step}") for step in part.path]
        lines.append(_line("kernel", owners[str(part.route)], f"serves {name}: {_sizes(part.segment)}"))
        segments.append(_segment(part))
    return KindOfLayers(describe(alike), tuple(lines), tuple(segments))


def _segment(part: Part) -> dict[str, Any]:
    return segment_data(part.segment) | {"lowerings": list(part.path), "kernel": str(part.route)}


def _owners(scene: Scene) -> dict[str, Contribution[Any]]:
    """Lowerings and kernels by key."""
    registry, config = scene.backend.registry, scene.backend.config
    return {c.value.key: c for c in registry.lowerings(config)} | {
        c.value.name: c for c in registry.kernels(scene.backend.device, config)
    }


def _line(role: str, by: Contribution[Any], what: str) -> Line:
    key = getattr(by.value, "key", None) or by.value.name
    return Line(role, key, by.plugin, by.distribution, what)


def _sizes(segment: Segment) -> str:
    needs = ", ".join(sorted(segment.features()))
    return f"{sizes_of(segment)}; needs {needs}" if needs else sizes_of(segment)


def _changes(before: Stage, after: Stage) -> str:
    """Which fields an overlay changed, host values with what they became."""
    if after.segment is before.segment:
        return "nothing to vary here"
    return ", ".join(_differences(before.segment, after.segment, "")) or "nothing"


def _differences(before: Any, after: Any, prefix: str) -> list[str]:
    found = []
    for field in attrs.fields(type(after)):
        old, new = getattr(before, field.name, None), getattr(after, field.name)
        name = prefix + field.name
        if new is old or (not isinstance(new, torch.Tensor) and not attrs.has(type(new)) and new == old):
            continue
        if attrs.has(type(new)) and type(new) is type(old):
            found += _differences(old, new, f"{name}.")
        else:
            found.append(f"{name}={new}" if isinstance(new, int | str | tuple | None) else name)
    return found
