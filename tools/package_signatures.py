"""Reads what the FlashAttention packages call their arguments off their archives, without importing or building them.

    pip download --no-deps -d DIR flash-attn-4 tokenspeed-fa3 ...
    python tools/package_signatures.py DIR/*                 compares with what is recorded, and fails if it differs
    python tools/package_signatures.py DIR/* --record        writes it to tests/kernels/signatures.json

`tests/kernels/test_signatures.py` holds the adapters and their stand-ins to what is recorded.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

RECORDED = Path(__file__).parents[1] / "tests" / "kernels" / "signatures.json"
WANTED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "flash_attn": {"flash_attn/flash_attn_interface.py": ("flash_attn_with_kvcache", "_flash_attn_varlen_forward")},
    "tokenspeed_fa3": {
        "flash_attn_interface.py": ("flash_attn_with_kvcache",),
        "flash_attn_3/_C.abi3.so": ("fwd", "get_scheduler_metadata"),
    },
    "flash_attn_4": {"flash_attn/cute/interface.py": ("flash_attn_varlen_func",)},
}
"""Distribution -> file -> functions; of a library, operators whose schemas stand in it as text."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archives", nargs="+", type=Path, help="wheels and source archives")
    parser.add_argument("--record", action="store_true", help="write instead of comparing")
    args = parser.parse_args()
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    found = dict(signatures(archive) for archive in args.archives)
    if args.record:
        RECORDED.write_text(json.dumps({**recorded, **found}, indent=1, sort_keys=True) + "\n")
        return 0
    differences = [line for name, now in found.items() for line in compare(name, recorded.get(name), now)]
    print("\n".join(differences) or "as recorded")
    return bool(differences)


def signatures(archive: Path) -> tuple[str, dict[str, object]]:
    """The distribution, its version and, by function, the names of its parameters in order."""
    name, version = re.match(r"(.+?)-(\d[^-]*?)(-|\.tar\.gz$)", archive.name).group(1, 2)
    if name not in WANTED:
        raise SystemExit(f"{archive}: wanted an archive of {', '.join(WANTED)}")
    functions: dict[str, str] = {}
    for file, names in WANTED[name].items():
        content = read(archive, file)
        functions |= of_source(content, names) if file.endswith(".py") else of_library(content, names)
        missing = [function for function in names if function not in functions]
        if missing:
            raise SystemExit(f"{archive}: {file} has no {', '.join(missing)}")
    return name, {"version": version, "functions": functions}


def read(archive: Path, file: str) -> bytes:
    """A file of a wheel, or of a source archive, whose files lie in one folder."""
    if archive.suffix == ".whl":
        return zipfile.ZipFile(archive).read(file)
    with tarfile.open(archive) as source:
        member = next(member for member in source if member.name.partition("/")[2] == file)
        return source.extractfile(member).read()


def of_source(content: bytes, names: tuple[str, ...]) -> dict[str, str]:
    """Parameters of functions of a Python module."""
    found = {}
    for node in ast.parse(content).body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            arguments = node.args
            found[node.name] = ", ".join(
                a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
            )
    return found


def of_library(content: bytes, names: tuple[str, ...]) -> dict[str, str]:
    """Parameters of operators, from the schemas that the library registers them with."""
    found = {}
    for name in names:
        schema = re.search(rb"(?<!\w)" + name.encode() + rb"\(((?:Tensor|int) [^\0]*?)\) ?->", content)
        if schema is not None:
            parameters = re.sub(r"\(\w*!\)", "", schema[1].decode()).split(",")
            found[name] = ", ".join(re.sub(r"=.*", "", parameter).split()[-1] for parameter in parameters)
    return found


def compare(name: str, before: Mapping | None, now: Mapping) -> list[str]:
    """What has changed, a line for each function."""
    if before is None:
        return [f"{name} {now['version']}: nothing is recorded"]
    return [
        f"{name} {now['version']}: {function}({parameters}), recorded from {before['version']}: "
        f"({before['functions'].get(function, 'nothing')})"
        for function, parameters in now["functions"].items()
        if parameters != before["functions"].get(function)
    ]


if __name__ == "__main__":
    sys.exit(main())
