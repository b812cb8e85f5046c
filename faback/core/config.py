"""The backend's configuration: frozen, checked when it is made."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import attrs
import torch

from faback.core.errors import ConfigError

T = TypeVar("T")

ATTENTION_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


LONGEST = 1 << 30
"""Tokens of a sequence: positions and distances are added up in 32 bits."""


def _at_least(minimum: int) -> Any:
    def validate(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= LONGEST:
            owner = type(instance).__name__
            wanted = f"an integer from {minimum} to {LONGEST}"
            raise ConfigError(f"{owner}.{attribute.name}", wanted=wanted, got=repr(value))

    return validate


def _dtype(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value not in ATTENTION_DTYPES:
        wanted = ", ".join(str(d) for d in ATTENTION_DTYPES)
        hint = "This is the dtype of q and of the output; the KV cache's dtype is the pool's."
        raise ConfigError(f"BackendConfig.{attribute.name}", wanted=wanted, got=repr(value), hint=hint)


def _kernels(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if isinstance(value, str) or (
        isinstance(value, Mapping) and all(isinstance(k, str) and isinstance(v, str) for k, v in value.items())
    ):
        return
    wanted = "'auto', a kernel's name, or a mapping from forward mode (or 'default') to a kernel's name"
    raise ConfigError("BackendConfig.kernels", wanted=wanted, got=repr(value))


def _names(value: object) -> object:
    return tuple(value) if isinstance(value, (list, set, frozenset)) else value


def _strings(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, tuple) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"BackendConfig.{attribute.name}", wanted="a list or tuple of plugin names", got=repr(value))


@attrs.frozen(kw_only=True)
class SpeculativeConfig:
    """How the engine speculates.

    Attributes:
        topk: branches of a draft step; 1 is a chain.
        num_steps: draft steps per round.
        num_draft_tokens: tokens that one verify step checks per request.
    """

    topk: int = attrs.field(validator=_at_least(1))
    num_steps: int = attrs.field(validator=_at_least(1))
    num_draft_tokens: int = attrs.field(validator=_at_least(1))


@attrs.frozen(kw_only=True)
class BackendConfig:
    """Everything that is fixed for the life of a backend.

    Attributes:
        context_len: longest sequence in tokens, draft tokens included. Bounds sizes where host lengths are missing.
        dtype: dtype of q and of the output.
        kernels: "auto", a kernel's name for everything, or a mapping from forward mode to a name with an optional
            "default". A named kernel never falls back to another.
        deterministic: a request's result is bit-equal whatever else is in the batch, whether its prompt comes whole or
            in chunks, planned or replayed. Kernels are then not chosen by sizes.
        speculative: sizes of speculation, where the engine speculates.
        checks: also run the checks that read device data (default: environment variable FABACK_CHECK=1).
        allow_plugins: names of the only installed plugins that are loaded, None for all. Built-ins always are. The
            environment variable FABACK_PLUGINS, a list with commas, allows no more than it names.
        disable_plugins: names of plugins, built-ins included, that are not loaded; likewise FABACK_DISABLE_PLUGINS.
        require_plugins: names of plugins whose failure to load is an error.
        options: settings of plugins, by plugin name.
    """

    context_len: int = attrs.field(validator=_at_least(1))
    dtype: torch.dtype = attrs.field(default=torch.bfloat16, validator=_dtype)
    kernels: str | Mapping[str, str] = attrs.field(default="auto", validator=_kernels)
    deterministic: bool = False
    speculative: SpeculativeConfig | None = None
    checks: bool = attrs.field(factory=lambda: os.environ.get("FABACK_CHECK", "0") == "1")
    allow_plugins: tuple[str, ...] | None = attrs.field(
        default=None, converter=_names, validator=attrs.validators.optional(_strings)
    )
    disable_plugins: tuple[str, ...] = attrs.field(default=(), converter=_names, validator=_strings)
    require_plugins: tuple[str, ...] = attrs.field(default=(), converter=_names, validator=_strings)
    options: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)

    def configured(self, name: str, make: Callable[..., T]) -> T | None:
        """`make(**options[name])`, or None where the options do not name it.

        Args:
            name: a plugin's, or what it brings.
            make: what takes the settings as keyword arguments.

        Raises:
            ConfigError: settings that `make` does not have.
        """
        settings = self.options.get(name)
        if settings is None:
            return None
        try:
            bound = inspect.signature(make).bind(**settings)
        except TypeError as error:
            wanted = f"settings {inspect.signature(make)}"
            raise ConfigError(f"config.options[{name!r}]", wanted=wanted, got=dict(settings)) from error
        return make(*bound.args, **bound.kwargs)

    @property
    def named_modes(self) -> tuple[str, ...]:
        """The forward modes that `kernels` names."""
        return () if isinstance(self.kernels, str) else tuple(self.kernels)

    def kernel_for(self, forward_mode: str) -> str:
        """The name that `kernels` chooses for a forward mode; "auto" leaves it to the ranking."""
        if isinstance(self.kernels, str):
            return self.kernels
        return self.kernels.get(forward_mode, self.kernels.get("default", "auto"))
