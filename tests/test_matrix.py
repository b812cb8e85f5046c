"""The product of modes, overlays, page sizes, variants and kernels, by a sample in which all pairs of values meet.

`faback check --all` runs the whole product; this is the part of it that every change has to pass.
"""

from __future__ import annotations

import random
from itertools import combinations

import attrs
import pytest
import torch

from faback.cli.check import PAGE_SIZES, VARIANTS, Cell, Selection, judge, load_registry

KERNELS = ("reference", "poor")
REFUSED: dict[str, str] = {}
"""Cells that may be refused, and the words of the reason. There are none: everything promised is served."""


def covering(cells: list[Cell]) -> list[Cell]:
    """Cells such that each pair of values of two axes that occurs at all occurs in one of them. Greedy."""
    pick = random.Random(0)
    pick.shuffle(cells)
    open_pairs = {cell: pairs(cell) for cell in cells}
    missing = set().union(*open_pairs.values())
    chosen = []
    while missing:
        sample = pick.sample(cells, min(len(cells), 60))
        best = max(sample, key=lambda cell: len(open_pairs[cell] & missing))
        if not open_pairs[best] & missing:
            best = next(cell for cell in cells if open_pairs[cell] & missing)
        chosen.append(best)
        missing -= open_pairs[best]
    return chosen


def pairs(cell: Cell) -> set[tuple[object, ...]]:
    """All pairs of an axis and a value, two at a time."""
    values = [(name, value) for name, value in attrs.asdict(cell).items() if name != "seed"]
    return set(combinations(values, 2))


WHOLE = Selection(kernels=KERNELS, variants=tuple(VARIANTS), page_sizes=PAGE_SIZES).cells()
SAMPLE = covering(list(WHOLE))


@pytest.mark.parametrize("cell", SAMPLE, ids=lambda cell: str(cell).removeprefix("faback check ").replace("--", ""))
def test_cell(cell: Cell) -> None:
    verdict = judge(cell, torch.device("cpu"), load_registry())
    wanted = "refused" if str(cell) in REFUSED else "equal"
    assert verdict.status == wanted, f"{verdict.reason}\n{verdict.scenario}"
    assert REFUSED.get(str(cell), "") in verdict.reason


def test_all_pairs_meet() -> None:
    whole = set().union(*map(pairs, WHOLE))
    assert set().union(*map(pairs, SAMPLE)) == whole
    assert len(SAMPLE) < len(WHOLE) / 10
