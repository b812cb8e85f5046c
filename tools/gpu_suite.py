"""Runs what needs a GPU in many processes at once: compiling is what takes time, and each compiles on one core.

    python tools/gpu_suite.py tests                   the tests marked gpu, of faback and of its plugins
    python tools/gpu_suite.py tests -k graphs
    python tools/gpu_suite.py check --kernel triton   `faback check` on the GPU, mode by mode and overlay by overlay
    python tools/gpu_suite.py check --page-size 16 --limit 240
    python tools/gpu_suite.py fuzz --limit 600        `faback check --fuzz`, a seed in each process

Prints whole what failed or was cut off, and counts what passed and was skipped. Exits with 1 if anything failed or did
not end within the limit.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import tomllib

from faback.testing.options import MODES, OVERLAYS, Options, impossible

ROOT = Path(__file__).parents[1]
COUNTS = re.compile(r"(\d+) (passed|failed|errors?|skipped|xfailed|scenarios|(?:cells )?equal|refused|wrong)\b")
ENDING = 120
"""Seconds that a fuzz is given to end, for it looks at the clock between scenarios."""


@attrs.frozen
class Job:
    """One process: a name, a command, where it runs, and folders of modules besides the checkout's."""

    name: str
    command: tuple[str, ...]
    where: Path = ROOT
    modules: tuple[Path, ...] = ()


@attrs.frozen
class Outcome:
    """How a job ended: its exit status, None if it was cut off, and what it printed."""

    job: Job
    status: int | None
    output: str

    @property
    def ended_well(self) -> bool:
        return self.status in (0, 5)  # 5: pytest had nothing to run

    @property
    def last_line(self) -> str:
        return self.output.strip().rpartition("\n")[2] or "no output"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["tests", "check", "fuzz"])
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--limit", type=float, default=540, help="seconds after which what still runs is cut off")
    parser.add_argument("-k", default="", help="tests: as for pytest")
    parser.add_argument("--kernel", action="append", help="check: as for `faback check`")
    parser.add_argument("--page-size", action="append", help="check: as for `faback check`")
    parser.add_argument("--variant", action="append", help="check: as for `faback check`")
    parser.add_argument("--seed", type=int, default=0, help="fuzz: of the first process")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        jobs = {"tests": tests, "check": checks, "fuzz": fuzzes}[args.what](args, Path(scratch))
        outcomes = run(jobs, args.processes, args.limit)
    return report(outcomes)


def tests(args: argparse.Namespace, scratch: Path) -> list[Job]:
    """Shares of the tests; a root's own settings hold for its tests, so no process has those of two."""
    chosen = ["-m", "gpu", *(["-k", args.k] if args.k else [])]
    jobs = []
    projects = [*sorted(path.parent for path in ROOT.glob("plugins/*/tests")), ROOT]  # the one of most tests last
    for root in (path for path in projects if '"gpu:' in (path / "pyproject.toml").read_text()):
        listing = subprocess.run(
            [*pytest("-q"), "--collect-only", *chosen, "tests"], cwd=root, capture_output=True, text=True, check=False
        )
        if listing.returncode not in (0, 5):  # 5: none collected
            raise SystemExit(f"{root.name} cannot be collected:\n{listing.stdout}{listing.stderr}")
        ids = [line for line in listing.stdout.splitlines() if "::" in line]
        known = announced(root, scratch)
        shares = [share for n in range(args.processes) if (share := ids[n :: args.processes])]
        for number, share in enumerate(shares):
            listed = scratch / f"{root.name}-{number}"
            listed.write_text("\n".join(share) + "\n")
            jobs.append(Job(f"{root.name} {number}", (*pytest("-v"), f"@{listed}"), root, (known,)))
    return jobs


