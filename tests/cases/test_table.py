"""docs/cases.md names every case, and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cases.test_families import FAMILIES

ROOT = Path(__file__).parents[2]
ROWS = re.findall(r"^\| (B\d\d) \|(.+)\|$", (ROOT / "docs" / "cases.md").read_text(), re.MULTILINE)


def test_every_case_has_a_row():
    assert [number for number, _ in ROWS] == [f"B{n:02}" for n in range(1, 32)]


@pytest.mark.parametrize(("number", "text"), ROWS, ids=[number for number, _ in ROWS])
def test_what_a_row_points_at_exists(number, text):
    *_, tests = text.split("|")
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", tests)
    for path, function in named:
        source = (ROOT / path).read_text()
        assert not function or f"def {function}(" in source, f"{path} has no {function}"
    families = any(name.startswith(number) for name in FAMILIES)
    assert tests.strip().startswith("families") is families
    assert named or families
