"""`faback new-plugin`: what it writes passes its tests as written, and fails them when it is broken."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from faback.cli.new_plugin import Kind, write
from faback.core.errors import ConfigError

ROOT = Path(__file__).parents[2]
BREAKS = {
    Kind.mode: ("window=(WINDOW, None)", "window=(WINDOW + 1, None)"),
    Kind.overlay: ("window=(self._window, None)", "window=(self._window + 1, None)"),
    Kind.kernel: ("token > place[:, None]", "token >= place[:, None]"),
}


def outcome(path, *arguments):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FABACK_DISABLE_PLUGINS": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=path, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.value)
def test_its_tests_pass_as_written_and_fail_when_it_is_broken(tmp_path, kind):
    path = write("my-plugin", kind, tmp_path)
    result = outcome(path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout and "skipped" not in result.stdout
    code = path / "src" / "my_plugin" / "plugin.py"
    before, after = BREAKS[kind]
    assert before in code.read_text()
    code.write_text(code.read_text().replace(before, after))
    result = outcome(path)
    assert result.returncode == 1 and "must see" in result.stdout, result.stdout + result.stderr


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.value)
def test_what_is_written_is_found_by_its_entry_point(tmp_path, kind):
    path = write("other-plugin-2", kind, tmp_path)
    project = (path / "pyproject.toml").read_text()
    assert 'other-plugin-2 = "other_plugin_2.plugin"' in project
    code = (path / "src" / "other_plugin_2" / "plugin.py").read_text()
    assert len([line for line in code.splitlines() if line.strip()]) <= 60
    assert "$" not in "".join(file.read_text() for file in path.rglob("*") if file.is_file())


@pytest.mark.parametrize("name", ["My-Plugin", "1st", "a--b", "a_b", "", "a/b", "..", "a-"])
def test_a_name_that_is_none_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="like my-plugin"):
        write(name, Kind.mode, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path, faback_cli):
    (tmp_path / "mine").mkdir()
    result = faback_cli("new-plugin", "mine", "--dir", str(tmp_path))
    assert result.exit_code == 2 and "one that does not exist yet" in result.stderr
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_place_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="a place to write to"):
        write("mine", Kind.mode, tmp_path / "file")


def test_the_command_says_what_it_wrote(tmp_path, faback_cli):
    result = faback_cli("new-plugin", "mine", "--kind", "kernel", "--dir", str(tmp_path))
    assert result.exit_code == 0
    assert "a kernel that knows causal attention" in result.stdout
    assert (tmp_path / "mine" / "tests" / "test_plugin.py").is_file()
