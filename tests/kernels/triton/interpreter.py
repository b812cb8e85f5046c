"""Triton's interpreter, made bearable: the same arithmetic in a fraction of the time."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

INTERPRETING = os.environ.get("TRITON_INTERPRET", "0") == "1"


def needs_interpreter() -> None:
    """Skips the module that calls it where kernels are compiled."""
    if not INTERPRETING:
        pytest.skip("runs with TRITON_INTERPRET=1: make interpret", allow_module_level=True)


def needs_compiler() -> None:
    """Skips the module that calls it where kernels are interpreted."""
    if INTERPRETING:
        pytest.skip("runs without TRITON_INTERPRET=1: make test", allow_module_level=True)


def hasten(patch: pytest.MonkeyPatch) -> None:
    """Leaves out what the interpreter repeats: checks of 32-bit overflow, and the redirection of `triton.language`.

    It redirects the module's functions at every call of a function inside a kernel, though once per launch is enough.
    """
    from triton.runtime import interpreter

    options = interpreter.interpreter_builder.options
    patch.setattr(interpreter.interpreter_builder, "options", type(options)(sanitize_overflow=False))
    patch.setattr(interpreter, "_patch_lang", _once_per_launch(interpreter._patch_lang))


def _once_per_launch(redirect: Callable[[Any], Any]) -> Callable[[Any], Any]:
    done: set[str] = set()

    def redirected(fn: Any) -> Any:
        if fn.__module__ in done:
            return None  # a call inside a launch; only the launch itself puts things back
        done.add(fn.__module__)
        scope = redirect(fn)
        put_back = scope.restore

        def restore() -> None:
            done.clear()
            put_back()

        scope.restore = restore
        return scope

    return redirected