def announced(root: Path, scratch: Path) -> Path:
    """A folder that makes a project's entry points known as installing it would."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    folder = scratch / f"announced-{root.name}"
    known = folder / f"{project['name'].replace('-', '_')}-0.dist-info"
    known.mkdir(parents=True, exist_ok=True)
    (known / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
    points = [
        (group, name, at) for group, names in project.get("entry-points", {}).items() for name, at in names.items()
    ]
    (known / "entry_points.txt").write_text("".join(f"[{group}]\n{name} = {at}\n" for group, name, at in points))
    return folder


def pytest(told: str) -> tuple[str, ...]:
    return sys.executable, "-m", "pytest", told, "-p", "no:cacheprovider"


def checks(args: argparse.Namespace, scratch: Path) -> list[Job]:
    """A process for each mode and overlay that go together."""
    pairs = [(mode, overlay) for mode in MODES for overlay in OVERLAYS]
    more = [word for kernel in args.kernel or ["triton"] for word in ("--kernel", kernel)]
    more += [word for size in args.page_size or ["16"] for word in ("--page-size", size)]
    more += [word for variant in args.variant or [] for word in ("--variant", variant)]
    base = (sys.executable, "-m", "faback", "check", "--device", "cuda", *more)
    return [
        Job(f"{mode} {overlay}", (*base, "--mode", mode, "--overlay", overlay))
        for mode, overlay in pairs
        if impossible(Options(mode=mode, overlay=overlay)) is None
    ]


def fuzzes(args: argparse.Namespace, scratch: Path) -> list[Job]:
    """A process for each seed."""
    base = (sys.executable, "-m", "faback", "check", "--device", "cuda", "--fuzz", str(max(1, args.limit - ENDING)))
    return [Job(f"seed {n}", (*base, "--seed", str(n))) for n in range(args.seed, args.seed + args.processes)]


def run(jobs: Sequence[Job], processes: int, limit: float) -> list[Outcome]:
    """All jobs, some at once, until the limit; says how each ended when it does."""
    end = time.monotonic() + limit

    def one(job: Job) -> Outcome:
        outcome = finished(job, max(0.0, end - time.monotonic()))
        print(told(outcome), flush=True)
        return outcome

    with ThreadPoolExecutor(processes) as pool:
        return list(pool.map(one, jobs))


def finished(job: Job, seconds: float) -> Outcome:
    """Runs a job for so long at most."""
    try:
        result = subprocess.run(
            job.command,
            cwd=job.where,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": paths(job.modules)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        return Outcome(job, None, output.decode() if isinstance(output, bytes) else output)
    return Outcome(job, result.returncode, result.stdout)


def paths(more: Sequence[Path]) -> str:
    """Where Python looks: this checkout, its plugins where they are not installed, and more."""
    sources = [str(path) for path in (*sorted(ROOT.glob("plugins/*/src")), *more)]
    return os.pathsep.join([str(ROOT), *sources, *filter(None, [os.environ.get("PYTHONPATH")])])


def told(outcome: Outcome) -> str:
    """A line if all is well, otherwise all that the job printed."""
    if outcome.ended_well:
        return f"{outcome.job.name}: {outcome.last_line}"
    how = "cut off" if outcome.status is None else f"exit status {outcome.status}"
    return f"== {outcome.job.name}: {how}\n{outcome.output}"


def report(outcomes: Sequence[Outcome]) -> int:
    """Prints the sums; 1 unless all is well."""
    counts: Counter[str] = Counter()
    for outcome in outcomes:
        for number, word in COUNTS.findall(outcome.last_line):
            counts[word] += int(number)
    cut = sum(outcome.status is None for outcome in outcomes)
    bad = sum(not outcome.ended_well for outcome in outcomes) - cut
    sums = ", ".join(f"{number} {word}" for word, number in sorted(counts.items()))
    print(f"{len(outcomes)} processes: {bad} failed, {cut} cut off. {sums}")
    return int(bool(bad or cut))


if __name__ == "__main__":
    sys.exit(main())
