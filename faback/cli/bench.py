"""`faback bench`: times kernels on the GPU of this machine, each figure beside its check."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import faback
from faback.bench.warm import warm
from faback.cli.output import main_console, side_console, table
from faback.core.errors import ConfigError
from faback.core.files import write_json

SUITES = ("kernels", "providers", "step")


def command(
    suite: Annotated[str, typer.Option(help="What is measured: " + ", ".join(SUITES))] = "kernels",
    kernel: Annotated[list[str] | None, typer.Option(help="A kernel; may be given several times.")] = None,
    only: Annotated[str, typer.Option(help="Cases whose name contains this.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report to this file.")] = None,
    processes: Annotated[
        int, typer.Option("--warm", min=0, help="Compile in so many processes before anything is timed.")
    ] = 0,
    commit: Annotated[str | None, typer.Option(help="The commit that is measured, where git is not at hand.")] = None,
) -> None:
    """Measure. Exits with 1 if anything failed or was wrong."""
    if suite not in SUITES:
        raise ConfigError("--suite", wanted=f"one of {', '.join(SUITES)}", got=suite)
    if not torch.cuda.is_available():
        raise ConfigError("faback bench", wanted="a CUDA GPU", got="none", hint="Kernels are timed where they run.")
    if processes:
        names = [name for name in _names(suite) if only in name]
        say = partial(side_console().print, markup=False, highlight=False)
        warm(partial(_discard, suite, kernel or []), names, processes, lambda name: say(f"compiling: {name}"))
    rows: list[dict[str, Any]] = []
    report = None if json_file is None else environment(commit) | {"suite": suite, "rows": rows}
    for row in _rows(suite, kernel or [], only):
        side_console().print(" ".join(f"{name}={value}" for name, value in row.items()), highlight=False)
        rows.append(row)
        if json_file is not None:  # after each row: a run that is cut off keeps what it had
            write_json(json_file, report)
    columns = tuple(dict.fromkeys(name for row in rows for name in row))
    shown = [[row.get(column, "") for column in columns] for row in rows]
    main_console().print(table(f"Suite {suite}, {torch.cuda.get_device_name()}", columns, shown))
    if any(name.endswith("_failed") and not name.startswith("fa3") for row in rows for name in row):
        raise typer.Exit(1)


def _rows(suite: str, kernels: Sequence[str], only: str) -> Iterator[dict[str, Any]]:
    from faback.bench import kernels as attention
    from faback.bench import providers, steps

    if suite == "providers":
        return providers.run(kernels, only)
    return {"kernels": attention.run, "step": steps.run}[suite](kernels or ["triton"], only)


def _names(suite: str) -> list[str]:
    """What a suite measures, the largest last in its lists and so first here."""
    from faback.bench.builds import BUILDS
    from faback.bench.cases import CASES, MORE, STEPS

    cases = {"kernels": CASES, "providers": (*CASES, *MORE), "step": (*BUILDS, *STEPS)}
    return [case.name for case in reversed(cases[suite])]


def _discard(suite: str, kernels: Sequence[str], name: str) -> None:
    """Measures what has a name and throws the figures away, which other processes have spoilt."""
    try:
        for _ in _rows(suite, kernels, name):
            pass
    finally:
        torch.cuda.empty_cache()  # for the other processes


def environment(commit: str | None = None) -> dict[str, Any]:
    """What a figure depends on: GPU, versions and commit."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "gpu": torch.cuda.get_device_name(),
        "commit": commit or found.stdout.strip() or "unknown",
        "faback": faback.__version__,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "fa2": _version("flash-attn"),
        "fa3": _version("tokenspeed-fa3") or _version("flash-attn-3"),
        "fa4": _version("flash-attn-4"),
    }


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
