"""Tries tile shapes of the Triton kernel on measured cases, to regenerate `faback/kernels/triton/tiles.py`.

    python benchmarks/tune.py "decode bs 64 ctx 4096" 16,64,4,3,2 16,32,4,3,2

Each shape is block_m,block_n,warps,stages,waves. Prints the error and the median time of each.
"""

from __future__ import annotations

import sys
from unittest.mock import patch

import torch
from cases import CASES

from faback.kernels.triton.tiles import Tile
from kernels import Problem, time_us


def main() -> None:
    """Times every shape on every case whose name begins with the first argument (several, separated by |)."""
    prefixes, shapes = sys.argv[1].split("|"), sys.argv[2:]
    for case in CASES:
        if not any(case.name == prefix for prefix in prefixes):
            continue
        torch.manual_seed(0)
        problem = Problem(case)
        results = []
        for shape in shapes:
            tile = Tile(*(int(n) for n in shape.split(",")))
            try:
                with patch("faback.kernels.triton.provider.pick", lambda *_, tile=tile: tile):
                    backend = problem.backend("triton")
                error = problem.check(backend)
                results.append((time_us(problem.run(backend), 15), shape, error))
            except Exception as problem_found:  # noqa: BLE001  a shape that does not fit is a result
                results.append((float("inf"), shape, repr(problem_found)[:80]))
        best = "  ".join(
            f"{us:.1f} ({shape}; {error if isinstance(error, str) else round(error, 4)})"
            for us, shape, error in sorted(results)[:7]
        )
        print(f"{case.name} floor {problem.floor_us():.0f} target {case.target_us}: {best}", flush=True)


if __name__ == "__main__":
    main()
