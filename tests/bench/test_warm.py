"""Compiling ahead: everything that a suite measures is done once, in processes of its own."""

import os
from functools import partial

from faback.bench.warm import warm
from faback.cli.bench import SUITES, _names


def note(folder, name):
    (folder / name).write_text(str(os.getpid()))


def test_all_is_done_elsewhere(tmp_path):
    told = []
    warm(partial(note, tmp_path), ["a", "b", "c"], 2, told.append)
    assert told == ["a", "b", "c"]
    assert str(os.getpid()) not in {(tmp_path / name).read_text() for name in told}


def fail_at(name, given):
    if given == name:
        raise MemoryError("no room\nfor details")


def test_the_rest_is_done_when_something_fails():
    told = []
    warm(partial(fail_at, "a"), ["a", "b"], 1, told.append)
    assert told == ["a failed, MemoryError: no room", "b"]


def test_every_suite_has_names_to_choose_from():
    for suite in SUITES:
        names = _names(suite)
        assert len(names) == len(set(names)) > 5
