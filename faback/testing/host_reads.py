"""Which code reads on the host what engines keep on the device: it would wait for the GPU, and no capture records it.

A GPU tells by itself, with an error while a graph is recorded. Here the CPU plays the device, where every such read
works and looks harmless.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Tensor = torch.Tensor

# Of what they are given, the host gets to know numbers, or sizes that depend on numbers.
READS = frozenset(
    {"_local_scalar_dense", "_unique2", "equal", "is_nonzero", "masked_select", "nonzero", "repeat_interleave"}
    | {"unique_consecutive", "unique_dim"}
)
# These look into the memory of a CPU tensor and come by no dispatcher.
LOOKS = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__})


class HostReads:
    """A context within which the host must not read certain tensors, nor what was computed from them.

    Args:
        tensors: which play the device's.

    Raises:
        RuntimeError: at the first read, where it happens, as from a GPU.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        # Tensors are held, or the address of one that is gone could come back as another's.
        self._device = {_memory(tensor): tensor for tensor in tensors}
        self._modes = ExitStack()

    def __enter__(self) -> None:
        self._modes.enter_context(_Operations(self))
        self._modes.enter_context(_Looks(self))

    def __exit__(self, *error: object) -> None:
        self._modes.close()

    def concern(self, given: Any) -> bool:
        """Whether arguments are, or were computed from, the tensors."""
        return any(_memory(x) in self._device for x in tree_leaves(given) if isinstance(x, Tensor))

    def spread(self, result: Any) -> None:
        """Counts what was computed among the tensors."""
        self._device.update((_memory(x), x) for x in tree_leaves(result) if isinstance(x, Tensor))

    def refuse(self, operation: str) -> None:
        """Raises for a read."""
        raise RuntimeError(
            f"the host reads a tensor of the device ({operation}), which no capture can record: compute it on the "
            "device with a fill, or take a bound from the batch, `batch.bound(name, limit)`"
        )


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, reads: HostReads) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._reads = reads

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        concerned = self._reads.concern((args, kwargs))
        name = func.overloadpacket.__name__
        picked_by_mask = name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1])
        if concerned and (name in READS or picked_by_mask):
            self._reads.refuse(f"aten.{name}")
        result = func(*args, **(kwargs or {}))
        if concerned:
            self._reads.spread(result)
        return result


class _Looks(TorchFunctionMode):
    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in LOOKS and self._reads.concern(args):
            self._reads.refuse(f"Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
