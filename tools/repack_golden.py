"""Packs recorded scenarios, one .npz each beside an index.json, into the archive that the tests read.

    python tools/repack_golden.py SRC DEST.tar.xz

DEST holds `index.json` and one `<scenario>/<key>.npy` per array. What describes the recording implementation's own
metadata (`meta.*` and `expand.*`, also below another tag) is left out, and so is its output wherever an independent
oracle's is there. An unnamed call gets the tag "run", which its arrays have already. The same SRC gives the same
bytes.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import sys
import tarfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

PRIVATE = frozenset({"meta", "expand"})
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "lp": 1, "pb": 1}]
"""Most of the bytes are float16, hence two-byte positions."""


def keeps(key: str, keys: Collection[str]) -> bool:
    """Whether an array belongs into the archive, given the names of all arrays of its scenario."""
    parts = key.split(".")
    if PRIVATE.intersection(parts):
        return False
    return parts[-1] != "out" or ".".join([*parts[:-1], "oracle"]) not in keys


def describe(entry: dict[str, Any]) -> dict[str, Any]:
    """A scenario's line of the index: its name, its configuration and its calls in order."""
    calls = [[tag or "run", layer, kind] for tag, layer, kind in entry["calls"]]
    return {"name": entry["scenario"], "cfg": entry["cfg"], "calls": calls}


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    """Appends a member that carries no date and no owner."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def encode(array: np.ndarray) -> bytes:
    """An array as the bytes of a .npy file."""
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.ascontiguousarray(array).reshape(array.shape), allow_pickle=False)
    return buffer.getvalue()


def repack(source: Path) -> bytes:
    """The archive's bytes."""
    index = json.loads((source / "index.json").read_text())
    entries = sorted(index["files"], key=lambda entry: entry["scenario"])
    listing = {"tolerance": index["tolerance"], "scenarios": [describe(entry) for entry in entries]}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        add(tar, "index.json", json.dumps(listing, indent=1, sort_keys=True).encode())
        for entry in entries:
            with np.load(source / entry["file"], allow_pickle=False) as arrays:
                for key in sorted(arrays.files):
                    if keeps(key, arrays.files):
                        add(tar, f"{entry['scenario']}/{key}.npy", encode(arrays[key]))
    return lzma.compress(buffer.getvalue(), filters=FILTERS)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Pack recorded scenarios into one archive.")
    parser.add_argument("source", type=Path, help="folder with index.json and the .npz files")
    parser.add_argument("destination", type=Path, help="the .tar.xz to write")
    args = parser.parse_args(argv)
    data = repack(args.source)
    args.destination.parent.mkdir(parents=True, exist_ok=True)
    args.destination.write_bytes(data)
    print(f"{args.destination}: {len(data):,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
