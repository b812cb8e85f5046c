"""Everything that a suite measures, once and in many processes: Triton keeps what it compiles on disk, and so does FA4.

Compiling takes seconds a kernel, on one core each; a measurement wants the machine for itself and nothing to compile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context


def warm(
    work: Callable[[str], None], names: Sequence[str], processes: int, say: Callable[[str], None] = lambda name: None
) -> None:
    """Does work by name, each in one of some fresh processes. What fails there will fail, and be told, when measured.

    Args:
        work: can be pickled.
        names: what there is to do; the costliest had better come first.
        processes: at once.
        say: told each name that is done.
    """
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for name in pool.map(partial(_done, work), names):
            say(name)


def _done(work: Callable[[str], None], name: str) -> str:
    work(name)
    return name
