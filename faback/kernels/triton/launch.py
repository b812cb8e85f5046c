"""Launches that Triton has seen before.

For every launch Triton works out which compiled form fits the arguments, which takes several times as long as the
launch itself. What it looks at hardly changes from layer to layer.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

Grid = tuple[int, int, int]


@attrs.define(eq=False)
class Launch:
    """A Triton kernel with some of its arguments fixed.

    Attributes:
        kernel: the function that `triton.jit` made.
        fixed: arguments by name that stay, constants among them.
        options: `num_warps` and the like.
    """

    kernel: Any
    fixed: dict[str, Any]
    options: dict[str, Any] = attrs.field(factory=dict)
    _forms: dict[Any, Any] = attrs.field(factory=dict, init=False)
    _args: list[Any] = attrs.field(factory=list, init=False)
    _places: list[int] = attrs.field(factory=list, init=False)

    def __call__(self, grid: Grid, varying: dict[str, Any], counts: dict[str, int] | None = None) -> None:
        """Launches the kernel.

        Args:
            grid: three sizes.
            varying: arguments by name that it may be specialised on; the same names in the same order each time.
            counts: numbers by name that it is not specialised on, likewise.
        """
        counts = counts or {}
        form = (*map(_form, varying.values()), *(count.bit_length() > 31 for count in counts.values()))
        compiled = self._forms.get(form)
        if compiled is None:
            # An interpreted kernel has no compiled form.
            self._forms[form] = self.kernel[grid](**varying, **counts, **self.fixed, **self.options)
            return
        if not self._places:
            names = self.kernel.arg_names
            self._args = [self.fixed.get(name) for name in names]
            self._places = [names.index(name) for name in (*varying, *counts)]
        args = self._args.copy()
        for place, value in zip(self._places, (*varying.values(), *counts.values()), strict=True):
            args[place] = value
        compiled[grid](*args)


def _form(value: Any) -> Any:
    """What Triton may specialise a kernel on."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    return value if isinstance(value, int) else type(value)
