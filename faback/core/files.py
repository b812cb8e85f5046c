"""Small files of a user's own: read with distrust, written whole or not at all."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from faback.core.errors import ConfigError

LARGEST = 1 << 20
"""Bytes of a file that is read; tables of measurements have a few thousand."""


def read_text(path: Path, *, owners: Collection[int] | None = None) -> str:
    """The text of a file.

    Args:
        path: of a regular file, at most `LARGEST` bytes of UTF-8, that not everybody may write to.
        owners: numbers of the users that it may belong to, anyone if None.

    Raises:
        ConfigError: another file, or one that cannot be read.
    """
    what, hint = f"file {path}", f"`ls -l {path}` shows owner and permissions."
    try:
        # A pipe that nobody writes to would be waited for.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        try:
            found = os.fstat(handle)
            mode = stat.filemode(found.st_mode)
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(what, wanted="a regular file", got=mode)
            if found.st_mode & stat.S_IWOTH and os.name == "posix":
                raise ConfigError(what, wanted="not writable by everybody", got=mode, hint=hint)
            if owners is not None and found.st_uid not in owners:
                wanted = f"of user {' or '.join(map(str, sorted(owners)))}"
                raise ConfigError(what, wanted=wanted, got=f"of user {found.st_uid}", hint=hint)
            if found.st_size > LARGEST:
                raise ConfigError(what, wanted=f"at most {LARGEST} bytes", got=found.st_size)
            data = os.read(handle, LARGEST)
        finally:
            os.close(handle)
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(what, wanted="text that can be read", got=str(error)) from error


def own_users() -> frozenset[int] | None:
    """The users whose files a process may trust without being told: its own and root; None where there are none."""
    return frozenset({os.geteuid(), 0}) if hasattr(os, "geteuid") else None


def write_json(path: Path, value: Any) -> None:
    """Writes JSON for its owner alone: all of it is there afterwards, even after a crash, or the file is as it was.

    Args:
        path: of the file; folders that are missing are made.
        value: what `json` can write.

    Raises:
        ConfigError: nothing can be written there.
    """
    text = json.dumps(value, indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # with mode 0600
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
        if os.name == "posix":
            _sync(path.parent)
    except OSError as error:
        raise ConfigError(f"file {path}", wanted="a place to write to", got=str(error)) from error


def _sync(folder: Path) -> None:
    """Makes a new name in a folder survive a crash."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
