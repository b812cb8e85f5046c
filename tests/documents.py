"""What a document holds: its fenced blocks, links and headings, and how its code runs.

```python                      runs, in order, in one namespace per document; functions named `test_...` run
```python title="NAME.py"      is written to a file that later blocks can import
```python title="Not run: WHY" is only parsed
```console                     lines `$ faback ...` and `$ pytest ...` run; what follows them is their output,
                               `...` for anything
"""

from __future__ import annotations

import ast
import doctest
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
from typer.testing import CliRunner

from faback.cli import build_app

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
INFO = re.compile(r'(?P<language>[a-z]*)(?: title="(?P<title>[^"]+)")?')
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
NOT_RUN = "Not run: "
MATCHES = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@attrs.frozen
class Block:
    """One fenced block.

    Attributes:
        language: the word behind the fence.
        title: what readers see above it: a file's name, or why it is not run.
        code: what is inside.
        line: the number of its first line.
    """

    language: str
    title: str
    code: str
    line: int

    @property
    def runs(self):
        return not self.title.startswith(NOT_RUN)

    @property
    def file(self):
        return self.title if self.title.endswith(".py") else None


def documents():
    """Everything that is read as prose, but what is planned and not there."""
    found = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
    return found + sorted(ROOT.glob("docs/**/*.md")) + sorted(ROOT.glob("plugins/*/README.md"))


def blocks(path):
    """The blocks of a document, in order; a fence that the site would not understand fails."""
    text = path.read_text()
    found = []
    for fence in FENCE.finditer(text):
        line = text.count("\n", 0, fence.start("code")) + 1
        info = INFO.fullmatch(fence["info"])
        assert info, f'{path.name}:{line}: wanted ```LANGUAGE or ```LANGUAGE title="...", got ```{fence["info"]}'
        found.append(Block(info["language"], info["title"] or "", fence["code"], line))
    return found


def prose(path):
    """The text without its Python code."""
    return FENCE.sub(lambda found: "" if found["info"].startswith("python") else found["code"], path.read_text())


def anchors(path):
    """Of headings, as GitHub makes them."""
    titles = HEADING.findall(FENCE.sub("", path.read_text()))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def run_python(path, block, namespace, folder):
    """Runs a block, or parses it, or writes the file that it is."""
    # Blank lines in front, so that a traceback gives the document's line.
    code = "\n" * (block.line - 1) + block.code
    if not block.runs:
        ast.parse(code, str(path))
        return
    if block.file is not None:
        (folder / block.file).write_text(block.code)
        return
    before = dict(namespace)
    exec(compile(code, str(path), "exec"), namespace)
    for name, value in list(namespace.items()):
        if name.startswith("test_") and before.get(name) is not value:
            value()


def run_commands(path, block, folder):
    """Runs the `faback` and `pytest` lines of a block and compares what they print with what is shown."""
    programs = {"faback": run_faback, "pytest": run_pytest}
    for command, shown in commands(block):
        program, *words = shlex.split(command)
        if program not in programs:
            continue
        where, expected = f"{path.name}:{block.line}: {command}", 2 if re.match(r"\w+Error: ", shown) else 0
        code, printed = programs[program](words, folder)
        assert code == expected, f"{where}\n{printed}"
        if shown.strip() and not doctest.OutputChecker().check_output(shown, printed, MATCHES):
            pytest.fail(f"{where}\nshown:\n{shown}\nprinted:\n{printed}")


def run_faback(words, folder):
    """In this process, which is in the folder already."""
    result = CliRunner().invoke(build_app(), words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def run_pytest(words, folder):
    """In a process of its own, which finds faback and the files of the document."""
    paths = os.pathsep.join((str(ROOT), str(folder)))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(folder), *words]
    found = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return found.returncode, found.stdout + found.stderr


def commands(block):
    """The lines that begin with `$ `, each with what is shown below it."""
    for part in re.split(r"^\$ ", block.code, flags=re.MULTILINE)[1:]:
        command, _, shown = part.replace("\\\n", " ").partition("\n")
        yield command, shown
