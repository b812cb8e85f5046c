"""constraints-dev.txt pins all that CI installs, on every supported Python."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pin
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
LINES = [Requirement(line) for line in pin.FILE.read_text().splitlines() if line and not line.startswith("#")]
CI = ["faback[dev,docs]", *pin.plugins(), *pin.OTHERS]


def holding(name, python):
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    named = (line for line in LINES if canonicalize_name(line.name) == name)
    return [line for line in named if line.marker is None or line.marker.evaluate(environment)]


def test_everything_that_ci_installs_is_pinned():
    found, missing = pin.closure(CI)
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    # What builds the documents is installed after these tests, and a plugin of this repository has no line.
    named = {*found, *missing} - set(pin.plugins())
    names = [name for name in named if not name.startswith(pin.BY_TORCH)]
    assert len(names) > 30
    assert [name for name in names if not holding(name, here)] == []


def test_what_is_not_pinned_is_noticed(monkeypatch):
    """The test above can fail."""
    monkeypatch.setattr(pin, "plugins", list)
    found, missing = pin.closure(["faback[dev]", "no-such-distribution-anywhere"])
    assert missing == {"no-such-distribution-anywhere"}
    assert {"pytest", "iniconfig", "torch", "sympy"} <= found.keys()


def test_pins_are_exact():
    ranges = [str(line) for line in LINES if not re.fullmatch(r"==[\w.]+", str(line.specifier))]
    assert [line.partition("<")[0].partition(">")[0] for line in ranges] == ["triton"]


@pytest.mark.parametrize("python", PYTHONS)
def test_no_python_has_two_pins_for_one_name(python):
    for name in {canonicalize_name(line.name) for line in LINES}:
        assert len(holding(name, python)) <= 1, name


def test_ci_tests_every_python_that_the_package_declares():
    declared = re.findall(r'Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    matrix = re.search(r"python: \[(.*)\]", (ROOT / ".github/workflows/ci.yml").read_text())
    assert tuple(declared) == tuple(re.findall(r"3\.\d+", matrix[1])) == PYTHONS


def test_a_file_written_anew_is_the_same_again():
    before = pin.FILE.read_text()
    once = pin.renewed(before)[0]
    assert pin.renewed(once)[0] == once


def test_lines_of_other_pythons_and_ranges_stay():
    text = "# why\nnumpy==1.0; python_version < '3'\nnumpy==2.0; python_version >= '3'\ntriton>=3,<4\n"
    lines = pin.renewed(text)[0].splitlines()
    assert lines[0] == "# why"
    assert "numpy==1.0; python_version < '3'" in lines and "triton>=3,<4" in lines
    renewed = [line for line in lines if line.startswith("numpy==") and line.endswith("; python_version >= '3'")]
    assert len(renewed) == 1 and renewed[0] != "numpy==2.0; python_version >= '3'"
