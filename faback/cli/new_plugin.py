"""`faback new-plugin`: writes a package that adds a mode, an overlay or a kernel, with tests that pass as written."""

from __future__ import annotations

import re
import shutil
import tempfile
from enum import Enum
from importlib import resources
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from faback.cli.output import main_console
from faback.core.errors import ConfigError

NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


class Kind(str, Enum):
    """What a plugin may bring, and what the one that is written brings."""

    mode = "mode"
    overlay = "overlay"
    kernel = "kernel"


WHAT = {
    Kind.mode: "a forward mode that sees the last few tokens of each request",
    Kind.overlay: "an overlay that limits causal layers to a window",
    Kind.kernel: "a kernel that knows causal attention over a page table",
}


def command(
    name: Annotated[str, typer.Argument(help="Of the package, like my-plugin.")],
    kind: Annotated[Kind, typer.Option(help="What it brings.")] = Kind.overlay,
    folder: Annotated[Path, typer.Option("--dir", help="Where the package's folder is made.")] = Path("."),
) -> None:
    """Write a plugin package: about forty lines of code, and tests by faback's kits."""
    path = write(name, kind, folder)
    console = main_console()
    console.print(f"{path}: {WHAT[kind]}", highlight=False)
    console.print(f"Its tests pass as written: cd {path} && pytest", highlight=False)


def write(name: str, kind: Kind, folder: Path) -> Path:
    """Writes the package `name` into a folder of that name; returns where it is.

    Raises:
        ConfigError: a name that is none, or a folder that exists or cannot be made. Nothing is left behind then.
    """
    if not NAME.fullmatch(name):
        hint = "The module is called the same, with underscores."
        raise ConfigError("name", wanted="lower-case words joined by hyphens, like my-plugin", got=name, hint=hint)
    path = folder / name
    if path.exists():
        raise ConfigError(f"folder {path}", wanted="one that does not exist yet", got="one that does")
    module = name.replace("-", "_")
    what = WHAT[kind]
    words = {"name": name, "module": module, "key": module, "what": what, "what_capital": what[0].upper() + what[1:]}
    files = {
        "pyproject.toml": "pyproject.toml",
        "README.md": "README.md",
        f"src/{module}/__init__.py": "init.py",
        f"src/{module}/plugin.py": f"{kind.value}.py",
        "tests/test_plugin.py": f"test_{kind.value}.py",
    }
    templates = resources.files("faback.cli").joinpath("templates")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=folder, prefix=f".{name}-"))
        try:
            work.chmod(0o755)
            for target, template in files.items():
                (work / target).parent.mkdir(parents=True, exist_ok=True)
                text = templates.joinpath(f"{template}.txt").read_text()
                (work / target).write_text(Template(text).substitute(words))
            work.rename(path)
        except BaseException:
            shutil.rmtree(work)
            raise
    except OSError as error:
        raise ConfigError(f"folder {path}", wanted="a place to write to", got=str(error)) from error
    return path
