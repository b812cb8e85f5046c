"""What the pools accept: sizes, devices and index arguments, checked and normalised in one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from faback.core.errors import ConfigError, PoolError
from faback.core.pools import MAX_SLOTS
from faback.core.segment import INDEX_DTYPES

Tensor = torch.Tensor
Index = Sequence[int] | Tensor
"""Lengths, slots or rows: Python integers or an int32/int64 tensor, on any device."""


def at_least(minimum: int, hint: str | None = None) -> Callable[[Any, attrs.Attribute[int], int], None]:
    """An attrs validator: an integer that is not below the minimum, or a `ConfigError`."""

    def validate(instance: Any, attribute: attrs.Attribute[int], value: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            what = f"{type(instance).__name__}.{attribute.name}"
            raise ConfigError(what, wanted=f"an integer >= {minimum}", got=repr(value), hint=hint)

    return validate


def check_num_slots(owner: str, num_pages: int, page_size: int) -> None:
    """Raises a `ConfigError` where slot numbers would not fit the int32 `req_to_token`."""
    if num_pages * page_size > MAX_SLOTS:
        raise ConfigError(
            f"{owner}.num_pages",
            wanted=f"at most {MAX_SLOTS} slots",
            got=f"{num_pages} pages of {page_size}",
            hint="Slots are stored as int32 in req_to_token; use fewer pages per pool.",
        )


def real_device(device: torch.device | str) -> torch.device:
    """The device with its index, as tensors on it report it ("cuda" becomes "cuda:0")."""
    return torch.empty(0, device=device).device


def index_tensor(name: str, value: Index, *, flat: bool = False) -> Tensor:
    """An index argument as a tensor of its own dtype, on its own device; it may alias the argument.

    Args:
        name: how the argument is called in errors.
        value: Python integers, or an int32/int64 tensor [n].
        flat: accept a tensor of any shape and flatten it.

    Raises:
        PoolError: another dtype or shape.
    """
    if isinstance(value, Tensor):
        tensor = value
    else:
        try:
            tensor = torch.tensor(value) if len(value) else torch.empty(0, dtype=torch.int64)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise PoolError(name, wanted="integers, or an int32 or int64 tensor", got=repr(value)) from error
    if tensor.dtype not in INDEX_DTYPES:
        raise PoolError(name, wanted="integers, or an int32 or int64 tensor", got=tensor.dtype)
    if tensor.ndim != 1 and not flat:
        raise PoolError(name, wanted="one dimension", got=list(tensor.shape))
    return tensor.reshape(-1)


def host_index(name: str, value: Index, *, flat: bool = False) -> Tensor:
    """Like `index_tensor`, brought to the CPU as int64: synchronises with the device of a device tensor."""
    return index_tensor(name, value, flat=flat).to("cpu", torch.int64)


def check_values(name: str, tensor: Tensor, bound: int) -> None:
    """Raises a `PoolError` unless all values lie in 0 ... bound - 1. Looks at CPU tensors only."""
    if tensor.device.type != "cpu" or not tensor.numel():
        return
    low, high = int(tensor.min()), int(tensor.max())
    if low < 0 or high >= bound:
        raise PoolError(name, wanted=f"values 0 to {bound - 1}", got=low if low < 0 else high)


def check_distinct(name: str, tensor: Tensor) -> None:
    """Raises a `PoolError` where a value of a [n] CPU tensor occurs twice. Does not look at other tensors."""
    if tensor.device.type != "cpu":
        return
    ordered = tensor.sort().values
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.numel():
        raise PoolError(name, wanted="each value once", got=f"{int(twice[0])} twice")


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device; a copy from the CPU to an accelerator does not wait."""
    return tensor.to(device, non_blocking=tensor.device.type == "cpu")


def check_count(name: str, value: int, minimum: int = 0) -> None:
    """Raises a `PoolError` unless the value is an integer of at least the minimum."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise PoolError(name, wanted=f"an integer >= {minimum}", got=repr(value))


def check_length(name: str, tensor: Tensor, length: int) -> None:
    """Raises a `PoolError` unless a [n] tensor has one entry per request."""
    if tensor.shape[0] != length:
        raise PoolError(name, wanted=f"one entry per request ({length})", got=tensor.shape[0])
