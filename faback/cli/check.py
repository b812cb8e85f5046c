"""`faback check`: every combination that this machine can run, against the oracle of `faback.testing`.

A cell is one kernel on one scenario: a mode, an overlay, a page size, a variant and a seed. It comes out equal, refused
with a reason, or wrong.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count, product
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import attrs
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from faback.builtins import BUILTINS
from faback.cli.output import AsJson, DeviceName, main_console, parse_device, print_json, side_console, table
from faback.core.backend import AttentionBackend
from faback.core.config import BackendConfig
from faback.core.errors import ConfigError
from faback.core.layer import AttentionLayer
from faback.core.pools import Pools
from faback.core.registry import Registry
from faback.core.select import Selector
from faback.testing import MODES, OVERLAYS, CellResult, Options, Scenario, impossible, poor, run_scenario
from faback.testing.checks import MakeBackend

AUTO = "auto"
STATUSES = ("equal", "refused", "wrong")
STYLES = MappingProxyType({"equal": "green", "refused": "yellow", "wrong": "bold red"})
LOWERED = "poor"
"""A kernel that knows causal attention over a page table and nothing more: it is served through lowerings alone."""
PAGE_SIZES = (1, 3, 4, 16, 64)
USUAL_PAGE_SIZES = (1, 4, 16)

VARIANTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "float32": {},
        "bfloat16": {"dtype": torch.bfloat16},
        "float16": {"dtype": torch.float16},
        "sinks": {"sinks": True},
        "softcap": {"softcap": True},
        "scores": {"sinks": True, "softcap": True, "scale": 0.4, "dtype": torch.bfloat16},
        "fp8": {"dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn, "kv_scales": True},
        "dims": {"v_head_dim": 16, "head_dim": 24},
        "ratio": {"num_q_heads": 6, "num_kv_heads": 2},
        "heads": {"num_q_heads": 6, "num_kv_heads": 1, "v_head_dim": 16, "head_dim": 32, "dtype": torch.float16},
        "padding": {"padded_rows": 2, "padded_tokens": 3, "dtype": torch.float16},
        "hybrid": {"hybrid": True},
        "branches": {"topk": 3},
        "branches+scores": {"topk": 2, "sinks": True, "softcap": True},
        "branches+hybrid": {"topk": 2, "hybrid": True},
        "half": {"dtype": torch.bfloat16, "head_dim": 64, "sinks": True, "padded_rows": 1},
        "half+hybrid": {"dtype": torch.float16, "head_dim": 64, "hybrid": True},
        "half+branches": {"dtype": torch.bfloat16, "head_dim": 64, "topk": 2},
        "ragged": {"ragged": True},
        "strided": {"strided_rows": True},
    }
)
"""Name -> arguments of a scenario: numerics, and layouts that some modes have."""

SEED_STEP = 1000
"""From the seed of a cell to the next that is tried, where the first draws nothing to attend from."""
USUAL_VARIANTS = ("float32", "scores", "fp8", "hybrid", "branches")


@attrs.frozen(kw_only=True)
class Selection:
    """Which cells are run: all combinations of these lists that mean something.

    Attributes:
        kernels: names, "auto" for whatever the backend chooses.
        modes, overlays: names of `faback.testing`.
        page_sizes: tokens per page.
        variants: names from `VARIANTS`.
        seeds: one scenario each.
    """

    kernels: tuple[str, ...] = (AUTO,)
    modes: tuple[str, ...] = MODES
    overlays: tuple[str, ...] = OVERLAYS
    page_sizes: tuple[int, ...] = USUAL_PAGE_SIZES
    variants: tuple[str, ...] = USUAL_VARIANTS
    seeds: tuple[int, ...] = (0,)

    def cells(self) -> list[Cell]:
        """The cells, in the order in which they run."""
        axes = product(self.kernels, self.modes, self.overlays, self.variants, self.page_sizes, self.seeds)
        found = [Cell(*values) for values in axes]
        return [cell for cell in found if impossible(cell.options()) is None]


@attrs.frozen
class Cell:
    """One kernel on one scenario; the fields are those of `Selection`."""

    kernel: str
    mode: str
    overlay: str
    variant: str
    page_size: int
    seed: int

    def options(self) -> Options:
        """What the scenario is drawn from."""
        more = VARIANTS[self.variant]
        return Options(mode=self.mode, overlay=self.overlay, page_size=self.page_size, seed=self.seed, **more)

    def scenario(self) -> Scenario:
        """The scenario: the first of some seeds with a query in it, for without one every kernel would be right."""
        options = self.options()
        for seed in count(self.seed, SEED_STEP):
            scenario = Scenario.make(**attrs.asdict(attrs.evolve(options, seed=seed), recurse=False))
            queries = (token for step in scenario.steps for token in step.queries)
            if self.mode == "idle" or any(token is not None for token in queries):
                break
        return scenario

    def __str__(self) -> str:
        """The command that runs this cell alone."""
        flags = {"kernel": self.kernel, "mode": self.mode, "overlay": self.overlay, "variant": self.variant}
        flags |= {"page-size": str(self.page_size), "seed": str(self.seed)}
        return "faback check " + " ".join(f"--{name} {value}" for name, value in flags.items())


@attrs.frozen
class Verdict:
    """What became of a cell.

    Attributes:
        cell: which.
        status: the worst of all its passes and layers: "equal", "refused" or "wrong".
        reason: why it was refused, or what is wrong.
        scenario: the call that makes the scenario again.
    """

    cell: Cell
    status: str
    reason: str
    scenario: str


@attrs.frozen
class Report:
    """All verdicts.

    Attributes:
        device: where the cells ran.
        verdicts: in order.
        planned: number of cells that were to run; more than the verdicts if the first wrong one ended it.
        seconds: how long it took.
        unchecked: modes of plugins for which `faback.testing` has no scenarios.
    """

    device: str
    verdicts: tuple[Verdict, ...]
    planned: int
    seconds: float
    unchecked: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """Number of cells by status."""
        return {status: len(self.having(status)) for status in STATUSES}

    def having(self, status: str) -> list[Verdict]:
        """The verdicts of one status."""
        return [verdict for verdict in self.verdicts if verdict.status == status]

    def refusals(self) -> list[tuple[str, int]]:
        """Reasons for refusals and how often each was given, the most frequent first."""
        return Counter(f"{v.cell.kernel}: {short(v.reason)}" for v in self.having("refused")).most_common()


Progressed = Callable[[int, int, Verdict], None]
"""Called after each cell with its number from 1, the number of all, and the verdict."""


def command(
    everything: Annotated[bool, typer.Option("--all", help="All page sizes and variants.")] = False,
    kernel: Annotated[list[str] | None, typer.Option(help="Only this kernel; auto is the backend's choice.")] = None,
    mode: Annotated[list[str] | None, typer.Option(help="Only this forward mode.")] = None,
    overlay: Annotated[list[str] | None, typer.Option(help="Only this overlay.")] = None,
    variant: Annotated[list[str] | None, typer.Option(help="Only this variant: " + ", ".join(VARIANTS))] = None,
    page_size: Annotated[list[int] | None, typer.Option(min=1, help="Only this page size.")] = None,
    seed: Annotated[int, typer.Option(help="Of the scenarios.")] = 0,
    fuzz: Annotated[
        float | None, typer.Option(min=0, help="Instead, random scenarios on all kernels for so many seconds.")
    ] = None,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop at the first wrong cell.")] = False,
    pictures: Annotated[Path | None, typer.Option(help="A folder for pictures of who saw what in wrong cells.")] = None,
    device: DeviceName = None,
    as_json: AsJson = False,
) -> None:
    """Run combinations of modes, overlays, page sizes and kernels against the oracle. Exits with 1 if any is wrong.

    Options that narrow the choice can be given several times.
    """
    where, registry = parse_device(device), load_registry()
    if fuzz is not None:
        from faback.cli.fuzz import run as run_fuzz

        if run_fuzz(fuzz, seed, where, registry, main_console()):
            raise typer.Exit(1)
        return
    selection = Selection(
        kernels=choose("--kernel", kernel, *kernel_names(registry, where)),
        modes=choose("--mode", mode, MODES),
        overlays=choose("--overlay", overlay, OVERLAYS),
        variants=choose("--variant", variant, tuple(VARIANTS), tuple(VARIANTS) if everything else USUAL_VARIANTS),
        page_sizes=tuple(page_size or (PAGE_SIZES if everything else USUAL_PAGE_SIZES)),
        seeds=(seed,),
    )
    with Bar(side_console()) as progressed:
        report = run(selection, where, registry, fail_fast=fail_fast, progressed=progressed)
    if as_json:
        print_json(as_data(report))
    else:
        show(report, main_console())
    if report.counts["wrong"]:
        from faback.cli.testimony import testimony

        for line in testimony(report, where, registry, pictures):
            (side_console() if as_json else main_console()).print(Text(line), highlight=False)
        raise typer.Exit(1)


def run(
    selection: Selection,
    device: torch.device | str = "cpu",
    registry: Registry | None = None,
    *,
    fail_fast: bool = False,
    progressed: Progressed | None = None,
) -> Report:
    """Runs the selected cells.

    Args:
        selection: which.
        device: where they run.
        registry: plugins; the built-in and the installed ones unless given.
        fail_fast: stop after the first wrong cell.
        progressed: told about every cell.
    """
    registry = load_registry() if registry is None else registry
    cells, verdicts, start = selection.cells(), [], time.perf_counter()
    for cell in cells:
        verdicts.append(judge(cell, torch.device(device), registry))
        if progressed is not None:
            progressed(len(verdicts), len(cells), verdicts[-1])
        if fail_fast and verdicts[-1].status == "wrong":
            break
    unchecked = tuple(sorted(set(registry.modes(BackendConfig(context_len=1))) - set(MODES)))
    return Report(str(device), tuple(verdicts), len(cells), time.perf_counter() - start, unchecked)


def judge(cell: Cell, device: torch.device, registry: Registry) -> Verdict:
    """Runs one cell."""
    scenario, lse = cell.scenario(), has_lse(cell.kernel, device, registry)
    results = run_scenario(scenario, maker(cell.kernel, registry), device=device, lse=lse)
    worst = max(results, key=lambda result: STATUSES.index(result.status))
    return Verdict(cell, worst.status, _reason(worst), str(scenario))


def maker(kernel: str, registry: Registry) -> MakeBackend:
    """Backends with a kernel pinned."""

    def make(config: BackendConfig, pools: Pools, layers: tuple[AttentionLayer, ...]) -> AttentionBackend:
        return AttentionBackend(attrs.evolve(config, kernels=kernel), pools, layers, registry=registry)

    return make


def has_lse(name: str, device: torch.device, registry: Registry) -> bool:
    """Whether a kernel can be asked for its log-sum-exp; one that cannot is judged by its output alone."""
    for kernel in registry.kernels(device):
        if kernel.value.name == name and kernel.value.probe(device) is None:
            return "lse" in kernel.value.capabilities(device).features
    return True


def load_registry() -> Registry:
    """The built-in and the installed plugins, and the kernel that has nothing but lowerings to help it."""
    registry = Registry.load(BackendConfig(context_len=1), BUILTINS)
    registry.register(poor, f"{LOWERED} kernel", "faback.testing")
    return registry


def kernel_names(registry: Registry, device: torch.device) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names that a cell's kernel may have, and those of the kernels that can run on the device; "auto" is in both."""
    selector = Selector(BackendConfig(context_len=1), registry, device)
    here = (AUTO, *(kernel.name for kernel in selector.kernels))
    return (*here, *selector.absent), here


