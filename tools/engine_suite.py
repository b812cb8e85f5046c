"""Runs a plugin's tests beside the engine that it is for, in an environment that only these tests see.

    python tools/engine_suite.py plugins/faback-sglang [pytest options]

The environment, kept in `.venv/engines`, sees all of this one, and has what the plugin's `engine.txt` lists besides,
each without its own needs. Where that cannot be installed the tests do not run, which is said and is no failure; with
`--require` it is one.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plugin", type=Path)
    parser.add_argument("--require", action="store_true", help="fail where the engine cannot be installed")
    args, options = parser.parse_known_args()
    plugin = args.plugin.resolve()
    try:
        python = environment(plugin)
    except subprocess.CalledProcessError as error:
        print(f"{plugin.name}: its engine cannot be installed here, so that its tests beside it do not run:")
        print(f"  {last_line(error.stdout)}")
        return int(args.require)
    command = [python, "-m", "pytest", "-q", *options, "tests"]
    return subprocess.run(command, cwd=plugin, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode


def environment(plugin: Path) -> Path:
    """The interpreter of the plugin's environment, made unless it is there and up to date.

    Raises:
        CalledProcessError: a package cannot be installed.
    """
    wanted = plugin / "engine.txt"
    path = Path(sys.prefix) / "engines" / plugin.name
    python, ready = path / "bin" / "python", path / "ready"
    state = hashlib.sha256(wanted.read_bytes()).hexdigest()
    if ready.exists() and ready.read_text() == state:
        return python
    venv.EnvBuilder(symlinks=True, with_pip=False, clear=True).create(path)
    (site,) = path.glob("lib/python*/site-packages")
    (site / "beside.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-warn-conflicts"]
    quietly([*pip, "--requirement", wanted])
    ready.write_text(state)
    return python


def quietly(command: list[str | Path]) -> None:
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "pip gave no reason")


if __name__ == "__main__":
    sys.exit(main())
