"""Everything that an object holds, for proving that a failed call changed nothing."""

from __future__ import annotations

from typing import Any

import attrs
import torch


def snapshot(value: Any) -> Any:
    """A deep copy of an object's state that compares with ==."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), value.tolist())
    if attrs.has(type(value)):
        return {field.name: snapshot(getattr(value, field.name)) for field in attrs.fields(type(value))}
    if isinstance(value, (list, tuple)):
        return [snapshot(item) for item in value]
    return set(value) if isinstance(value, set) else value
