"""Tries tile shapes of the Triton kernel on measured cases, to regenerate `faback/kernels/triton/tiles.py`.

    python benchmarks/tune.py "decode bs 64 ctx 4096" 16,64,4,3,2 16,32,1,4,6 128,64,8,3,1,0,128

Each shape is block_m, block_n, warps, stages, waves and, if given, heads_first (0 or 1) and registers. All are compiled
in parallel first; then each is checked and timed. Prints the median and the error of each, the fastest first.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from unittest.mock import patch

import torch

from faback.bench.cases import CASES, Case
from faback.bench.problem import Problem
from faback.bench.timing import graph_us
from faback.kernels.triton.tiles import Tile


def tile(text: str) -> Tile:
    """The tile that a command line argument means."""
    numbers = [int(n) for n in text.split(",")]
    heads_first = bool(numbers[5]) if len(numbers) > 5 else True
    return Tile(*numbers[:5], heads_first=heads_first, registers=numbers[6] if len(numbers) > 6 else None)


def figures(case: Case, tiles: list[Tile], timed: bool) -> list[tuple[float, Tile, str]]:
    """Median and error of every tile; with `timed` False the kernels are only compiled and run once."""
    problem, found = Problem(case), []
    for shape in tiles:
        try:
            with patch("faback.kernels.triton.provider.pick", lambda *_, shape=shape: shape):
                backend = problem.backend("triton")
            error = problem.error(problem.run(backend))
            found.append((graph_us(problem.run(backend)) if timed else 0.0, shape, f"{error:.4f}"))
        except Exception as problem_found:  # noqa: BLE001  a shape that does not fit is a result
            found.append((float("inf"), shape, repr(problem_found)[:80]))
    return sorted(found, key=lambda figure: figure[0])


def main() -> None:
    """Times every shape on every named case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", help="names of cases, separated by |")
    parser.add_argument("tiles", nargs="+", type=tile)
    parser.add_argument("--workers", type=int, default=8, help="processes that compile")
    args = parser.parse_args()
    cases = [case for case in CASES if case.name in args.case.split("|")]
    torch.cuda.init()
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        for job in [pool.submit(figures, case, [shape], False) for case in cases for shape in args.tiles]:
            job.result()
    for case in cases:
        print(f"{case.name}: target {case.target_us} us")
        for microseconds, shape, error in figures(case, args.tiles, True):
            print(f"  {microseconds:8.1f} us  error {error}  {shape}")


if __name__ == "__main__":
    main()
