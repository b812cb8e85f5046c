"""Every error that a user can cause, and the shape that its message takes.

A message says what was looked at, what was wanted, what came, and what to do next; the parts stay readable as
attributes, so that an engine can translate them into its own terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class FabackError(Exception):
    """Base of every error that faback raises on purpose.

    Args:
        what: the thing that is wrong, named as the user knows it (a field, a plugin, a layer).
        wanted: what would have been accepted.
        got: what came instead.
        hint: the next step.
    """

    def __init__(self, what: str, *, wanted: object = None, got: object = None, hint: str | None = None) -> None:
        self.what = what
        self.wanted = wanted
        self.got = got
        self.hint = hint
        found = [f"wanted {wanted}"] if wanted is not None else []
        found += [f"got {got}"] if got is not None else []
        message = f"{what}: {', '.join(found)}" if found else what
        super().__init__(message + (f". {hint}" if hint else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors survive the way to another process, attributes and all."""
        return _rebuilt, (type(self), self.args, self.__dict__)


class ConfigError(FabackError):
    """A configuration, layer description or pool that cannot be used."""


class BatchError(FabackError):
    """A forward batch that contradicts itself, its mode or the pools."""


class PoolError(FabackError):
    """A request to a pool that it cannot grant; the pool is unchanged."""


class CapacityError(FabackError):
    """A size beyond what was reserved; nothing ran.

    Attributes:
        asked_by: the plugin that asked for it, "" where that is not known.
    """

    asked_by: str = ""

    def of(self, asked_by: str) -> CapacityError:
        """The same error, naming who asked."""
        what = f"{self.what}, asked for by {asked_by}"
        named = CapacityError(what, wanted=self.wanted, got=self.got, hint=self.hint)
        named.asked_by = asked_by
        return named


class PluginError(FabackError):
    """A plugin that is missing, broken, in conflict, or that broke its contract."""


class NoKernelError(FabackError):
    """No installed kernel, alone or through lowerings, can do what was asked.

    Args:
        request: one line that describes what was asked.
        reasons: one line per kernel and reason.
        hint: the next step.
    """

    def __init__(self, request: str, reasons: Sequence[str], *, hint: str | None = None) -> None:
        self.reasons = tuple(reasons)
        listing = "".join(f"\n  - {reason}" for reason in reasons) or "\n  - no kernel is installed"
        super().__init__(f"no kernel for {request}{listing}" + (f"\n{hint}" if hint else ""))
        self.hint = hint


def _rebuilt(kind: type[FabackError], args: tuple[Any, ...], state: dict[str, Any]) -> FabackError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error
