import json

import attrs
import pytest
import torch

import faback
from cli import stubs
from faback.cli.check import PAGE_SIZES, VARIANTS, Cell, Selection, judge, load_registry, short
from faback.kernels.reference import Reference
from faback.testing import MODES, OVERLAYS

FEW = (
    "--device",
    "cpu",
    "--mode",
    "decode",
    "--mode",
    "extend",
    "--overlay",
    "full",
    "--overlay",
    "window",
    "--page-size",
    "4",
)


def test_a_report_for_people(faback_cli):
    result = faback_cli("check", *FEW, "--variant", "float32", "--kernel", "reference")
    assert result.exit_code == 0
    assert "Kernel reference" in result.stdout and "4 equal, 0 refused, 0 wrong on cpu" in result.stdout


def test_a_report_for_programs(faback_cli):
    result = faback_cli("check", *FEW, "--variant", "float32", "--variant", "sinks", "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["counts"] == {"equal": 24, "refused": 0, "wrong": 0} and report["planned"] == 24
    assert {cell["kernel"] for cell in report["cells"]} == {"auto", "reference", "poor"}
    assert {"one_shot", "prefix_chunk"} <= set(report["unchecked"])


def test_a_wrong_kernel_is_found(faback_cli, monkeypatch):
    stubs.install(monkeypatch, stubs.Point("skew", stubs.Plugin(stubs.Skewed())))
    result = faback_cli("check", *FEW, "--variant", "float32", "--kernel", "skewed")
    assert result.exit_code == 1
    assert "run it again: faback check --kernel skewed --mode decode" in result.stdout
    assert "0 equal, 0 refused, 4 wrong" in result.stdout


def test_the_command_that_is_printed_runs_the_cell_again(faback_cli, monkeypatch):
    stubs.install(monkeypatch, stubs.Point("skew", stubs.Plugin(stubs.Skewed())))
    cell = Cell("skewed", "extend", "window", "sinks", 4, 7)
    again = faback_cli(*str(cell).split()[1:], "--json")
    (found,) = json.loads(again.stdout)["cells"]
    assert again.exit_code == 1
    assert [found[name] for name in ("kernel", "mode", "overlay", "variant", "page_size", "seed")] == [
        "skewed", "extend", "window", "sinks", 4, 7,
    ]  # fmt: skip


class Wide(Reference):
    """A kernel that sees one key more to the left than a window allows."""

    name, priority = "wide", 1000

    def prepare(self, segment, layer, request, ws):
        left, right = segment.visibility.window
        if left is not None:
            rule = attrs.evolve(segment.visibility, window=(left + 1, right))
            segment = attrs.evolve(segment, visibility=rule)
        return super().prepare(segment, layer, request, ws)


@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["text", "json"])
def test_who_saw_what_is_said_and_drawn(faback_cli, monkeypatch, tmp_path, as_json):
    stubs.install(monkeypatch, stubs.Point("wide", stubs.Plugin(Wide())))
    flags = ["--kernel", "wide", "--mode", "extend", "--overlay", "window", "--variant", "float32"]
    result = faback_cli("check", *flags, "--page-size", 4, "--pictures", tmp_path, "--device", "cpu", *as_json)
    assert result.exit_code == 1
    said = result.stderr if as_json else result.stdout
    (picture,) = tmp_path.iterdir()
    assert "sees 1 too many" in said and f"Picture: {picture}" in said
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_first_wrong_cell_can_end_it(faback_cli, monkeypatch):
    stubs.install(monkeypatch, stubs.Point("skew", stubs.Plugin(stubs.Skewed())))
    result = faback_cli("check", *FEW, "--variant", "float32", "--kernel", "skewed", "--fail-fast")
    assert result.exit_code == 1
    assert "stopped after 1 of 4 cells" in result.stdout


