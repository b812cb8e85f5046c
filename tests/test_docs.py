"""The documents keep to the truth: their code runs, what they point at exists, and what there is they name."""

from __future__ import annotations

import pkgutil
import re
import sys
from types import ModuleType

import attrs
import pytest
import torch
import typer

import faback.core.errors
import faback.pools
import faback.testing
from documents import HEADING, NOT_RUN, ROOT, anchors, blocks, documents, prose, run_commands, run_python
from faback import BackendConfig, FabackError, ForwardBatch
from faback.builtins import BUILTINS
from faback.cli import build_app
from faback.core.hooks import HookSpecs
from faback.core.registry import Registry
from faback.core.segment import FEATURES

every_document = pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))

LINK = re.compile(r"\]\(([^)\s]+)\)")
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
FILE = re.compile(r"(?<![\w/.-])(?:faback|plugins|tests|docs|examples|benchmarks|tools|\.ci)/[\w./-]*")
DOTTED = re.compile(r"`(faback(?:\.\w+)+)[`(]")
OPTION = re.compile(r"--[a-z][a-z-]*")


@pytest.fixture
def namespace(request, tmp_path, monkeypatch):
    """An empty module that stands for a document, in a directory of its own whose files can be imported."""
    module = ModuleType("document")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("FABACK_DISABLE_PLUGINS", raising=False)
    known = set(sys.modules)
    random = torch.get_rng_state()
    torch.use_deterministic_algorithms(True)  # which also fills memory that nobody has written with NaN
    yield vars(module)
    torch.use_deterministic_algorithms(False)
    torch.set_rng_state(random)
    for name in set(sys.modules) - known:
        if getattr(sys.modules[name], "__file__", None) in {str(file) for file in tmp_path.iterdir()}:
            del sys.modules[name]


@every_document
def test_code_runs(path, namespace, tmp_path):
    torch.manual_seed(0)
    for block in blocks(path):
        if block.language == "python":
            run_python(path, block, namespace, tmp_path)
        elif block.language == "console" and block.runs:
            run_commands(path, block, tmp_path)


@every_document
def test_what_is_not_run_has_a_reason(path):
    for block in blocks(path):
        reason = block.title.removeprefix(NOT_RUN)
        assert block.runs or len(reason.split()) > 2, f"{path.name}:{block.line}: {block.title!r} is no reason"


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
def test_pictures_are_described(path):
    for text, target in IMAGE.findall(prose(path)):
        assert len(text.split()) > 3, f"{path.name} says {text!r} of {target}"


@every_document
def test_named_files_exist(path):
    for name in FILE.findall(prose(path)):
        places = [ROOT / name.rstrip("."), path.parent / name.rstrip(".")]
        assert any(place.exists() for place in places), f"{path.name} names {name}"


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


def sections(part):
    """A document's second-level sections by their heading, without code type."""
    _, *found = re.split(r"^## +", (ROOT / part).read_text(), flags=re.MULTILINE)
    return {title.replace("`", "").strip(): text for title, _, text in (section.partition("\n") for section in found)}


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


def test_every_error_has_a_section():
    found = vars(faback.core.errors).values()
    errors = {error.__name__ for error in found if isinstance(error, type) and issubclass(error, FabackError)}
    assert errors - {"FabackError"} <= set(sections("docs/troubleshooting.md"))


@pytest.mark.parametrize("package", [faback, faback.pools, faback.testing], ids=lambda package: package.__name__)
def test_every_public_name_is_in_the_reference(package):
    text = "".join(page.read_text() for page in sorted((ROOT / "docs/api").glob("*.md")))
    shown = set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    for name in package.__all__:
        value = getattr(package, name)
        here = getattr(value, "__module__", None) or f"{package.__name__}.options"  # MODES and OVERLAYS are tuples
        assert shown & {f"{package.__name__}.{name}", here}, f"{package.__name__}.{name}"


def worded(text):
    """Words of a message as the source and the document both have them: X where a value or its placeholder stands."""
    text = re.sub(r"\{[^{}]*\}", "X", text)
    return re.sub(r"\b([A-Z]{3,}|N)\b", "X", re.sub(r"['\"`]", "", text))


def test_every_explained_message_is_one_that_is_raised():
    source = worded("\n".join(file.read_text() for file in sorted((ROOT / "faback").rglob("*.py"))))
    rows = re.findall(r"^\| (`.+?) \|", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    messages = [message for row in rows for message in re.findall(r"`([^`]+)`", row) if ": wanted " in message]
    assert len(messages) > 50
    for message in messages:
        for part in worded(message.partition(": wanted ")[2]).split("X"):
            assert part.strip(" [],0123456789") in source, message


def test_every_variable_of_the_environment_is_described():
    text = "\n".join(file.read_text() for file in (ROOT / "faback").rglob("*.py"))
    variables = set(re.findall(r'"(FABACK_[A-Z_]+)"', text))
    assert variables
    assert not variables - named("docs/cli.md")


def test_every_command_and_option_is_described():
    commands = typer.main.get_command(build_app()).commands
    described = sections("docs/cli.md")
    assert {f"faback {name}" for name in commands} <= set(described)
    for name, command in commands.items():
        options = {word for parameter in command.params for word in parameter.opts if word.startswith("--")}
        assert options == set(OPTION.findall(described[f"faback {name}"])) - {"--help"} or name == "demo", name


def test_every_plugin_of_the_repository_is_linked():
    text = "".join((ROOT / "docs" / name).read_text() for name in ("engines.md", "plugins.md"))
    for path in ROOT.glob("plugins/*/README.md"):
        assert f"](../{path.relative_to(ROOT).as_posix()})" in text, path
