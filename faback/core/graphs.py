"""Plans that are made once and used many times: what CUDA graphs need.

A captured plan reads its lengths on the device, from tensors whose addresses never change. Its host integers are upper
bounds, fixed when it is captured. The fills that made its metadata are remembered in order and can be issued again
without a builder, a hook or an allocation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, TypeVar

import attrs
import torch

from faback.core.batch import MIRRORED, ON_DEVICE, ForwardBatch
from faback.core.errors import BatchError, CapacityError
from faback.core.workspace import DeviceOps, Workspace, stream_of

Tensor = torch.Tensor

T = TypeVar("T")


@attrs.define(eq=False)
class Arena:
    """Memory that captured plans share, by what it is for. A plan fills what it reads anew each time, so on one stream
    plans of several sizes can have the same.

    Attributes:
        sealed: nothing may grow any more.
    """

    device: torch.device
    sealed: bool = False
    _streams: dict[int, torch.cuda.Stream] = attrs.field(factory=dict)
    _buffers: dict[Any, Tensor] = attrs.field(factory=dict)

    def take(self, key: tuple[str, int, torch.dtype], shape: tuple[int, ...]) -> Tensor:
        """The first elements of a buffer.

        Raises:
            CapacityError: it would have to grow, and is sealed.
        """
        size = 1
        for length in shape:
            size *= length
        known = self._buffers.get(key)
        if known is None or known.shape[0] < size:
            if self.sealed:
                hint = "Name the largest batch of every mode in `reserve`."
                got = 0 if known is None else known.shape[0]
                raise CapacityError(f"graph buffer {key[0]!r}", wanted=f"{size} elements", got=got, hint=hint)
            known = self._buffers[key] = torch.zeros(size, dtype=key[2], device=self.device)
        return known[:size].view(shape)

    @contextmanager
    def growing(self) -> Iterator[None]:
        """A block after which the memory is sealed; if it raises, the memory is as it was before."""
        before = dict(self._buffers)
        try:
            yield
        except BaseException:
            self._buffers = before
            raise
        self.sealed = True

    def wait(self) -> None:
        """Makes the current stream wait until no other one reads the memory, which may then be filled anew."""
        if self._streams:
            current = torch.cuda.current_stream(self.device)
            self._streams.pop(stream_of(self.device), None)
            for stream in self._streams.values():
                current.wait_stream(stream)
            self._streams.clear()

    def used(self, stream: int) -> None:
        """Says that a plan is read on the current stream, of that number."""
        if stream not in self._streams:
            self._streams[stream] = torch.cuda.current_stream(self.device)

    @property
    def nbytes(self) -> int:
        """How large it is."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())


