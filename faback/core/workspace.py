"""Workspaces: who owns the memory of metadata and when it is filled.

A builder never allocates and never launches. It asks for a tensor by name and says how the tensor is filled; the
workspace decides where it lives. Here is the eager one, which makes fresh tensors at once.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, Protocol

import torch

from faback.core.errors import CapacityError
from faback.core.segment import KVView, KVWrite, Segment

Tensor = torch.Tensor


class DeviceOps(Protocol):
    """The operations that faback itself launches on one kind of device. All are free of host synchronisation.

    The fills write their first argument; lengths and tables are int32 or int64, outputs are int32 unless said.
    """

    def lens(self, out: Tensor, source: Tensor, *, add: int, active: Tensor | None) -> None:
        """out[b] = source[b] + add, and 0 in padded rows: those where `active` [b] is 0."""
        ...

    def offsets(self, out: Tensor, lens: Tensor) -> None:
        """out [n + 1] = running sum of lens [n], from 0."""
        ...

    def step_lens(self, out: Tensor, source: Tensor | None, *, active: Tensor) -> None:
        """out [steps, n]: out[s, b] = source[b] + s + 1 (source None: 0), and 0 where `active` [b] is 0."""
        ...

    def row_lens(self, out: Tensor, *, value: int, active: Tensor) -> None:
        """out[b] = value, and 0 where `active` [b] is 0."""
        ...

    def tree(self, out: Tensor, custom_mask: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, *, size: int) -> None:
        """out [`tree_lines(size)`, tokens]: who sees whom in a tree, and where each token stands. See `tree_parts`.

        The mask is the last columns of each request's block of a flat one. Request b's block is [n, seq_lens[b] + n]
        with n = cu_seqlens_q[b + 1] - cu_seqlens_q[b]; blocks follow one another. Columns from n or `size` on are
        False. Nothing outside custom_mask is read, whatever the lengths say. A token stands at seq_lens of its request
        plus the number of tokens that it sees besides itself.
        """
        ...

    def pack(self, out: Tensor, mask: Tensor) -> None:
        """out [tokens, words] = bool mask [tokens, columns], column c as bit c % 32 of word c // 32."""
        ...

    def branch_positions(self, out: Tensor, source: Tensor, *, each: int) -> None:
        """out [steps, n * each]: out[s, b * each + i] = source[b] + s."""
        ...

    def sum(self, out: Tensor, source: Tensor, lens: Tensor) -> None:
        """out[b] = source[b] + lens[b], and 0 where lens[b] is 0."""
        ...

    def positions(self, out: Tensor, segment: Segment) -> None:
        """out [tokens]: where each query stands."""
        ...

    def page_table(self, out: Tensor, view: KVView, lens: Tensor) -> None:
        """out [rows, pages]: page ids of a view's rows from its start on, translated, 0 past each length."""
        ...

    def slot_table(self, out: Tensor, segment: Segment) -> None:
        """out [rows, width]: slots of each row's keys, and of a tail that continues the view; 0 past the end.

        Without rows out may still have one, which is 0.
        """
        ...

    def virtual_batches(self, out: Tensor, segment: Segment) -> None:
        """out [4, n + 1]: the segment's rows cut at chunk borders.

        out[0] = cu_seqlens_q; of each piece out[1] = kv_len, out[2] = start, out[3] = req_pool_indices. Pieces beyond
        the last have no query.
        """
        ...

    def query_rows(self, out: Tensor, segment: Segment) -> None:
        """out [3, tokens]: of each query the kv_len, start and req_pool_index of its contiguous span of keys."""
        ...

    def compact(self, out: Tensor, segment: Segment) -> None:
        """out [tokens * (1 + keys)]: how many keys each query sees, then [tokens, keys] their slots, tail last."""
        ...

    def prompt_reach(
        self,
        out: Tensor,
        prompts: Tensor,
        rows: Tensor,
        seq_lens: Tensor,
        extend_seq_lens: Tensor | None,
        prompt_lens: Tensor | None,
        *,
        later: int,
        prompt: int,
    ) -> None:
        """out [3, n]: the prompt that each row keeps in sight, how far it looks to the left, whether it comes later.

        A row b comes after its prompt if there are no `extend_seq_lens` [n] at all; or if seq_lens[b] is more than its
        `prompt_lens` [n], where these are given; or else if it brings one token to a longer request whose prompt is
        known. It then keeps prompts[rows[b]] and looks `later` far; a prompt keeps 0 and looks `prompt` far.
        """
        ...

    def remember(self, prompts: Tensor, rows: Tensor, seq_lens: Tensor, later: Tensor | None) -> None:
        """prompts[rows[b]] = seq_lens[b], except where later[b] is not 0; and 0 in row 0, which is padding's."""
        ...

    def near_keys(
        self,
        out: Tensor,
        lens: Tensor,
        offsets: Tensor,
        active: Tensor | None,
        *,
        left: int,
        page_size: int,
    ) -> None:
        """out [2, n]: first key that row b's queries may see, a multiple of the page size, and how many are left.

        The offsets[b + 1] - offsets[b] queries are the last of lens[b] tokens and look `left` far. Both are 0 where
        `active` [n] is 0.
        """
        ...

    def translate(self, out: Tensor, slots: Tensor, slot_map: Tensor) -> None:
        """out = slot_map[slots], elementwise."""
        ...

    def set_kv(
        self,
        k: Tensor,
        v: Tensor | None,
        k_cache: Tensor,
        v_cache: Tensor,
        write: KVWrite,
        k_scale: float | Tensor | None,
        v_scale: float | Tensor | None,
    ) -> None:
        """Stores k, v [tokens, heads, dim] in their slots, divided by the scale, cast and translated; v may be None."""
        ...

    def clear(self, out: Tensor, lse: Tensor | None, offsets: Tensor) -> None:
        """out [tokens, heads, dim] = 0, lse [tokens, heads] = -inf from token offsets[-1] on: they belong to no row."""
        ...

    def merge(
        self, outs: list[Tensor], lses: list[Tensor], out: Tensor, lse: Tensor | None, sinks: Tensor | None
    ) -> None:
        """Merges partial results [tokens, heads, dim] by log-sum-exp; sinks [heads] enter here, once."""
        ...


