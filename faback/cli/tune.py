"""`faback tune`: measures the kernels on the GPU of this machine and writes the table that "auto" goes by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from faback.cli.bench import environment
from faback.cli.output import main_console, side_console
from faback.core.errors import ConfigError
from faback.core.files import write_json
from faback.core.kernel import arch_of
from faback.core.measured import parse, user_file


def command(
    out: Annotated[Path | None, typer.Option(help="The file to write; the one that is read by default.")] = None,
    only: Annotated[str, typer.Option(help="Cases whose name contains this.")] = "",
) -> None:
    """Measure every kernel that runs here, and have "auto" go by the figures. Takes a minute or two."""
    if not torch.cuda.is_available():
        raise ConfigError("faback tune", wanted="a CUDA GPU", got="none", hint="Kernels are timed where they run.")
    from faback.bench.providers import tuned

    points = []
    for row, point in tuned(only):
        side_console().print(" ".join(f"{name}={value}" for name, value in row.items()), highlight=False)
        points.append(point)
    path = out or user_file(arch_of(torch.device("cuda")))
    write(path, environment(None) | {"points": points})
    main_console().print(f"{len(points)} shapes measured; written to {path}")


def write(path: Path, table: dict[str, Any]) -> None:
    """Writes a table, for its owner alone: either all of it is there afterwards, or the file is as it was.

    Raises:
        ConfigError: nobody could read it again, or nothing can be written there.
    """
    parse(json.dumps(table), str(path))
    write_json(path, table)
