"""What a failed check says: the smallest scenario that fails, who saw what in it, and a picture of that."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs

from faback.core.errors import ConfigError
from faback.testing.checks import EQUAL, WRONG, CellResult, MakeBackend, run_scenario
from faback.testing.drawing import available, draw, save
from faback.testing.fuzz import shrunk
from faback.testing.observed import Observation, observe
from faback.testing.options import Options
from faback.testing.scenario import Scenario

FOLDER_VARIABLE = "FABACK_PICTURES"
"""Environment variable: the folder that pictures of failures go to."""
PATIENCE = 2.0
"""Seconds that may be spent on making one failure smaller."""
COMPLAINTS = 12
"""Rows of q that are named."""

Build = Callable[[Options], Scenario]
"""From options to a scenario as the test judges it."""


@attrs.frozen
class Runs:
    """How scenarios are run.

    Attributes:
        make: builds the backend under test.
        device: where.
        lse: ask for the log-sum-exp as well.
        fails: whether a cell is not as it must be; unless given, whatever is not equal.
    """

    make: MakeBackend
    device: str = "cpu"
    lse: bool = True
    fails: Callable[[CellResult], bool] = lambda result: result.status != EQUAL

    def failures(self, scenario: Scenario) -> list[CellResult]:
        """The cells that are not as they must be."""
        results = run_scenario(scenario, self.make, device=self.device, lse=self.lse)
        return [result for result in results if self.fails(result)]


def report(options: Options, build: Build, runs: Runs, folder: Callable[[], Path]) -> str:
    """What is wrong with a scenario, "" if nothing is.

    Args:
        options: of the scenario.
        build: makes it, and smaller ones.
        runs: how they are run.
        folder: where a picture may go; `FABACK_PICTURES` goes before.
    """
    bad = runs.failures(build(options))
    if not bad:
        return ""
    small = smallest(options, build, runs, like=bad[0])
    lines = [*map(str, bad), "", "The smallest scenario that fails:", f"  {small}"]
    again = runs.failures(build(small))
    if not again:
        return "\n".join([*lines, "  It fails at times only: this time it did not."])
    return "\n".join([*lines, f"  {again[0]}", *witness(build(small), runs, again[0], folder)])


def smallest(options: Options, build: Build, runs: Runs, like: CellResult) -> Options:
    """Options of a scenario that fails alike, as small as can be found in `PATIENCE` seconds."""
    end = time.monotonic() + PATIENCE

    def judge(other: Options) -> str:
        if time.monotonic() > end:
            return ""
        try:
            bad = runs.failures(build(other))
        except Exception:  # noqa: BLE001  what cannot be built is no smaller scenario
            return ""
        alike = bad and (bad[0].status, bad[0].layer_id is None) == (like.status, like.layer_id is None)
        return bad[0].reason if alike else ""

    brief = next((other for other in _brief(options) if judge(other)), None)
    if brief is None:
        return shrunk(options, judge)
    return _shorter(shrunk(brief, lambda other: judge(other) if other.lengths else ""), judge)


def witness(scenario: Scenario, runs: Runs, result: CellResult, folder: Callable[[], Path] | None) -> list[str]:
    """Lines on who saw what in a layer that is wrong, with the path of a picture of it; no picture without a folder."""
    if result.status != WRONG or result.layer_id is None or result.step is None:
        return []
    try:
        seen = observe(scenario, runs.make, step=result.step, layer_id=result.layer_id, device=runs.device)
    except Exception as error:  # noqa: BLE001  the failure itself has been told
        return [f"Who saw what could not be found out: {type(error).__name__}: {error}"]
    complaints = seen.complaints()
    lines = ["", f"Who saw what, pass {result.step}:", str(seen.panel()), *complaints[:COMPLAINTS]]
    if len(complaints) > COMPLAINTS:
        lines.append(f"and {len(complaints) - COMPLAINTS} more rows of q")
    if seen.right:
        lines.append("All see whom they must: the fault is in the numbers.")
    if folder is None and not os.environ.get(FOLDER_VARIABLE):
        return lines
    return [*lines, picture(seen, f"pass {result.step}: expected and actual", folder)]


def picture(seen: Observation, title: str, folder: Callable[[], Path] | None) -> str:
    """Draws an observation into a new PNG file; the line that says where, or why not."""
    if not available():
        return "No picture: matplotlib is not installed (pip install faback[docs])."
    given = os.environ.get(FOLDER_VARIABLE)
    try:
        place = Path(given) if given else (folder or temporary)()
        place.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=place, prefix="seen-", suffix=".png")
        os.close(handle)
        save(draw([seen.panel()], title), name)
    except (OSError, ConfigError) as error:
        return f"No picture: {error}"
    return f"Picture: {name}"


def temporary() -> Path:
    """A new folder for pictures, where a test brings none."""
    return Path(tempfile.mkdtemp(prefix="faback-"))


def _brief(options: Options) -> Iterator[Options]:
    """The same with one request of a few tokens."""
    for total in (1, 2, 4, 8, 12, 20):
        for new in sorted({1, total // 2, total} - {0}):
            yield _with_length(options, total - new, new)


def _shorter(options: Options, judge: Callable[[Options], str]) -> Options:
    """Its request made shorter, token by token."""
    assert options.lengths is not None
    (cached, new), *_ = options.lengths
    for length in ((cached - 1, new), (cached, new - 1)):
        if min(length) >= 0 and judge(_with_length(options, *length)):
            return _shorter(_with_length(options, *length), judge)
    return options


def _with_length(options: Options, cached: int, new: int) -> Options:
    return attrs.evolve(options, lengths=((cached, new),), encoder_lengths=None)
