"""How commands speak: the result goes to stdout, everything else to stderr."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from faback.core.errors import ConfigError, FabackError

USER_ERROR = 2
WIDE = 100_000
"""Columns for output that goes to a file or a pipe, where wrapping only breaks lines that a program reads."""

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else there.")]
DeviceName = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1 ... (default: the GPU, if any).")]


class Commands(TyperGroup):
    """The group of all commands: prints faback's own errors without a traceback and exits with 2."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the chosen command."""
        try:
            return super().invoke(ctx)
        except FabackError as error:
            fail(error)


def fail(error: FabackError) -> None:
    """Prints an error on stderr and ends the command with exit code 2."""
    console = side_console()
    message = Text(str(error).strip())
    if console.is_terminal:
        console.print(Panel(message, title=type(error).__name__, border_style="red"))
    else:
        console.print(Text(f"{type(error).__name__}: ") + message)
    raise typer.Exit(USER_ERROR)


def main_console() -> Console:
    """Where results go."""
    return _console(stderr=False)


def side_console() -> Console:
    """Where progress and errors go."""
    return _console(stderr=True)


def print_json(value: object) -> None:
    """Prints a value as JSON on stdout."""
    typer.echo(json.dumps(value, indent=2))


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table whose cells are taken literally.

    Args:
        title: what it lists.
        columns: headings.
        rows: one cell per column; a `Text` keeps its style.
    """
    result = Table(title=title, title_justify="left", title_style="bold")
    for heading in columns:
        result.add_column(heading, overflow="fold")
    for row in rows:
        result.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return result


def first_line(thing: object) -> str:
    """First line of the docstring of an object's own class."""
    return inspect.cleandoc(type(thing).__doc__ or "").partition("\n")[0]


def parse_device(name: str | None) -> torch.device:
    """The device of that name, as tensors on it report it; the GPU if there is one where no name is given.

    Raises:
        ConfigError: no such device here.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        wanted = "a device of this machine, like cpu or cuda:0"
        raise ConfigError("--device", wanted=wanted, got=name, hint=str(error).partition("\n")[0]) from error


def parse_dtype(option: str, name: str) -> torch.dtype:
    """The torch dtype of that name.

    Raises:
        ConfigError: torch has none.
    """
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(option, wanted="a torch dtype, like bfloat16 or float8_e4m3fn", got=name)
    return found


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    piped = not stream.isatty() and "COLUMNS" not in os.environ
    return Console(stderr=stderr, width=WIDE if piped else None)
