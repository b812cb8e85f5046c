"""The engine benchmark on a small model: every way of faback's serves all requests, and its checks can fail."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="measures Transformers beside faback")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "engine.py"
SMALL = ("--model", "tiny", "--device", "cpu", "--requests", "3", "--new", "6", "--longest", "48")


@pytest.fixture(scope="module")
def engine():
    return runpy.run_path(str(SCRIPT))


def test_every_way_of_ours_serves_all_requests(engine, tmp_path):
    engine["main"]([*SMALL, "--dtype", "float32", "--only", "faback", "--json", str(tmp_path / "report.json")])
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert [row["way"] for row in rows] == ["faback", "faback, speculation"]
    for row in rows:
        assert row["tokens_per_second"] > 0 and row["float32_equal_of_4"] == 4
        assert row["same_tokens_as_sdpa"] == row["of_tokens"] == 18


def test_one_padded_batch_is_what_it_is_compared_with(engine, tmp_path):
    engine["main"]([*SMALL, "--dtype", "float32", "--only", "padded", "--json", str(tmp_path / "report.json")])
    (row,) = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert row["same_tokens_as_sdpa"] == 18 and "failed" not in row
    assert "float32_equal_of_4" not in row  # ours are checked in float32, and only when asked for


def test_the_first_difference_counts(engine):
    first_difference = engine["first_difference"]
    assert [first_difference([1, 2, 3], other) for other in ([1, 2, 3], [1, 5, 3], [4, 2, 3], [1])] == [3, 1, 0, 1]
