"""Runs the tests of plugins as their users have them: each in an environment of its own, from built wheels.

    python tools/plugin_suites.py                 every plugin of this repository, and one of each kind that
                                                  `faback new-plugin` writes
    python tools/plugin_suites.py plugins/faback-sdpa

An environment holds the wheel of faback, that of the plugin, and what the two and the plugin's extra `dev` declare,
with what that needs in turn. Other packages are linked from the environment that runs this, so nothing is downloaded;
what a plugin uses without saying so is missing there, and its tests fail.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
KINDS = ("mode", "overlay", "kernel")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plugins", nargs="*", type=Path, help="folders of plugins; all, and new ones, if none is given")
    parser.add_argument("--beside", action="append", default=[], help="a distribution to have there without its needs")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1), help="how many suites at once")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        suites = Suites(Path(scratch), args.beside)
        chosen = [path.resolve() for path in args.plugins] or [*every_plugin(), *suites.written()]
        with ThreadPoolExecutor(args.jobs) as pool:
            outcomes = list(pool.map(suites.run, chosen))
    return int(not all(outcomes))


def every_plugin() -> list[Path]:
    return sorted(path.parent for path in ROOT.glob("plugins/*/tests"))


class Suites:
    """Environments in one folder, and what was built for them."""

    def __init__(self, scratch: Path, beside: Sequence[str]) -> None:
        self._scratch, self._beside = scratch, beside
        self._faback = self._wheel(ROOT)

    def written(self) -> list[Path]:
        """New plugins, as the command of the wheel writes them."""
        python = self._environment("new-plugin", [self._faback], ["faback[cli]"])
        for kind in KINDS:
            command = [python, "-m", "faback", "new-plugin", f"new-{kind}", "--kind", kind, "--dir", self._scratch]
            quietly(command, self._scratch)
        return [self._scratch / f"new-{kind}" for kind in KINDS]

    def run(self, plugin: Path) -> bool:
        """Whether a plugin's tests pass. Prints their last line, or everything."""
        start = time.monotonic()
        python = self._environment(plugin.name, [self._faback, self._wheel(plugin)], [f"{plugin.name}[dev]"])
        # Not the folder `src`, which tests of a checkout use.
        options = ["-o", "pythonpath=tests", "-p", "no:cacheprovider", "-q"]
        command = [python, "-m", "pytest", *options, "tests"]
        result = subprocess.run(
            command, cwd=plugin, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        lines = result.stdout.strip().splitlines() or ["no output"]
        passed = result.returncode == 0
        told = lines[-1] if passed else "\n".join([f"pytest ended with {result.returncode}", *lines])
        print(f"{plugin.name}: {told} ({time.monotonic() - start:.0f} s in all)", flush=True)
        return passed

    def _wheel(self, project: Path) -> Path:
        out = self._scratch / "wheels" / project.name
        quietly([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, project], self._scratch)
        (wheel,) = out.glob("*.whl")
        return wheel

    def _environment(self, name: str, wheels: Sequence[Path], requirements: Sequence[str]) -> Path:
        """The interpreter of a new environment that has the wheels and what the requirements need, nothing else."""
        path = self._scratch / "environments" / name
        venv.EnvBuilder(symlinks=True, with_pip=False).create(path)
        python = path / "bin" / "python"
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps"]
        quietly([*pip, *wheels], self._scratch)
        (site,) = path.glob("lib/python*/site-packages")
        for distribution in [*needed(requirements, site), *installed(self._beside)]:
            link(distribution, site)
        code = "import faback; print(faback.__file__)"
        found = quietly([python, "-c", code], self._scratch).strip()
        if not Path(found).is_relative_to(site):
            raise SystemExit(f"{name}: wanted faback from its wheel, got {found}")
        return python


def needed(requirements: Iterable[str], site: Path) -> list[metadata.Distribution]:
    """What the requirements need, and that in turn, besides what `site` has."""
    inside = {canonicalize_name(d.metadata["Name"]): d for d in metadata.distributions(path=[str(site)])}
    found: dict[str, metadata.Distribution] = {}
    waiting = [Requirement(text) for text in requirements]
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        fresh = {(name, extra) for extra in {"", *requirement.extras}} - seen
        if not fresh:
            continue
        seen |= fresh
        distribution = inside.get(name) or metadata.distribution(name)
        if name not in inside:
            found[name] = distribution
        needs = [Requirement(text) for text in distribution.requires or ()]
        for _, extra in fresh:
            waiting += [r for r in needs if r.marker is None or r.marker.evaluate({"extra": extra})]
    return list(found.values())


def installed(names: Iterable[str]) -> list[metadata.Distribution]:
    """Those of the distributions that are installed here."""
    return [distribution for name in names for distribution in metadata.distributions(name=name)]


def link(distribution: metadata.Distribution, site: Path) -> None:
    """Makes a distribution visible in another environment."""
    for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
        there = site / top
        if not there.exists():
            there.symlink_to(Path(distribution.locate_file(top)).resolve())


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FABACK_", "PYTEST_"))}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def quietly(command: Sequence[str | Path], where: Path) -> str:
    """Runs a command that must succeed; what it printed."""
    result = subprocess.run(
        command, cwd=where, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if result.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {result.returncode}:\n{result.stdout}")
    return result.stdout


if __name__ == "__main__":
    sys.exit(main())
