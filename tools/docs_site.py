"""A hook of mkdocs (mkdocs.yml): the site also has pages that live elsewhere in the repository.

A plugin's README, the changelog and so on are written for where they lie, and so are the links to them. Here each gets
a place in the site, and links between it and the pages of docs/ are made to fit.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
GUESTS = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
HOME = "index.md"
LINK = re.compile(r"(?P<before>\]\()(?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?=\))")


def places() -> dict[Path, str]:
    """Files of the repository -> their place in the site; the repository itself and its README are the home page."""
    found = {ROOT / name: f"project/{name.lower()}" for name in GUESTS}
    found |= {path: f"packages/{path.parent.name}.md" for path in sorted(ROOT.glob("plugins/*/README.md"))}
    return found | {ROOT: HOME, ROOT / "README.md": HOME}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the guests."""
    for path, place in places().items():
        if place != HOME:
            files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns relative links into those of the site. What has no place there stays, and mkdocs warns of it."""
    source = page.file.abs_src_path
    assert source is not None
    here, docs = Path(source).parent, Path(config.docs_dir)
    place_of = places()

    def moved(link: re.Match[str]) -> Any:
        if "://" in link["target"]:
            return link[0]
        target = Path(os.path.normpath(here / link["target"]))
        place = target.relative_to(docs).as_posix() if target.is_relative_to(docs) else place_of.get(target)
        if place is None:
            return link[0]
        way = os.path.relpath(place, PurePosixPath(page.file.src_uri).parent)
        return f"{link['before']}{way}{link['anchor'] or ''}"

    return LINK.sub(moved, markdown)
