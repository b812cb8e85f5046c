"""`faback tune` writes tables that can be read again, whole or not at all."""

from __future__ import annotations

import json
import os
import stat

import pytest
import torch

from faback.bench.cases import Case
from faback.bench.problem import Problem
from faback.bench.providers import point
from faback.cli.tune import write
from faback.core.errors import ConfigError
from faback.core.measured import parse

POINT = {"rows": 1, "queries": 1, "keys": 64, "traits": [], "figures": {"triton": 3.5}}


def test_a_table_is_written_for_its_owner_alone(tmp_path):
    path = tmp_path / "new" / "sm_90.json"
    write(path, {"gpu": "a test", "points": [POINT]})
    assert parse(path.read_text(), "").points[0].figures == {"triton": 3.5}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_what_could_not_be_read_again_is_not_written(tmp_path):
    path = tmp_path / "sm_90.json"
    path.write_text("before")
    with pytest.raises(ConfigError, match="faback tune"):
        write(path, {"points": [{**POINT, "rows": 0}]})
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["sm_90.json"]


def test_a_place_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="a place to write to"):
        write(tmp_path / "file" / "sm_90.json", {"points": [POINT]})


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        (Case("decode", ((40, 1), (7, 1))), {"rows": 2, "queries": 1, "keys": 64, "traits": []}),
        (Case("window", ((40, 1),) * 3, window=15), {"rows": 4, "queries": 1, "keys": 16, "traits": ["window"]}),
        (Case("tree", ((40, 6),), tree=True), {"rows": 1, "queries": 8, "keys": 64, "traits": ["tree"]}),
        (Case("fp8", ((40, 1),), fp8=True), {"rows": 1, "queries": 1, "keys": 64, "traits": ["8-bit"]}),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_case_becomes_a_point(case, wanted):
    found = point(Problem(case, "cpu"), {"case": case.name, "triton_us": 4.0, "triton_error": 0.1, "best": "triton"})
    assert found == {**wanted, "figures": {"triton": 4.0}}
    assert parse(json.dumps({"points": [found]}), "").points[0].rows == wanted["rows"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_it_needs_a_gpu():
    from typer.testing import CliRunner

    from faback.cli import build_app

    result = CliRunner().invoke(build_app(), ["tune"])
    assert result.exit_code == 2
