"""CUDA graphs for an engine's steps: sizes, padding, recording, replay and what they cost.

A graph runs on the tensors that it was recorded with. The runner owns one set of them, as large as the largest batch;
smaller sizes use their beginnings. A batch is copied in and padded with requests of row 0, which have no tokens: they
read nothing, write nothing that lives, and their output is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import attrs
import torch

from faback.core.batch import MIRRORED, ForwardBatch
from faback.core.errors import BatchError, ConfigError
from faback.core.graphs import check_bounds, tensors_of
from faback.core.plan import Plan

Tensor = torch.Tensor
T = TypeVar("T")
Model = Callable[..., Tensor]
"""`model(batch, **inputs) -> output`, first dimension tokens or requests: one pass that never waits for the device."""


class Capturing(Protocol):
    """`AttentionBackend` or `MultiStepDraft`."""

    def reserve(self, batches: Iterable[ForwardBatch], bounds: Mapping[str, int] | None = None) -> int: ...

    def capture(self, batch: ForwardBatch, bounds: Mapping[str, int] | None = None) -> Plan | tuple[Plan, ...]: ...

    def replay(self, batch: ForwardBatch) -> Any: ...


@attrs.frozen
class GraphMemory:
    """What a runner takes, in bytes.

    Attributes:
        metadata: of the plans, shared by all sizes.
        static: the batch's tensors and the model's inputs.
        graphs: of all graphs together, the model's activations among it; 0 on a CPU, and with another
            allocator than torch's usual one (`cudaMallocAsync`).
    """

    metadata: int
    static: int
    graphs: int

    def __str__(self) -> str:
        parts = attrs.asdict(self).items()
        return ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in parts)


@attrs.frozen(eq=False)
class Recorded:
    """One size: its static batch, its plan, and on a GPU the graph and where that leaves the output."""

    batch: ForwardBatch
    inputs: dict[str, Tensor]
    plan: Plan
    output: Tensor | None
    graph: torch.cuda.CUDAGraph | None


class GraphRunner:
    """Runs passes of one forward mode as CUDA graphs, one for each of some numbers of requests.

    On a CPU nothing can be recorded: the same plans are brought up to date and the model is called.

    Args:
        backend: whose plans the model uses.
        model: one pass; called while graphs are recorded, never afterwards.
        largest: the largest batch; only its mode and the shapes and dtypes of its tensors count. Per-request tensors
            have one entry per request, others a multiple of that; a mask is taken whole by every size.
        inputs: the model's other arguments, likewise.
        sizes: numbers of requests; powers of two up to 8 and multiples of 8 unless given.
        bounds: longest lengths, as for `AttentionBackend.capture`.

    Raises:
        ConfigError: sizes beyond the largest batch, or tensors that cannot be cut.
    """

    def __init__(
        self,
        backend: Capturing,
        model: Model,
        largest: ForwardBatch,
        inputs: Mapping[str, Tensor],
        *,
        sizes: Sequence[int] | None = None,
        bounds: Mapping[str, int] | None = None,
    ) -> None:
        self.sizes = tuple(sorted(set(usual_sizes(largest.bs) if sizes is None else sizes)))
        if not self.sizes or self.sizes[0] < 1 or self.sizes[-1] > largest.bs:
            raise ConfigError("sizes", wanted=f"numbers from 1 to {largest.bs}", got=list(self.sizes))
        self._backend, self._model, self._bounds = backend, model, dict(bounds or {})
        self._largest = largest
        self._tensors = {name: torch.zeros_like(tensor) for name, tensor in tensors_of(largest).items()}
        self._inputs = {name: torch.zeros_like(tensor) for name, tensor in inputs.items()}
        for name, tensor in (self._tensors | self._inputs).items():
            if name != "custom_mask" and tensor.shape[0] % largest.bs:
                raise ConfigError(name, wanted=f"a multiple of {largest.bs} entries", got=tensor.shape[0])
        self._device = largest.req_pool_indices.device
        self._recorded: dict[int, Recorded] = {}
        on_gpu = self._device.type == "cuda"
        self._stream: torch.cuda.Stream | None = torch.cuda.Stream(self._device) if on_gpu else None  # type: ignore[no-untyped-call]

    def capture(self, progress: bool = False) -> GraphMemory:
        """`capture_all` of this runner alone."""
        return capture_all([self], progress)

    @property
    def static_bytes(self) -> int:
        """Bytes of the batch's tensors and the model's inputs."""
        return sum(t.numel() * t.element_size() for t in (*self._tensors.values(), *self._inputs.values()))

    def size_for(self, bs: int) -> int | None:
        """The smallest recorded size for that many requests, None if all are too small."""
        return min((size for size in self._recorded if size >= bs), default=None)

    def run(self, batch: ForwardBatch, **inputs: Tensor) -> Tensor:
        """One pass: as many rows of the output as the batch has tokens, or in proportion to its requests.

        The output is the graph's own memory: it holds until the next pass of any size.

        Raises:
            BatchError: too many requests or tokens, a length beyond its bound, or other tensors than those of the
                largest batch. Nothing has run then.
        """
        size = self.size_for(batch.bs)
        if size is None:
            wanted = f"at most {max(self._recorded, default=0)} requests, as recorded"
            raise BatchError("batch", wanted=wanted, got=batch.bs, hint="Call capture() with larger sizes first.")
        recorded = self._recorded[size]
        assert recorded.plan.batch.bounds is not None
        check_bounds(batch, recorded.plan.batch.bounds)
        static = tensors_of(recorded.batch)
        pairs = [*_pairs(static, tensors_of(batch), "batch."), *_pairs(recorded.inputs, inputs, "")]
        recorded.plan.ws.wait()
        for mine, theirs in pairs:
            mine[: theirs.shape[0]].copy_(theirs, non_blocking=True)
            if mine is not recorded.batch.custom_mask:  # nobody reads on
                mine[theirs.shape[0] :].zero_()
        if recorded.graph is None:
            self._backend.replay(recorded.batch)
            output = self._model(recorded.batch, **recorded.inputs)
        else:
            assert recorded.output is not None
            recorded.graph.replay()
            recorded.plan.ws.used()
            output = recorded.output
        by_token = output.shape[0] == recorded.batch.num_tokens
        return output[: batch.num_tokens if by_token else output.shape[0] // size * batch.bs]

    def _record(self, size: int, pool: Any) -> Recorded:
        batch, inputs = self._static(size)
        stream = self._stream
        if stream is None:
            return Recorded(batch, inputs, _one(self._backend.capture(batch, self._bounds)), None, None)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):  # compiles, and allocates what lasts, which recording could not
            self._backend.capture(batch, self._bounds)
            self._model(batch, **inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            plan = _one(self._backend.capture(batch, self._bounds))
            output = self._model(batch, **inputs)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        return Recorded(batch, inputs, plan, output, graph)

    def _static(self, size: int) -> tuple[ForwardBatch, dict[str, Tensor]]:
        """The batch of a size and the model's inputs, the beginnings of the runner's tensors."""

        def cut(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            most = self._largest.bs
            return {n: t if n == "custom_mask" else t[: t.shape[0] // most * size] for n, t in tensors.items()}

        tensors: dict[str, Any] = dict(cut(self._tensors))
        extras = {name: tensors.pop(name, value) for name, value in self._largest.extras.items()}
        tensors |= {f"{name}_cpu": None for name in MIRRORED}
        tokens = self._largest.num_tokens // self._largest.bs * size
        batch = attrs.evolve(self._largest, extras=extras, num_tokens=tokens, **tensors)
        return batch, cut(self._inputs)


def capture_all(runners: Sequence[GraphRunner], progress: bool = False) -> GraphMemory:
    """Reserves the metadata of several runners of one backend, records all their sizes, and says what that takes.

    The largest sizes come first, and all graphs share one pool of memory, so one of them may run at a time. Where
    something raises, the runners are left as they were, and may be captured again.

    Args:
        runners: their backend has reserved nothing yet, or room for them.
        progress: show a bar (needs rich).

    Raises:
        ConfigError: runners of several backends.
    """
    backend = runners[0]._backend
    if any(runner._backend is not backend for runner in runners):
        raise ConfigError("capture_all", wanted="runners of one backend", got="several backends")
    metadata = backend.reserve([runner._static(runner.sizes[-1])[0] for runner in runners], runners[0]._bounds)
    pool = torch.cuda.graph_pool_handle() if runners[0]._stream is not None else None
    passes = [(size, runner) for runner in runners for size in runner.sizes]
    recorded: dict[GraphRunner, dict[int, Recorded]] = {runner: {} for runner in runners}
    for size, runner in _shown(sorted(passes, key=lambda item: -item[0]), progress):
        recorded[runner][size] = runner._record(size, pool)
    for runner, sizes in recorded.items():
        runner._recorded = sizes
    static = sum(runner.static_bytes for runner in runners)
    return GraphMemory(metadata, static, _held(pool))


def usual_sizes(largest: int) -> list[int]:
    """1, 2, 4, then every multiple of 8, and the largest itself."""
    return sorted({n for n in (1, 2, 4, *range(8, largest + 1, 8), largest) if n <= largest})


def _pairs(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor], prefix: str) -> list[tuple[Tensor, Tensor]]:
    """Static tensors and what is to be copied into them.

    Raises:
        BatchError: a tensor too many, too few or too long. Nothing has been copied then.
    """
    for name in sorted(mine.keys() ^ theirs.keys()):
        known = mine.get(name)
        wanted = "no such tensor" if known is None else f"{known.dtype} {list(known.shape)}"
        hint = "A recorded pass has the tensors of the batch that the runner was made with."
        raise BatchError(f"{prefix}{name}", wanted=wanted, got="a tensor" if name in theirs else None, hint=hint)
    for name, static in mine.items():
        if theirs[name].shape[0] > static.shape[0] or theirs[name].shape[1:] != static.shape[1:]:
            wanted = f"at most {list(static.shape)}"
            raise BatchError(f"{prefix}{name}", wanted=wanted, got=list(theirs[name].shape))
    return [(static, theirs[name]) for name, static in mine.items()]


def _one(plan: Plan | tuple[Plan, ...]) -> Plan:
    """A plan of what was captured; those of several steps share their workspace and bounds."""
    return plan if isinstance(plan, Plan) else plan[0]


def _held(pool: Any) -> int:
    """Bytes of a pool of graphs. All that torch holds says less: recording frees what garbage has held."""
    if pool is None or torch.cuda.get_allocator_backend() != "native":  # others cannot tell pools apart
        return 0
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return sum(segment["total_size"] for segment in segments if segment["segment_pool_id"] == pool)


def _shown(passes: Sequence[T], progress: bool) -> Iterable[T]:
    if not progress:
        return passes
    from rich.progress import track

    return track(passes, "Recording CUDA graphs")
