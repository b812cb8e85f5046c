"""Memory that runs out: every operation of torch that allocates fails in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class OutOfMemory(TorchDispatchMode):
    """Within it, the operation with this number among those that make new tensors raises, and all later ones do not.

    Attributes:
        raised: there was an operation with this number.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self._left, self.raised = number, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        makes = any(value.alias_info is None for value in func._schema.returns)
        self._left -= makes
        if makes and self._left == -1:
            self.raised = True
            raise torch.OutOfMemoryError(f"no memory for {func}")
        return func(*args, **(kwargs or {}))


def failures(call: Callable[[], Any]) -> Iterator[torch.OutOfMemoryError]:
    """Calls until the call succeeds, each time with another operation failing; each failure is an item.

    The call must let the error through.
    """
    for number in count():
        caught = None
        with OutOfMemory(number) as memory:
            try:
                call()
            except torch.OutOfMemoryError as error:
                caught = error
        assert memory.raised == (caught is not None), "an error of the device was swallowed"
        if caught is None:
            return
        yield caught
