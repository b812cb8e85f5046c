"""Serves mixed traffic for thousands of steps and looks for what grows: memory, allocations, time.

    python tools/soak.py --steps 10000 --json benchmarks/results/h200-soak.json

Requests come, are prefilled (planned anew), decoded and verified (CUDA graphs; on a CPU, replayed plans) and go, over a
hybrid pool whose window slides. Now and then everything stands still for a measurement, of the same passes each time.
Exits with 1 if anything grew after the warm-up, an answer was wrong, or a page was lost.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from traffic import CPU, GPU, Traffic

from faback.core.files import write_json

REPEATS = 20
"""Passes behind one measured time."""
SAMPLES = 30
"""Measurements of a run; the first third is the warm-up."""
HOST_GROWTH, OBJECT_GROWTH = 32 << 20, 2000
"""Bytes and Python objects that may be more at the end than after the warm-up."""


@attrs.frozen(kw_only=True)
class Sample:
    """What was measured at one moment.

    Attributes:
        step: after how many.
        host_bytes, objects: resident memory, and Python objects that are tracked.
        allocated_bytes, reserved_bytes, segments: of torch on the device; how often it asked the driver for memory.
        replay_ms, plan_ms: median of the same decode step, replayed and planned.
    """

    step: int
    host_bytes: int
    objects: int
    allocated_bytes: int
    reserved_bytes: int
    segments: int
    replay_ms: float
    plan_ms: float


def run(traffic: Traffic, steps: int, told: Callable[[Sample], None] = lambda found: None) -> list[Sample]:
    """All steps, with samples at equal distances; then everybody leaves."""
    every, samples = max(1, steps // SAMPLES), []
    for number in range(1, steps + 1):
        traffic.step(number)
        if number % every == 0:
            samples.append(sample(traffic, number))
            told(samples[-1])
    traffic.finish()
    return samples


def sample(traffic: Traffic, step: int) -> Sample:
    """Stands still and measures."""
    lens, rows = [r.length for r in traffic.standing], [r.row for r in traffic.standing]
    last = torch.tensor([int(r.slots[-1]) for r in traffic.standing])
    batch = traffic.batch("decode", rows, lens, last)
    inputs = traffic.inputs(len(rows))
    runner = traffic.runners["decode"]
    replay = median(traffic, lambda: runner.run(batch, **inputs))
    plan = median(traffic, lambda: traffic.backend.plan(batch))
    traffic.backend.current = None
    gc.collect()
    stats = torch.cuda.memory_stats(traffic.device) if traffic.on_gpu else {}
    return Sample(
        step=step,
        host_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        objects=len(gc.get_objects()),
        allocated_bytes=stats.get("allocated_bytes.all.current", 0),
        reserved_bytes=stats.get("reserved_bytes.all.current", 0),
        segments=stats.get("segment.all.allocated", 0),
        replay_ms=replay,
        plan_ms=plan,
    )


def median(traffic: Traffic, call: Callable[[], Any]) -> float:
    """Milliseconds of a call, the device's time included."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        if traffic.on_gpu:
            torch.cuda.synchronize(traffic.device)
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def judge(traffic: Traffic, samples: Sequence[Sample], drift: float) -> list[str]:
    """What is wrong, in words. What grows is told by the samples after the first third.

    Args:
        traffic: after its end.
        samples: in order, at least 9.
        drift: how many times as long a pass may take at the end.
    """
    kept = samples[len(samples) // 3 :]
    third = max(1, len(kept) // 3)

    def ends(name: str) -> tuple[float, float]:
        first, last = (statistics.median(getattr(s, name) for s in part) for part in (kept[:third], kept[-third:]))
        return first, last

    found = []
    for name, limit in (("host_bytes", HOST_GROWTH), ("objects", OBJECT_GROWTH)):
        first, last = ends(name)
        if last - first > limit:
            found.append(f"{name} grew from {first:.0f} to {last:.0f}")
    for name in ("allocated_bytes", "reserved_bytes", "segments"):
        first, last = getattr(kept[0], name), getattr(kept[-1], name)
        if last > first:
            found.append(f"{name} grew from {first} to {last}")
    for name in ("replay_ms", "plan_ms"):
        first, last = ends(name)
        if last > drift * first:
            found.append(f"{name} went from {first:.3f} to {last:.3f}")
    if traffic.replay_allocations:
        found.append(f"replays asked for memory {traffic.replay_allocations} times")
    if traffic.error > traffic.sizes.error:
        found.append(f"graphs and plans differ by {traffic.error:.3g}, allowed {traffic.sizes.error:.3g}")
    if traffic.lost_pages:
        found.append(f"{traffic.lost_pages} pages were lost")
    return found


def environment(traffic: Traffic, commit: str | None) -> dict[str, Any]:
    if not traffic.on_gpu:
        return {"gpu": None, "torch": torch.__version__, "commit": commit}
    from faback.cli.bench import environment as on_gpu

    return on_gpu(commit)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--drift", type=float, default=1.25, help="how many times as long a pass may take at the end")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    parser.add_argument("--commit", help="the commit that is measured, where git is not at hand")
    args = parser.parse_args(arguments)
    if args.steps < SAMPLES:
        parser.error(f"--steps: wanted at least {SAMPLES}, got {args.steps}")
    device = torch.empty(0, device=args.device).device
    traffic, start = Traffic(device, GPU if device.type == "cuda" else CPU, args.seed), time.perf_counter()
    samples = run(traffic, args.steps, lambda sample: print(sample, file=sys.stderr, flush=True))
    found, seconds = judge(traffic, samples, args.drift), time.perf_counter() - start
    counts = {"steps": args.steps, "seconds": round(seconds, 1), "requests": traffic.served, "tokens": traffic.tokens}
    if args.json is not None:
        report = environment(traffic, args.commit) | {"suite": "soak", "seed": args.seed, "drift": args.drift} | counts
        report |= {
            "graphs": str(traffic.memory),
            "error": traffic.error,
            "replay_allocations": traffic.replay_allocations,
        }
        write_json(args.json, report | {"findings": found, "samples": [attrs.asdict(sample) for sample in samples]})
    for finding in found:
        print(f"wrong: {finding}")
    print(", ".join(f"{value} {name}" for name, value in counts.items()) + f", {len(found)} findings on {device}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