class Workspace(abc.ABC):
    """What builders see. Two requests with the same fill and the same inputs return one tensor.

    Attributes:
        ops: the device's operations.
        device: where tensors are made.
        features: what its plans ask of kernels besides.
    """

    features: frozenset[str] = frozenset()

    def __init__(self, ops: DeviceOps, device: torch.device, constants: dict[Any, Any]) -> None:
        self.ops = ops
        self.device = device
        self._constants = constants
        self._stream = stream_of(device)
        # Answers by question, with the question's tensors: an id means something only while its tensor lives.
        self._filled: dict[Any, tuple[Tensor, Any]] = {}

    @abc.abstractmethod
    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for one tensor, contents undefined."""

    @abc.abstractmethod
    def used(self) -> None:
        """Says that what was made here is about to be read on the current stream, which may not be the one of the plan.

        The stream must wait for the plan's by itself; what happens to the memory afterwards is taken care of.
        """

    def wait(self) -> None:
        """Makes the current stream wait until nobody reads any more what is about to be filled anew."""

    def launch(self, op: Callable[..., None], *inputs: Any, **params: Any) -> None:
        """Issues a fill or an update: `op(*inputs, **params)`."""
        op(*inputs, **params)

    def fill(
        self,
        name: str,
        shape: tuple[int, ...],
        op: Callable[..., None],
        *inputs: Tensor | None,
        dtype: torch.dtype = torch.int32,
        **params: Any,
    ) -> Tensor:
        """A tensor filled by `op(out, *inputs, **params)`.

        Args:
            name: what it is, for reports.
            shape: its shape, all host integers.
            op: one of `ops`, or a plugin's own function of the same form.
            dtype: its dtype.
        """
        key = _question(op, inputs, params, shape, dtype)
        if key not in self._filled:
            out = self.buffer(name, shape, dtype)
            self.launch(op, out, *inputs, **params)
            self._filled[key] = out, (inputs, params)
        return self._filled[key][0]

    def lens(self, name: str, source: Tensor, *, add: int = 0, active: Tensor | None = None) -> Tensor:
        """Lengths [n] plus a constant; the source itself where nothing is to be done.

        Args:
            name: what they are.
            source: int32 or int64 [n].
            add: what is added.
            active: int32 or int64 [n], 0 marks a padded row, whose length becomes 0 (usually req_pool_indices).
        """
        if add == 0 and active is None:
            return source
        return self.fill(name, tuple(source.shape), self.ops.lens, source, add=add, active=active)

    def step_lens(self, name: str, source: Tensor | None, *, steps: int, active: Tensor) -> Tensor:
        """int32 [steps, n]: lengths [n], or 0, plus 1, 2 ... steps, in one fill; padded rows as in `lens`."""
        return self.fill(name, (steps, active.shape[0]), self.ops.step_lens, source, active=active)

    def branch_positions(self, name: str, source: Tensor, *, steps: int, each: int) -> Tensor:
        """int32 [steps, n * each]: lengths [n] plus 0, 1 ... steps - 1, each entry `each` times in a row."""
        return self.fill(name, (steps, source.shape[0] * each), self.ops.branch_positions, source, each=each)

    def sum(self, name: str, source: Tensor, lens: Tensor) -> Tensor:
        """int32 [n]: source + lens where lens is not 0, else 0."""
        return self.fill(name, tuple(source.shape), self.ops.sum, source, lens)

    def row_lens(self, name: str, value: int, *, active: Tensor) -> Tensor:
        """int32 [n]: one length for every row that is not padding."""
        return self.fill(name, (active.shape[0],), self.ops.row_lens, value=value, active=active)

    def tree(
        self, custom_mask: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, tokens: int, size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of a tree of drafted tokens, in one fill, the mask as bits and as bytes, and positions: see `tree_parts`."""
        known = (custom_mask, seq_lens, cu_seqlens_q)
        lines = self.fill("tree", (tree_lines(size), tokens), self.ops.tree, *known, size=size)
        bits, mask, positions = tree_parts(lines, size)
        return bits, mask[:, :size], positions

    def offsets(self, name: str, lens: Tensor) -> Tensor:
        """int32 [n + 1] running sum of lengths [n]."""
        return self.fill(name, (lens.shape[0] + 1,), self.ops.offsets, lens)

    def page_table(self, name: str, view: KVView, lens: Tensor, max_len: int) -> Tensor:
        """int32 [rows, pages] page ids of a view's first `lens` tokens, 0 behind them; it starts at page borders."""
        pages = max(1, -(-max_len // view.page_size))
        return self.fill(name, (lens.shape[0], pages), self.ops.page_table, view=view, lens=lens)

    def update(self, op: Callable[..., None], state: Tensor, *inputs: Tensor | None, **params: Any) -> None:
        """Changes a plugin's own state on the device: `op(state, *inputs, **params)`, once per plan.

        What a mode remembers between forward passes must change here and nowhere else, so that a dry run leaves it
        alone and a recorded one repeats it. A plan may fail or be dropped afterwards: the same update for the plan that
        is made again must lead to the same state.
        """
        key = _question(op, (state, *inputs), params)
        if key not in self._filled:
            self._filled[key] = state, (inputs, params)
            self.launch(op, state, *inputs, **params)

    def scratch(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        """Memory [size] that launches in one stream can share, zero when it is first given.

        Kept for the life of the backend; whoever changes it leaves it zero where zero matters.
        """
        key = "scratch", name, self._stream
        return self._constant(key, size, lambda: torch.zeros(size, dtype=dtype, device=self.device))

    def processors(self) -> int:
        """How many multiprocessors there are to fill."""
        if self.device.type != "cuda":
            return 4
        known = self._constants.get("processors")
        if known is None:
            known = self._constants["processors"] = torch.cuda.get_device_properties(self.device).multi_processor_count
        return int(known)

    def uniform_offsets(self, rows: int, step: int = 1) -> Tensor:
        """int32 [rows + 1]: 0, step, 2 * step ...; kept for the life of the backend, so it costs nothing twice."""
        size = (1 << max(8, rows.bit_length())) + 1
        key = "uniform_offsets", step
        known = self._constant(key, rows + 1, lambda: torch.arange(size, dtype=torch.int32, device=self.device) * step)
        return known[: rows + 1]

    def _constant(self, key: Any, size: int, make: Callable[[], Tensor]) -> Tensor:
        """A tensor of at least `size` elements that outlives the plan."""
        known = self._constants.get(key)
        if known is None or known.shape[0] < size:
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                # It would be filled when the graph is replayed, and read by others before.
                hint = "Call backend.reserve(batches) first, or capture(batch) once before the graph is recorded."
                wanted = "to be made before a CUDA graph is recorded"
                raise CapacityError(f"constant {key[0]!r}", wanted=wanted, got="recording", hint=hint)
            known = self._constants[key] = make()
        return known


class EagerWorkspace(Workspace):
    """Fresh tensors for one plan, sized by the batch."""

    def __init__(self, ops: DeviceOps, device: torch.device, constants: dict[Any, Any]) -> None:
        super().__init__(ops, device, constants)
        self._made: list[Tensor] = []
        self._streams = {self._stream}

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made = torch.empty(shape, dtype=dtype, device=self.device)
        self._made.append(made)
        return made

    def used(self) -> None:
        stream = stream_of(self.device)
        if stream not in self._streams:
            self._streams.add(stream)
            for tensor in self._made:
                tensor.record_stream(torch.cuda.current_stream(self.device))


class DryWorkspace(EagerWorkspace):
    """For explanations: fills, but leaves the state of plugins alone."""

    def update(self, op: Callable[..., None], state: Tensor, *inputs: Tensor | None, **params: Any) -> None:
        return


def stream_of(device: torch.device) -> int:
    """The current stream of a device, as the driver knows it; 0 where there are none.

    Asked before every layer, so not by `torch.cuda.current_stream`, which makes an object of it.
    """
    if device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(torch._C._cuda_getCurrentRawStream(index))


def tree_lines(size: int) -> int:
    """int32 numbers per token of a tree of up to `size` tokens."""
    return -(-size // 32) + -(-size // 4) + 1


def tree_parts(lines: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of int32 [`tree_lines(size)`, tokens].

    Returns:
        int32 [tokens, ceil(size / 32)]: who sees whom, as bits. bool [tokens, size rounded up to 4]: the same, a byte
        each. int32 [tokens]: positions.
    """
    tokens, words = lines.shape[1], -(-size // 32)
    bits = lines[:words].view(-1).view(tokens, words)
    mask = lines[words:-1].view(-1).view(torch.bool).view(tokens, -(-size // 4) * 4)
    return bits, mask, lines[-1]


def _question(op: Callable[..., None], inputs: tuple[Tensor | None, ...], params: dict[str, Any], *more: Any) -> Any:
    """A key that is equal for equal fills of the same tensors."""
    named = tuple((name, id(p) if isinstance(p, Tensor) else p) for name, p in sorted(params.items()))
    return op, tuple(id(tensor) for tensor in inputs), named, more
