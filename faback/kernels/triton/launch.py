"""Launches that Triton has seen before.

For every launch Triton works out which compiled form fits the arguments, which takes several times as long as the
launch itself. What it looks at hardly changes from layer to layer. Compiled forms take pointers as plain numbers, which
spares them to ask the driver about every tensor.
"""

from __future__ import annotations

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

    def __call__(self, grid: Grid, *varying: Any, counts: tuple[int, ...] = ()) -> None:
        """Launches the kernel.

        Args:
            grid: three sizes.
            varying: the first arguments, which it may be specialised on.
            counts: the next ones, numbers that it is not specialised on.
        """
        args, forms = list[Any](), list[Any]()
        for x in varying:
            if isinstance(x, torch.Tensor):
                pointer = x.data_ptr()
                args.append(pointer)
                forms += (x.dtype, pointer % 16 == 0)
            else:
                args.append(x)
                forms.append(float if isinstance(x, float) else x)
        form = (*forms, *(count > 0x7FFFFFFF for count in counts))
        compiled = self._compiled.get(form)
        if compiled is None:
            # An interpreted kernel has no compiled form.
            self._compiled[form] = self.kernel[grid](*varying, *counts, **self.fixed, **self.options)
            return
        if not self._rest:
            rest = (self.fixed.get(name) for name in self.kernel.arg_names[len(varying) + len(counts) :])
            self._rest = tuple(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in rest)
        compiled[grid](*args, *counts, *self._rest)