def test_reasons_of_refusals_are_counted(faback_cli, monkeypatch):
    stubs.install(monkeypatch, stubs.Point("picky", stubs.Plugin(Headless())))
    result = faback_cli("check", *FEW, "--variant", "softcap", "--variant", "float32", "--kernel", "headless", "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 0
    assert report["counts"] == {"equal": 4, "refused": 4, "wrong": 0}
    assert sum(refusal["count"] for refusal in report["refusals"]) == 4
    assert all("softcap" in refusal["reason"] for refusal in report["refusals"])


class Headless(Reference):
    """A kernel without softcap."""

    name = "headless"

    def capabilities(self, device):
        can = super().capabilities(device)
        return type(can)(
            devices=can.devices, q_dtypes=can.q_dtypes, kv_dtypes=can.kv_dtypes, features=can.features - {"softcap"}
        )


@pytest.mark.parametrize(
    ("option", "name"), [("--mode", "march"), ("--overlay", "coat"), ("--variant", "x"), ("--kernel", "tachyon")]
)
def test_unknown_names_are_refused(faback_cli, option, name):
    result = faback_cli("check", option, name)
    assert result.exit_code == 2
    assert f"{option}: wanted one of" in result.stderr and name in result.stderr


def test_everything_is_the_whole_product():
    """All axes that the project names are there, and every pair of their values meets in some cell."""
    assert {1, 3, 4, 16, 64} <= set(PAGE_SIZES)
    assert {"float32", "sinks", "softcap", "fp8", "hybrid", "dims", "ratio"} <= set(VARIANTS)
    cells = Selection(kernels=("reference", "poor"), variants=tuple(VARIANTS), page_sizes=PAGE_SIZES).cells()
    assert {cell.mode for cell in cells} == set(MODES) and {cell.overlay for cell in cells} == set(OVERLAYS)
    pairs = {(cell.overlay, cell.page_size) for cell in cells}
    assert len(pairs) == len(OVERLAYS) * len(PAGE_SIZES)


def test_no_cell_is_empty():
    """A cell without a query would be equal whatever the kernel does; idle is there for just that."""
    for cell in Selection(kernels=("reference",)).cells():
        if cell.mode != "idle":
            assert any(token is not None for step in cell.scenario().steps for token in step.queries), str(cell)


def test_the_poor_kernel_ranks_last():
    kernels = load_registry().kernels(torch.device("cpu"))
    ours = [
        kernel.value.name
        for kernel in kernels
        if kernel.distribution in (f"faback {faback.__version__}", "faback.testing")
    ]
    assert ours[-1] == "poor"


def test_a_verdict_names_the_pass_and_the_layer(monkeypatch):
    stubs.install(monkeypatch, stubs.Point("skew", stubs.Plugin(stubs.Skewed())))
    verdict = judge(Cell("skewed", "decode", "full", "float32", 1, 0), torch.device("cpu"), load_registry())
    assert verdict.status == "wrong" and verdict.reason.startswith("pass 0, layer 0: out off by")


def test_short_reasons():
    assert short("nothing fits:\n  - a: no\n  - b: neither\n") == "a: no; b: neither"
    assert short(" plain ") == "plain"


def test_fuzzing_says_how_much_it_saw(faback_cli):
    result = faback_cli("check", "--fuzz", "1", "--seed", "7", "--device", "cpu")
    assert result.exit_code == 0, result.stdout
    assert "0 wrong on cpu" in result.stdout and "seed 7" in result.stdout


def test_fuzzing_says_how_far_it_is(faback_cli, monkeypatch):
    monkeypatch.setattr("faback.cli.fuzz.PAUSE", 0.0)
    result = faback_cli("check", "--fuzz", "1", "--seed", "7", "--device", "cpu")
    lines = [line for line in result.stderr.splitlines() if line.endswith("refused so far, seed 7")]
    assert lines[0].startswith("1 scenarios, ") and len(lines) > 1


def test_fuzzing_finds_a_wrong_kernel(faback_cli, monkeypatch):
    stubs.install(monkeypatch, stubs.Point("skew", stubs.Plugin(stubs.Skewed())))
    result = faback_cli("check", "--fuzz", "60", "--device", "cpu")
    assert result.exit_code == 1
    assert (
        "wrong: skewed" in result.stdout and "Scenario.make(" in result.stdout and "kernels='skewed'" in result.stdout
    )
