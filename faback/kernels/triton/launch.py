"""Launches that Triton has seen before.

For every launch Triton works out which compiled form fits the arguments, which takes several times as long as the
launch itself. What it looks at hardly changes from layer to layer. Compiled forms take pointers as plain numbers, which
spares them to ask the driver about every tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

Grid = tuple[int, int, int]


@attrs.define(eq=False)
class Launch:
    """A Triton kernel whose last arguments are fixed.

    Attributes:
        kernel: the function that `triton.jit` made.
        fixed: the arguments by name that stay, constants among them: all but the first ones.
        options: `num_warps` and the like.
    """

    kernel: Any
    fixed: dict[str, Any]
    options: dict[str, Any] = attrs.field(factory=dict)
    _compiled: dict[Any, Any] = attrs.field(factory=dict, init=False)
    _rest: tuple[Any, ...] = attrs.field(default=(), init=False)

    def __call__(
        self,
        grid: Grid,
        tensors: Sequence[torch.Tensor | None],
        numbers: tuple[int, ...] = (),
        free: tuple[float, ...] = (),
    ) -> None:
        """Launches the kernel, whose arguments begin with these, in order.

        Args:
            grid: three sizes.
            tensors: told apart by dtype and alignment.
            numbers: told apart by value, constants among them.
            free: numbers that the kernel is not specialised on.
        """
        pointers, forms = list[int | None](), list[Any]()
        for tensor in tensors:
            if tensor is None:
                pointers.append(None)
                forms.append(None)
            else:
                pointer = tensor.data_ptr()
                pointers.append(pointer)
                forms.append((tensor.dtype, pointer % 16 == 0))
        form = (*forms, *numbers, *[x > 0x7FFFFFFF for x in free])
        compiled = self._compiled.get(form)
        if compiled is None:
            # An interpreted kernel has no compiled form.
            self._compiled[form] = self.kernel[grid](*tensors, *numbers, *free, **self.fixed, **self.options)
            return
        if not self._rest:
            names = self.kernel.arg_names[len(tensors) + len(numbers) + len(free) :]
            rest = (self.fixed.get(name) for name in names)
            self._rest = tuple(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in rest)
        compiled[grid](*pointers, *numbers, *free, *self._rest)