def choose(
    option: str, given: Sequence[str] | None, known: tuple[str, ...], usual: tuple[str, ...] | None = None
) -> tuple[str, ...]:
    """The names given on the command line, or the usual ones.

    Raises:
        ConfigError: a name that is not known.
    """
    for name in given or ():
        if name not in known:
            raise ConfigError(option, wanted=f"one of {', '.join(known)}", got=name)
    return tuple(given or usual or known)


def as_data(report: Report) -> dict[str, Any]:
    """A report as plain data, for JSON."""
    return {
        "device": report.device,
        "counts": report.counts,
        "planned": report.planned,
        "seconds": round(report.seconds, 3),
        "cells": [
            attrs.asdict(v.cell) | {"status": v.status, "reason": v.reason, "scenario": v.scenario}
            for v in report.verdicts
        ],
        "refusals": [{"reason": reason, "count": count} for reason, count in report.refusals()],
        "unchecked": list(report.unchecked),
    }


def show(report: Report, console: Console) -> None:
    """Prints a report: one table per kernel, then every reason, then every wrong cell and how to run it again."""
    for kernel in dict.fromkeys(v.cell.kernel for v in report.verdicts):
        console.print(_matrix(kernel, [v for v in report.verdicts if v.cell.kernel == kernel]))
    refusals = report.refusals()
    if refusals:
        rows = [(count, reason) for reason, count in refusals]
        console.print(table("Refused, by reason", ("cells", "reason"), rows))
    for verdict in report.having("wrong"):
        console.print(Text(f"wrong: {verdict.reason}", style=STYLES["wrong"]))
        console.print(Text(f"  run it again: {verdict.cell}\n  its scenario: {verdict.scenario}"))
    for mode in report.unchecked:
        console.print(Text(f"mode {mode} was not checked: faback.testing has no scenarios for it", style="yellow"))
    if report.planned > len(report.verdicts):
        console.print(Text(f"stopped after {len(report.verdicts)} of {report.planned} cells", style="yellow"))
    line = ", ".join(f"{count} {status}" for status, count in report.counts.items())
    style = STYLES["wrong" if report.counts["wrong"] else "equal"]
    console.print(Text(f"{line} on {report.device} in {report.seconds:.0f} s", style=style))


