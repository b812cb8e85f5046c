"""What "auto" goes by: the nearest measured point, and a table that can be trusted or is refused."""

from __future__ import annotations

import json

import attrs
import pytest
import torch

from core.test_select import Kernel, ask, selector
from faback.core import measured
from faback.core.errors import ConfigError
from faback.core.measured import Measured, Point, bucket, load, parse, traits_of

FEW = Point(rows=1, queries=1, keys=8192, traits=frozenset(), figures={"a": 5.0, "b": 9.0})
MANY = Point(rows=64, queries=1, keys=4096, traits=frozenset(), figures={"a": 9.0, "b": 5.0})
TREE = Point(rows=1, queries=8, keys=8192, traits=frozenset({"tree"}), figures={"b": 1.0, "a": 2.0})
TABLE = Measured(source="a test", points=(FEW, MANY, TREE))


def shaped(rows, queries, keys, *features):
    return attrs.evolve(ask(*features), rows=rows, queries=queries, keys=keys)


@pytest.mark.parametrize(
    ("request_", "point"),
    [
        (shaped(1, 1, 8192), FEW),
        (shaped(4, 1, 16384), FEW),
        (shaped(32, 1, 4096), MANY),
        (shaped(256, 2, 1024), MANY),
        (shaped(64, 1, 4096, "tree"), TREE),
    ],
)
def test_the_nearest_point_and_traits_before_sizes(request_, point):
    assert TABLE.nearest(request_) is point


def test_nothing_is_preferred_where_nothing_is_known():
    kernels = [Kernel("b"), Kernel("a")]
    assert TABLE.nearest(ask()) is None
    assert TABLE.order(ask(), kernels) == kernels
    assert Measured(source="empty").order(shaped(1, 1, 1), kernels) == kernels


def test_kernels_without_a_figure_come_last_as_they_were():
    kernels = [Kernel("x"), Kernel("b"), Kernel("y"), Kernel("a")]
    assert [kernel.name for kernel in TABLE.order(shaped(1, 1, 8192), kernels)] == ["a", "b", "x", "y"]


def test_traits():
    assert traits_of(attrs.evolve(ask("tree", "window", "raw_kv"), kv_dtype=torch.float8_e4m3fn)) == {
        "tree", "window", "raw", "8-bit",
    }  # fmt: skip
    assert traits_of(ask("latent", "sinks")) == {"latent"}
    assert traits_of(ask("tree", page_size=512)) == {"tree", "large pages"}
    assert traits_of(ask("raw_kv", page_size=512)) == {"raw"}


def test_the_size_of_pages_counts_least():
    large = attrs.evolve(MANY, traits=frozenset({"large pages"}))
    table = Measured(source="a test", points=(FEW, MANY, TREE, large))
    assert table.nearest(attrs.evolve(shaped(64, 1, 4096), page_size=256)) is large
    assert table.nearest(attrs.evolve(shaped(64, 1, 4096), page_size=16)) is MANY
    assert table.nearest(attrs.evolve(shaped(64, 1, 4096, "tree"), page_size=256)) is TREE


@pytest.mark.parametrize(("size", "power"), [(0, 1), (1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_buckets(size, power):
    assert bucket(size) == power


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Writes a table and has it used."""

    def write(entry):
        path = tmp_path / "table.json"
        path.write_text(entry if isinstance(entry, str) else json.dumps(entry))
        monkeypatch.setenv(measured.VARIABLE, str(path))
        return path

    return write


GOOD = {"rows": 4, "queries": 1, "keys": 64, "traits": ["tree"], "figures": {"slow": 9.0, "quick": 2.5}}


def test_a_table_decides_and_explains(table):
    path = table({"points": [GOOD]})
    chosen = selector([Kernel("slow", "tree", priority=9), Kernel("quick", "tree")])
    assert str(chosen.route(shaped(4, 1, 64, "tree"))) == "quick"
    assert str(chosen.route(ask("tree"))) == "slow"  # no sizes are known, so priorities decide
    line = chosen.evidence(shaped(4, 1, 64, "tree"))
    assert "quick 2.5 us, slow 9 us at 4 rows, 1 queries, 64 keys (tree)" in line and str(path) in line


def test_a_pinned_kernel_needs_no_evidence(table):
    table({"points": [GOOD]})
    chosen = selector([Kernel("slow", "tree"), Kernel("quick", "tree")], kernels="slow")
    assert str(chosen.route(shaped(4, 1, 64, "tree"))) == "slow"
    assert chosen.evidence(shaped(4, 1, 64, "tree")) == ""


@pytest.mark.parametrize(
    "entry",
    [
        "no json",
        {},
        {"points": 3},
        {"points": [{**GOOD, "rows": 0}]},
        {"points": [{**GOOD, "keys": "64"}]},
        {"points": [{**GOOD, "traits": "tree"}]},
        {"points": [{**GOOD, "figures": {"quick": -1}}]},
        {"points": [{**GOOD, "figures": {"quick": "fast"}}]},
        {"points": [{**GOOD, "figures": [1]}]},
    ],
    ids=str,
)
def test_what_is_no_table_is_refused(table, entry):
    path = table(entry)
    with pytest.raises(ConfigError, match="faback tune") as caught:
        load(90)
    assert str(path) in caught.value.what


def test_a_table_can_be_missing_or_switched_off(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load(42).points == ()
    monkeypatch.setenv(measured.VARIABLE, "off")
    assert load(90).points == ()
    monkeypatch.setenv(measured.VARIABLE, str(tmp_path / "nowhere.json"))
    with pytest.raises(ConfigError, match="nowhere"):
        load(90)


def test_the_users_own_table_comes_before_the_shipped_one(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mine = measured.user_file(90)
    mine.parent.mkdir()
    mine.write_text(json.dumps({"points": [GOOD]}))
    assert load(90).points == parse(mine.read_text(), "").points
    assert load(90).source == str(mine)
