"""Nothing in faback or its plugins unpickles, evaluates or fetches: read from the source, with named exceptions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("faback", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("plugins/*/src")))

MODULES = frozenset(
    {
        "aiohttp",
        "asyncio",
        "cloudpickle",
        "code",
        "codeop",
        "concurrent",
        "ctypes",
        "dbm",
        "dill",
        "ftplib",
        "http",
        "httpx",
        "huggingface_hub",
        "imaplib",
        "joblib",
        "marshal",
        "multiprocessing",
        "pickle",
        "poplib",
        "pty",
        "requests",
        "runpy",
        "shelve",
        "smtplib",
        "socket",
        "socketserver",
        "ssl",
        "subprocess",
        "telnetlib",
        "urllib",
        "urllib3",
        "webbrowser",
        "wget",
        "xmlrpc",
        "yaml",
        "zipimport",
    }
)
"""They unpickle, evaluate, fetch, or start something that could."""
TORCH = ("torch.hub", "torch.package", "torch.utils.cpp_extension", "torch.utils.model_zoo", "torch.jit")
CALLS = frozenset({"eval", "exec", "compile", "__import__", "open_code"})
METHODS = frozenset({"torch.load", "numpy.load", "np.load", "numpy.fromfile", "os.system", "os.popen"})
STARTS = ("os.exec", "os.spawn", "os.posix_spawn", "os.fork", "torch.load")
DYNAMIC = frozenset({"import_module", "importlib.import_module"})
"""Allowed with a name that is written there, or above as a constant."""

ALLOWED = {
    ("faback/cli/bench.py", "subprocess"): "asks git for the commit that is measured; fixed words, no shell",
    (
        "faback/bench/warm.py",
        "multiprocessing",
    ): "hands its own functions and names of cases to processes that it starts",
    ("faback/bench/warm.py", "concurrent"): "likewise",
    ("faback/cli/__init__.py", "import_module(name)"): "looks for typer and rich, whose names are written there",
    ("faback/cli/doctor.py", "import_module(package)"): "looks for triton, to tell its version",
    ("faback/core/registry.py", "partial(import_module)"): "the modules of faback/builtins.py",
}
"""(file, what is found there) -> why."""


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a chain of attributes, "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return ""


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def suspicious(source: str) -> Iterator[str]:
    """What a source does that it should not, a word for each."""
    tree = ast.parse(source)
    written = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        for name in imported(node):
            if name.split(".")[0] in MODULES:
                yield name.split(".")[0]
            elif name.startswith(TORCH) or name in METHODS or name.startswith(STARTS):
                yield name
        if isinstance(node, ast.Attribute):
            name = dotted(node)
            if name in METHODS or name.startswith((*STARTS, *TORCH)):
                yield name
        if isinstance(node, ast.Call):
            name, first = dotted(node.func), node.args[0] if node.args else node
            if name in CALLS:
                yield name
            elif name in DYNAMIC and not isinstance(first, ast.Constant) and dotted(first) not in written:
                yield f"{name}({dotted(first)})"
            elif any(dotted(argument) in DYNAMIC for argument in node.args):
                yield f"{name}(import_module)"
            if any(word.arg == "trust_remote_code" for word in node.keywords):
                yield "trust_remote_code"
            if name.endswith(".from_pretrained") and not local(node):
                yield "from_pretrained without local_files_only"
            if name.endswith((".system", ".popen")) or any(is_true(word, "shell") for word in node.keywords):
                yield "a shell"


def is_true(word: ast.keyword, name: str) -> bool:
    return word.arg == name and isinstance(word.value, ast.Constant) and word.value.value is True


def local(call: ast.Call) -> bool:
    return any(is_true(word, "local_files_only") for word in call.keywords)


def found() -> set[tuple[str, str]]:
    result = set()
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            result |= {(name, what) for what in suspicious(path.read_text())}
    return result


def test_nothing_unpickles_evaluates_or_fetches():
    assert found() - ALLOWED.keys() == set()


def test_no_exception_is_out_of_date():
    assert ALLOWED.keys() - found() == set()


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import urllib.request as r",
        "def f():\n    from requests import get",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "from torch.hub import load_state_dict_from_url",
        "f = torch.load",
        "eval('1')",
        "exec(text)",
        "compile(text, 'x', 'exec')",
        "__import__(name)",
        "import os\nos.system('ls')",
        "import os\nos.execv('ls', [])",
        "from importlib import import_module\nimport_module(name)",
        "partial(import_module, name)",
        "Model.from_pretrained('x')",
        "Model.from_pretrained('x', local_files_only=False)",
        "Model.from_pretrained('x', local_files_only=True, trust_remote_code=True)",
        "run('ls', shell=True)",
    ],
)
def test_the_search_finds(source):
    assert list(suspicious(source))


@pytest.mark.parametrize(
    "source",
    [
        "from importlib import import_module\nimport_module('flash_attn')",
        "from importlib import import_module\nNAME = 'flash_attn'\nimport_module(NAME)",
        "model.eval()",
        "re.compile('x')",
        "import json\njson.loads('1')",
        "Model.from_pretrained('x', local_files_only=True)",
        "loaded.load_state_dict(x)",
    ],
)
def test_the_search_leaves_alone(source):
    assert list(suspicious(source)) == []
