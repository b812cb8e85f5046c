"""The documents keep to the truth: their Python code runs, what they point at exists, and what there is they name.

Code blocks that begin with ```python run in order, in one namespace per document; functions named `test_...` run.
```python file=NAME is written to a file that later blocks can import, and ```python no-run is left alone.
"""

from __future__ import annotations

import pkgutil
import re
import sys
from pathlib import Path
from types import ModuleType

import attrs
import pytest
import torch

from faback import BackendConfig, ForwardBatch
from faback.builtins import BUILTINS
from faback.core.hooks import HookSpecs
from faback.core.registry import Registry
from faback.core.segment import FEATURES

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
every_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)

FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
FILE = re.compile(r"(?<![\w/.-])(?:faback|plugins|tests|docs|examples|benchmarks|tools|\.ci)/[\w./-]*")
DOTTED = re.compile(r"`(faback(?:\.\w+)+)[`(]")


@attrs.frozen
class Block:
    """One fenced block: the words behind the fence, the code, and the number of its first line."""

    info: tuple[str, ...]
    code: str
    line: int


def blocks(path):
    text = path.read_text()
    return [
        Block(tuple(found["info"].split()), found["code"], text.count("\n", 0, found.start("code")) + 1)
        for found in FENCE.finditer(text)
    ]


def prose(path):
    return FENCE.sub(lambda found: "" if found["info"].startswith("python") else found["code"], path.read_text())


def anchors(path):
    """Of headings, as GitHub makes them."""
    titles = HEADING.findall(FENCE.sub("", path.read_text()))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.fixture
def namespace(request, tmp_path, monkeypatch):
    """An empty module that stands for a document, in a directory of its own whose files can be imported."""
    module = ModuleType("document")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    known = set(sys.modules)
    random = torch.get_rng_state()
    yield vars(module)
    torch.set_rng_state(random)
    for name in set(sys.modules) - known:
        if getattr(sys.modules[name], "__file__", None) in {str(file) for file in tmp_path.iterdir()}:
            del sys.modules[name]


@every_document
def test_code_runs(path, namespace, tmp_path):
    torch.manual_seed(0)
    for block in blocks(path):
        if block.info[:1] != ("python",) or "no-run" in block.info:
            continue
        file = next((word.removeprefix("file=") for word in block.info if word.startswith("file=")), None)
        if file is not None:
            (tmp_path / file).write_text(block.code)
            continue
        before = dict(namespace)
        # Blank lines in front, so that a traceback gives the document's line.
        exec(compile("\n" * (block.line - 1) + block.code, str(path), "exec"), namespace)
        for name, value in list(namespace.items()):
            if name.startswith("test_") and before.get(name) is not value:
                value()


@every_document
def test_links_lead_somewhere(path):
    for target in LINK.findall(prose(path)):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), f"{path.name} links to {target}"
        assert not anchor or anchor in anchors(there), f"{path.name} links to {target}, which has no such heading"


@every_document
def test_named_files_exist(path):
    for name in FILE.findall(prose(path)):
        assert (ROOT / name.rstrip(".")).exists(), f"{path.name} names {name}"


@every_document
def test_named_objects_exist(path):
    for name in DOTTED.findall(prose(path)):
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError) as error:
            pytest.fail(f"{path.name} names {name}: {error}")


def named(*parts):
    """What documents set in code type or as a heading."""
    text = "\n".join((ROOT / part).read_text() for part in parts)
    spans = [*re.findall(r"`([^`\n]+)`", text), *HEADING.findall(text)]
    return {word for span in spans for word in re.findall(r"\w+", span)}


def keys():
    """Of everything built in that needs no process group."""
    config = BackendConfig(context_len=1, options={"prefill_aware_swa": {}})
    registry = Registry.load(config, BUILTINS, entry_points=())
    lowerings = {contribution.value.key for contribution in registry.lowerings(config)}
    overlays = {contribution.value.key for contribution in registry.overlays(config)}
    return set(registry.modes(config)), overlays, lowerings


def test_every_mode_overlay_and_lowering_is_described():
    modes, overlays, lowerings = keys()
    assert not (modes | overlays) - named("docs/modes.md")
    assert not (modes | overlays) - named("README.md")
    assert not lowerings - named("docs/concepts.md")


def test_every_feature_is_described():
    assert not set(FEATURES) - named("docs/concepts.md")


def test_every_hook_is_described():
    hooks = {name for name in vars(HookSpecs) if name.startswith("faback_")}
    assert hooks
    assert not hooks - named("docs/plugins.md")


def test_every_batch_field_is_described():
    assert not {field.name for field in attrs.fields(ForwardBatch)} - named("docs/engine.md", "docs/modes.md")
