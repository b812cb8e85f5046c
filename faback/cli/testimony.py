"""`faback check`: who saw what in the cells that came out wrong."""

from __future__ import annotations

from pathlib import Path

import torch

from faback.cli.check import Report, has_lse, maker
from faback.core.registry import Registry
from faback.testing.failures import Runs, witness

WITNESSES = 3
"""Wrong cells that are looked into."""


def testimony(report: Report, device: torch.device, registry: Registry, folder: Path | None) -> list[str]:
    """Who saw what in the first wrong cells, and where the pictures of that are, if a folder is given for them."""
    lines, place = [], None if folder is None else lambda: folder
    for verdict in report.having("wrong")[:WITNESSES]:
        cell, scenario = verdict.cell, verdict.cell.scenario()
        lse, made = has_lse(cell.kernel, device, registry), maker(cell.kernel, registry)
        runs = Runs(made, str(device), lse, lambda result: result.status == "wrong")
        lines.append(f"{cell}:")
        again = runs.failures(scenario)[:1]
        lines += witness(scenario, runs, again[0], place) if again else ["It did not come out wrong again."]
    return lines
