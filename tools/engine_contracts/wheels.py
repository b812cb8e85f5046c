"""What the tools beside this one share: a wheel's modules as syntax trees, and a record that is written or compared."""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def run(document: str | None, recorded: Path, contract: Callable[[Path], dict[str, Any]]) -> int:
    """The command line: compares what a wheel has with the record, or writes it; 1 where they differ.

    Args:
        document: what `--help` says.
        recorded: the file.
        contract: a wheel -> what is recorded of it.
    """
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--record", action="store_true", help="write instead of comparing")
    args = parser.parse_args()
    found = json.dumps({"distribution": distribution(args.wheel), **contract(args.wheel)}, indent=1) + "\n"
    if args.record:
        recorded.write_text(found)
        print(f"recorded in {recorded}")
        return 0
    before, after = recorded.read_text().splitlines(), found.splitlines()
    differences = list(difflib.unified_diff(before, after, str(recorded), str(args.wheel), lineterm=""))
    print("\n".join(differences) or f"{args.wheel.name} is as recorded")
    return int(bool(differences))


def distribution(wheel: Path) -> str:
    """Name and version."""
    return "-".join(wheel.name.split("-")[:2])


def trees(wheel: Path, modules: Iterable[str]) -> dict[str, ast.Module]:
    """The modules, by name."""
    found = {}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        for module in modules:
            stem = module.replace(".", "/")
            path = next(path for path in (f"{stem}.py", f"{stem}/__init__.py") if path in names)
            found[module] = ast.parse(archive.read(path))
    return found
