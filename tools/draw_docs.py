"""Draws the pictures of the documentation anew, docs/images/*.svg, with `faback show`.

The tests compare what is drawn with what is there, so run this whenever they say that a picture is out of date.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import typer

from faback.cli import build_app

FOLDER = Path(__file__).parent.parent / "docs" / "images"
PICTURES = {
    "decode": "--mode decode --lengths 14,9,5",
    "extend": "--mode extend --lengths 6+5,0+7",
    "mixed": "--mode mixed --lengths 9+1,4+5,0+4",
    "target_verify": "--mode target_verify --topk 2 --draft-tokens 7 --lengths 9,6 --seed 5",
    "draft_extend": "--mode draft_extend --lengths 8+3,5+1,9+2",
    "draft_decode": "--mode draft_decode --topk 2 --draft-tokens 4 --lengths 9,6 --seed 2",
    "local_attention": "--mode extend --chunk 4 --lengths 3+9,0+6",
    "sliding_window": "--mode extend --window 3 --lengths 5+6,0+8",
    "prefill_aware": "--mode decode --overlay prefill_aware --window 2 --lengths 5+0,7+0,4+0",
    "encoder_decoder": "--mode decode --encoder-lengths 5,9 --window 2 --lengths 8,5",
    "cascade": "--mode target_verify --topk 2 --draft-tokens 7 --lengths 9,6 --seed 5 --kernel poor",
    "streaming_llm": '--mode extend --lengths 6+7,0+9 --set streaming-llm={"sinks":2,"window":4}',
}
"""Name of a file -> options of `faback show`."""


def draw(name: str, folder: Path = FOLDER) -> Path:
    """Draws one picture; returns where it is."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.svg"
    words = PICTURES[name].split()
    if "--kernel" not in words:
        words += ["--kernel", "reference"]
    code = typer.main.get_command(build_app()).main(["show", str(path), *words], standalone_mode=False)
    if code:
        raise SystemExit(code)
    return path


def main() -> None:
    """Draws those that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *PICTURES], help="which; all unless given")
    for name in parser.parse_args().names or PICTURES:
        draw(name)


if __name__ == "__main__":
    main()
