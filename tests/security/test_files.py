"""Files of the user: whole or not at all, and trusted only where nobody else could have written them."""

from __future__ import annotations

import json
import os
import stat

import pytest

from faback.core import files, measured
from faback.core.errors import ConfigError
from faback.core.files import LARGEST, own_users, read_text, write_json

TABLE = {"points": [{"rows": 4, "queries": 1, "keys": 64, "traits": [], "figures": {"quick": 2.5}}]}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "table.json"


def test_what_is_written_can_be_read_by_its_owner_alone(path):
    write_json(path, TABLE)
    assert json.loads(read_text(path, owners=own_users())) == TABLE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_file_as_it_was(path, monkeypatch, call):
    def full(*args):
        raise OSError("no space left on device")

    write_json(path, TABLE)
    monkeypatch.setattr(files.os, call, full)
    with pytest.raises(ConfigError, match="no space left"):
        write_json(path, {"points": []})
    assert json.loads(path.read_text()) == TABLE
    assert os.listdir(path.parent) == [path.name]


def test_the_contents_are_on_the_disk_before_the_name_is(path, monkeypatch):
    order = []
    for call in ("fsync", "replace"):
        done = getattr(os, call)
        monkeypatch.setattr(files.os, call, lambda *args, call=call, done=done: (order.append(call), done(*args)))
    write_json(path, TABLE)
    assert order == ["fsync", "replace", "fsync"]


def test_a_link_is_replaced_and_not_followed(path, tmp_path):
    """Whoever plants a link in a shared folder does not choose what is overwritten."""
    other = tmp_path / "other"
    other.write_text("precious")
    path.parent.mkdir()
    path.symlink_to(other)
    write_json(path, TABLE)
    assert other.read_text() == "precious"
    assert not path.is_symlink()


def spoilt(path, how):
    if how == "folder":
        path.unlink()
        path.mkdir()
    elif how == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif how == "everybody's":
        path.chmod(0o666)
    elif how == "huge":
        path.write_text(json.dumps(TABLE) + " " * LARGEST)
    elif how == "no text":
        path.write_bytes(b"\xff\xfe\x00")
    elif how == "deep":
        path.write_text("[" * 100_000 + "]" * 100_000)
    elif how == "a number too long":
        path.write_text(json.dumps(TABLE).replace("64", "6" * 10_000))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("folder", "wanted a regular file, got d"),
        ("pipe", "wanted a regular file, got p"),
        ("everybody's", "wanted not writable by everybody, got -rw-rw-rw-"),
        ("huge", f"wanted at most {LARGEST} bytes"),
        ("no text", "wanted text that can be read"),
        ("deep", "wanted what `faback tune` writes"),
        ("a number too long", "wanted what `faback tune` writes"),
    ],
)
@pytest.mark.parametrize("named", [False, True])
def test_a_table_that_cannot_be_trusted_is_refused(path, monkeypatch, how, words, named):
    if named:
        monkeypatch.setenv(measured.VARIABLE, str(path))
    else:
        monkeypatch.setattr(measured, "user_file", lambda arch: path)
    write_json(path, TABLE)
    assert measured.load(90).points
    spoilt(path, how)
    with pytest.raises(ConfigError, match=words) as caught:
        measured.load(90)
    assert str(path) in caught.value.what


def test_a_table_of_another_user_has_to_be_named(path, monkeypatch):
    monkeypatch.setattr(measured, "user_file", lambda arch: path)
    write_json(path, TABLE)
    monkeypatch.setattr(measured, "own_users", lambda: frozenset({path.stat().st_uid + 1}))
    with pytest.raises(ConfigError, match=f"got of user {path.stat().st_uid}"):
        measured.load(90)
    monkeypatch.setenv(measured.VARIABLE, str(path))
    assert measured.load(90).points


def test_own_users_are_the_user_and_root():
    assert own_users() == {os.geteuid(), 0}
