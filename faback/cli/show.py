"""`faback show`: a picture of what a plan sees, key by key."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import attrs
import typer

from faback.cli.output import AsJson, main_console, print_json
from faback.cli.scenes import (
    Chunk,
    DraftTokens,
    EncoderLengths,
    Hybrid,
    KernelName,
    Lengths,
    ModeName,
    OverlayName,
    PaddedRows,
    PageSize,
    Scene,
    Seed,
    Settings,
    Sinks,
    Topk,
    Window,
    described,
    set_up,
)
from faback.testing.drawing import MAX_QUERIES, check_suffix, draw, save
from faback.testing.options import Options
from faback.testing.pictures import Panel, planned


def command(
    out: Annotated[Path | None, typer.Argument(help="A .png or .svg file; text on the terminal without one.")] = None,
    mode: ModeName = "decode",
    overlay: OverlayName = None,
    page_size: PageSize = 4,
    lengths: Lengths = None,
    encoder_lengths: EncoderLengths = None,
    window: Window = None,
    chunk: Chunk = None,
    sinks: Sinks = False,
    hybrid: Hybrid = False,
    topk: Topk = 1,
    draft_tokens: DraftTokens = 4,
    padded_rows: PaddedRows = 0,
    seed: Seed = 0,
    kernel: KernelName = "auto",
    settings: Settings = None,
    max_queries: Annotated[int, typer.Option(min=1, help="Queries that are drawn at most.")] = MAX_QUERIES,
    as_json: AsJson = False,
) -> None:
    """Show what a plan sees: queries against keys, by segment, with page borders and tails, for each kind of layers."""
    if out is not None:
        check_suffix(out)
    options = described(
        mode,
        overlay,
        lengths=lengths,
        encoder_lengths=encoder_lengths,
        window=window,
        chunk=chunk,
        draft_tokens=draft_tokens,
        page_size=page_size,
        sinks=sinks,
        hybrid=hybrid,
        topk=topk,
        padded_rows=padded_rows,
        seed=seed,
    )
    scene = set_up(options, kernel, settings or ())
    panels = planned(scene.backend, scene.batch)
    if out is not None:
        save(draw(panels, title_of(options), max_queries=max_queries), out, describe(scene, panels))
    if as_json:
        print_json(as_data(panels))
    elif out is not None:
        main_console().print(f"{out}: {scene.name}", markup=False, highlight=False)
    else:
        main_console().print("\n\n".join(map(str, panels)), markup=False, highlight=False)


def title_of(options: Options) -> str:
    """What is drawn, in a line."""
    overlay = "" if options.overlay == "full" else f", {options.overlay}"
    return f"{options.mode}{overlay}, page size {options.page_size}"


def describe(scene: Scene, panels: Sequence[Panel]) -> str:
    """For the metadata of a picture: what makes it again, and a digest of what is drawn."""
    digest = hashlib.sha256(json.dumps(as_data(panels)).encode()).hexdigest()
    return f"{scene.name}; sha256 {digest}"


def as_data(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """Panels as plain data, for JSON: `cells` hold the index of a mark, -1 for a key not seen, -2 for none."""
    return [
        {
            "title": panel.title,
            "marks": [mark.name for mark in panel.marks],
            "axis": panel.axis,
            "notes": list(panel.notes),
            "requests": [
                attrs.asdict(block, recurse=False) | {"cells": block.cells.tolist()} for block in panel.blocks
            ],
        }
        for panel in panels
    ]
