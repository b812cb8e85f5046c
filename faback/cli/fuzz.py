"""`faback check --fuzz`: random scenarios on every kernel that runs here, planned anew and replayed."""

from __future__ import annotations

import time

import attrs
import torch
from rich.console import Console
from rich.text import Text

from faback.cli.output import side_console
from faback.core.backend import AttentionBackend
from faback.core.config import BackendConfig
from faback.core.registry import Registry
from faback.core.select import Selector
from faback.testing import Options, Scenario, run_scenario
from faback.testing.checks import EQUAL, REFUSED
from faback.testing.fuzz import DeviceLost, Finding, fuzz
from faback.testing.late import Replayed

ON_GPU = 12
"""How often a scenario is told with other sizes where kernels are compiled for it."""
PAUSE = 30.0
"""Seconds between two lines that say how far it is."""


@attrs.define
class Fuzzing:
    """Judges scenarios and counts what it saw.

    Attributes:
        device: where they run.
        registry: the plugins.
        scenarios, equal, refused: so far; the last two are cells, of a pass and a layer.
    """

    device: torch.device
    registry: Registry
    scenarios: int = 0
    equal: int = 0
    refused: int = 0

    def __str__(self) -> str:
        return f"{self.scenarios} scenarios, {self.equal} cells equal, {self.refused} refused"

    def judge(self, options: Options) -> str:
        """What is wrong on any kernel, "" where nothing is."""
        scenario = Scenario.make(**attrs.asdict(options, recurse=False))
        for kernel in Selector(BackendConfig(context_len=1), self.registry, self.device).kernels:
            able = kernel.capabilities(self.device).features
            for replayed in (False, True) if "graph" in able else (False,):

                def make(config, pools, layers, name=kernel.name, replayed=replayed):  # type: ignore[no-untyped-def]
                    config = attrs.evolve(config, kernels=name)
                    kind = Replayed if replayed else AttentionBackend
                    return kind(config, pools, layers, registry=self.registry)

                title = f"{kernel.name}{', replayed' if replayed else ''}"
                try:
                    results = run_scenario(scenario, make, device=self.device, lse="lse" in able)
                except RuntimeError as error:
                    raise DeviceLost(f"{title}: {type(error).__name__}: {error}") from error
                for result in results:
                    if result.status not in (EQUAL, REFUSED):
                        return f"{title}: {result}"
                    self.equal += result.status == EQUAL
                    self.refused += result.status == REFUSED
        self.scenarios += 1
        return ""


def run(seconds: float, seed: int, device: torch.device, registry: Registry, console: Console) -> list[Finding]:
    """Fuzzes, and says what was seen: how much, and for each finding its smallest scenario as a script."""
    fuzzing, start = Fuzzing(device, registry), time.perf_counter()
    each = 1 if device.type == "cpu" else ON_GPU
    due = start + PAUSE

    def told(count: int) -> None:
        nonlocal due
        if time.perf_counter() >= due:  # a run that is cut off has said what it saw
            side_console().print(Text(f"{fuzzing} so far, seed {seed}"))
            due = time.perf_counter() + PAUSE

    found = fuzz(fuzzing.judge, seconds=seconds, seed=seed, each=each, told=told)
    for finding in found:
        kernel = finding.reason.split(":")[0].split(",")[0]
        console.print(Text(f"wrong: {finding.reason}", style="bold red"))
        console.print(Text(finding.script(kernel)), highlight=False)
    spent = time.perf_counter() - start
    console.print(Text(f"{fuzzing}, {len(found)} wrong on {device} in {spent:.0f} s, seed {seed}"))
    return found
