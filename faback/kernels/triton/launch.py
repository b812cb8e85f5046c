"""Launches that Triton has seen before.

For every launch Triton works out which compiled form fits the arguments, which takes several times as long as the
launch itself. What it looks at hardly changes from layer to layer, or from plan to plan. Compiled forms take pointers
as plain numbers, which spares them to ask the driver about every tensor, and go straight to their launcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

Grid = tuple[int, int, int]
WIDEST = 0x7FFFFFFF
"""Largest number that Triton passes in 32 bits."""


def _free(kernel: Kernel) -> frozenset[str]:
    params = getattr(kernel.function, "params", ())  # an interpreted function has none
    return frozenset(param.name for param in params if param.do_not_specialize)


@attrs.define(eq=False)
class Kernel:
    """A Triton function with its constants, and the compiled forms of it that were needed so far.

    Attributes:
        function: what `triton.jit` made.
        constants: its last arguments by name, which `tl.constexpr` annotates.
        options: `num_warps` and the like.
    """

    function: Any
    constants: dict[str, Any]
    options: dict[str, Any] = attrs.field(factory=dict)
    _free: frozenset[str] = attrs.field(default=attrs.Factory(_free, takes_self=True), init=False)
    _compiled: dict[Any, dict[Any, Any]] = attrs.field(factory=dict, init=False)

    def bound(self, args: dict[str, Any]) -> Launch:
        """Fixes arguments that many launches share, always of the same names: all but the first ones and the constants.

        Args:
            args: tensors, numbers and None by name.
        """
        form: list[Any] = []
        for name, x in args.items():
            kind = type(x)
            if x is None:
                form.append(None)
            elif kind is int:
                form.append(x > WIDEST if name in self._free else x)
            elif kind is float:
                form.append(kind)
            else:
                form += x.dtype, x.data_ptr() % 16 == 0
        return Launch(self, args, self._compiled.setdefault(tuple(form), {}))


@attrs.frozen(eq=False)
class Compiled:
    """A compiled form, launched as Triton does, without what it prepares for profilers where none listens.

    Attributes:
        form: what Triton compiled.
        run, function, metadata: its launcher, and what that is given of the kernel.
        before, after: those that listen to launches.
        driver: knows the current device and stream.
    """

    form: Any
    run: Any
    function: Any
    metadata: Any
    before: list[Any]
    after: list[Any]
    driver: Any

    @classmethod
    def of(cls, form: Any) -> Any:
        """As above where this version of Triton tells who listens, else its own way; None for an interpreted kernel."""
        import triton

        if form is None:
            return None
        runtime = getattr(getattr(triton, "knobs", None), "runtime", None)
        hooks = (getattr(runtime, f"launch_{when}_hook", None) for when in ("enter", "exit"))
        before, after = (getattr(hook, "calls", None) for hook in hooks)
        if before is None or after is None:
            return lambda grid, *args: form[grid](*args)
        return cls(form, form.run, form.function, form.packed_metadata, before, after, triton.runtime.driver)

    def __call__(self, grid: Grid, *args: Any) -> None:
        if self.before or self.after:
            self.form[grid](*args)
            return
        gpu = self.driver.active
        stream = gpu.get_current_stream(gpu.get_current_device())
        self.run(*grid, stream, self.function, self.metadata, None, None, None, *args)


@attrs.define(eq=False)
class Launch:
    """A kernel whose last arguments are fixed.

    Attributes:
        kernel: whose.
        args: the fixed arguments by name, without the constants.
    """

    kernel: Kernel
    args: dict[str, Any]
    _compiled: dict[Any, Any]
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
        pointers, kinds, low = list[int | None](), list[Any](), 0
        for tensor in tensors:
            if tensor is None:
                pointers.append(None)
                kinds.append(None)
            else:
                pointer = tensor.data_ptr()
                low |= pointer
                pointers.append(pointer)
                kinds.append(tensor.dtype)
        aligned = low % 16 == 0 or tuple(pointer is None or pointer % 16 == 0 for pointer in pointers)
        form = (aligned, *kinds, *numbers, *[x > WIDEST for x in free])
        compiled = self._compiled.get(form)
        if compiled is None:
            named = {**self.args, **self.kernel.constants, **self.kernel.options}
            # An interpreted kernel has no compiled form.
            self._compiled[form] = Compiled.of(self.kernel.function[grid](*tensors, *numbers, *free, **named))
            return
        if not self._rest:
            fixed = {**self.args, **self.kernel.constants}
            names = self.kernel.function.arg_names[len(pointers) + len(numbers) + len(free) :]
            self._rest = tuple(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in map(fixed.get, names))
        compiled(grid, *pointers, *numbers, *free, *self._rest)