def short(reason: str) -> str:
    """A reason without what is particular to one cell: of a kernel search only the kernels' objections are left."""
    objections = [line.strip().removeprefix("- ") for line in reason.splitlines() if line.startswith("  - ")]
    return "; ".join(objections) or reason.strip()


class Bar:
    """A progress bar for a `with` block; silent where nobody would see it."""

    def __init__(self, console: Console) -> None:
        text = TextColumn("{task.description}")
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), text)
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)

    def __enter__(self) -> Progressed:
        self._progress.start()
        return partial(self._advance, self._progress.add_task("", total=None), Counter())

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def _advance(self, task: Any, counts: Counter[str], number: int, total: int, verdict: Verdict) -> None:
        counts[verdict.status] += 1
        so_far = ", ".join(f"{counts[status]} {status}" for status in STATUSES)
        self._progress.update(task, completed=number, total=total, description=f"{so_far}; {verdict.cell.mode}")


def _matrix(kernel: str, verdicts: Sequence[Verdict]) -> Any:
    """Modes down, overlays across, counts in the cells."""
    modes = list(dict.fromkeys(v.cell.mode for v in verdicts))
    overlays = list(dict.fromkeys(v.cell.overlay for v in verdicts))
    counts = Counter((v.cell.mode, v.cell.overlay, v.status) for v in verdicts)
    rows = [(mode, *(_cell({s: counts[mode, overlay, s] for s in STATUSES}) for overlay in overlays)) for mode in modes]
    return table(f"Kernel {kernel}", ("mode", *overlays), rows)


def _cell(counts: Mapping[str, int]) -> Text:
    parts = [Text(f"{count} {status}", style=STYLES[status]) for status, count in counts.items() if count]
    return Text("\n").join(parts) if parts else Text("-", style="dim")


def _reason(result: CellResult) -> str:
    where = [f"pass {result.step}" if result.step is not None else ""]
    where.append(f"layer {result.layer_id}" if result.layer_id is not None else "")
    prefix = ", ".join(part for part in where if part)
    return f"{prefix}: {result.reason}" if prefix and result.status == "wrong" else result.reason