class GraphWorkspace(Workspace):
    """Static memory, and a record of what was launched.

    Attributes:
        record: the fills and updates in order, each a call without arguments.
    """

    features = frozenset({"graph"})

    def __init__(self, ops: DeviceOps, device: torch.device, constants: dict[Any, Any], arena: Arena) -> None:
        super().__init__(ops, device, constants)
        self.record: list[Callable[[], None]] = []
        self._arena = arena
        self._taken: dict[tuple[str, torch.dtype], int] = {}

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        number = self._taken.get((name, dtype), 0)
        self._taken[name, dtype] = number + 1
        return self._arena.take((name, number, dtype), shape)

    def used(self) -> None:
        if self.device.type == "cuda":
            self._arena.used(stream_of(self.device))

    def wait(self) -> None:
        self._arena.wait()

    def scratch(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        return self._arena.take((name, -1, dtype), (size,))

    def launch(self, op: Callable[..., None], *inputs: Any, **params: Any) -> None:
        self.record.append(partial(op, *inputs, **params))
        op(*inputs, **params)


class MeasuringWorkspace(GraphWorkspace):
    """Learns how much memory a plan wants; launches nothing, and so leaves all state alone."""

    def launch(self, op: Callable[..., None], *inputs: Any, **params: Any) -> None:
        return


@attrs.frozen(eq=False)
class Captured(Generic[T]):
    """One plan, or plans of several steps, that can be used again.

    Attributes:
        plan: as it was built.
        batch: the engine's static tensors, and the bounds.
        record: fills and updates in order.
    """

    plan: T
    batch: ForwardBatch
    record: tuple[Callable[[], None], ...]

    def load(self, batch: ForwardBatch) -> None:
        """Copies a batch into the static tensors, where it is not in them already, and fills the metadata anew.

        Raises:
            BatchError: a field of another size, or beyond a bound. Nothing has been copied then.
        """
        pairs = list(self._pairs(batch))
        assert self.batch.bounds is not None
        check_bounds(batch, self.batch.bounds)
        for mine, theirs in pairs:
            mine.copy_(theirs, non_blocking=True)
        for fill in self.record:
            fill()

    def _pairs(self, batch: ForwardBatch) -> Iterable[tuple[Tensor, Tensor]]:
        """The tensors that have to be copied."""
        known, given = tensors_of(self.batch), tensors_of(batch)
        for name, mine in known.items():
            theirs = given.get(name)
            if theirs is None:
                hint = "A captured pass wants the fields that it was captured with."
                raise BatchError(f"batch.{name}", wanted=f"{mine.dtype} {list(mine.shape)}", got=None, hint=hint)
            if theirs.data_ptr() == mine.data_ptr() and theirs.stride() == mine.stride() and theirs.shape == mine.shape:
                continue
            room = name == "custom_mask" and theirs.shape[0] <= mine.shape[0]
            if theirs.shape != mine.shape and not room:
                hint = "Pad the batch to the size that was captured, or capture this size."
                raise BatchError(f"batch.{name}", wanted=list(mine.shape), got=list(theirs.shape), hint=hint)
            yield mine[: theirs.shape[0]] if room else mine, theirs
        for name in given.keys() - known.keys():
            hint = "A field that was not there at capture would be ignored."
            raise BatchError(f"batch.{name}", wanted=None, got="a tensor", hint=hint)


class Graphs(Generic[T]):
    """The captured plans of one backend.

    Args:
        build: makes a plan, or one for each of several steps, in a workspace.
        workspace: makes a workspace of a kind on an arena.
        bounds: of lengths that no one else bounds, by name of the field.
        arena: where metadata lives.
    """

    def __init__(
        self,
        build: Callable[[ForwardBatch, Workspace], T],
        workspace: Callable[[type[GraphWorkspace], Arena], GraphWorkspace],
        bounds: Mapping[str, int],
        arena: Arena,
    ) -> None:
        self._build, self._workspace, self._bounds, self.arena = build, workspace, bounds, arena
        self._captured: dict[Any, Captured[T]] = {}

    def reserve(self, batches: Iterable[ForwardBatch], bounds: Mapping[str, int]) -> int:
        """Allocates for the largest batches, and seals the memory; returns its bytes.

        Memory that is sealed already must have room for them.
        """
        with self.arena.growing():
            for batch in batches:
                self._build(self._static(batch, bounds), self._workspace(MeasuringWorkspace, self.arena))
        return self.arena.nbytes

    def capture(self, batch: ForwardBatch, bounds: Mapping[str, int]) -> T:
        """Plans for the static tensors of a batch, and remembers how."""
        static = self._static(batch, bounds)
        self.arena.wait()
        ws = self._workspace(GraphWorkspace, self.arena)
        plan = self._build(static, ws)
        self._captured[signature(batch)] = Captured(plan, static, tuple(ws.record))
        return plan

    def replay(self, batch: ForwardBatch) -> T:
        """Brings a captured plan up to date with a batch."""
        captured = self._captured.get(signature(batch))
        if captured is None:
            sizes = sorted({f"{key[0]} of {key[1]} requests, {key[2]} tokens" for key in self._captured})
            got = f"{batch.forward_mode} of {batch.bs} requests, {batch.num_tokens} tokens"
            hint = "Pad the batch to a size that was captured."
            raise BatchError("replay", wanted=f"one of {sizes}", got=got, hint=hint)
        self.arena.wait()
        captured.load(batch)
        return captured.plan

    def _static(self, batch: ForwardBatch, bounds: Mapping[str, int]) -> ForwardBatch:
        unknown = sorted(set(bounds) - set(MIRRORED))
        if unknown:
            raise BatchError("bounds", wanted=f"bounds of {', '.join(MIRRORED)}", got=", ".join(unknown))
        usual = {name: bound for name, bound in self._bounds.items() if getattr(batch, name) is not None}
        usual |= {"extend_seq_lens": batch.num_tokens} if batch.extend_seq_lens is not None else {}
        mirrors: dict[str, Any] = {f"{name}_cpu": None for name in MIRRORED}
        return attrs.evolve(batch, bounds={**usual, **bounds}, **mirrors)


def check_bounds(batch: ForwardBatch, bounds: Mapping[str, int]) -> None:
    """Raises a `BatchError` for a length that the host knows to be beyond what was captured."""
    for name in MIRRORED:
        longest, bound = batch.bound(name, 0), bounds.get(name)
        if bound is not None and longest > bound:
            hint = f"Capture with bounds={{{name!r}: {longest}}} or more."
            raise BatchError(f"batch.{name}", wanted=f"at most {bound}, as captured", got=longest, hint=hint)


def signature(batch: ForwardBatch) -> tuple[Any, ...]:
    """What a captured plan is for, apart from the contents of tensors."""
    return (batch.forward_mode, batch.bs, batch.num_tokens, batch.draft_step, batch.token_stride)


def tensors_of(batch: ForwardBatch) -> dict[str, Tensor]:
    """A batch's tensors on the device, extras included, by name."""
    found = {name: tensor for name in ON_DEVICE if (tensor := getattr(batch, name)) is not None}
    return found | {name: value for name, value in batch.extras.items() if isinstance(value, Tensor)}
