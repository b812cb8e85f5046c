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
    """Does work by name, each in one of some fresh processes.

    Nothing is raised for work that fails. What fails for good does so again, and is told, when it is measured; what
    found no memory beside the other processes is compiled then.

    Args:
        work: can be pickled.
        names: what there is to do; the costliest had better come first.
        processes: at once.
        say: told each name that is done, with the reason if that failed.
    """
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for name in pool.map(partial(_done, work), names):
            say(name)


def _done(work: Callable[[str], None], name: str) -> str:
    try:
        work(name)
    except Exception as error:  # noqa: BLE001  see above
        return f"{name} failed, {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    return name
