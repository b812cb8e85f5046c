"""`faback.core.workspace.DeviceOps` on CUDA: one launch each, without a sync.

Two fills are left to torch: those of lowerings that only kernels without windows and trees need.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, overload

import torch

from faback.core.hooks import hookimpl
from faback.core.segment import KVView, KVWrite, Segment
from faback.core.workspace import DeviceOps, tree_parts
from faback.kernels.torch_fills import TorchFills
from faback.kernels.triton.launch import Grid, Kernel, Launch
from faback.kernels.triton.provider import LIMITS, MAX_PLANNED_ROWS, page_constants, pair_by_token, scale_args
from faback.kernels.triton.tiles import power_of_two

Tensor = torch.Tensor


BLOCK = 256
"""Elements that one program of a fill writes."""
BLOCK_T = 16
"""Tokens that one program looks at where there is little to do."""


class TritonOps(TorchFills):
    """Operations in Triton; fills over more rows than a program can hold go to torch."""

    def __init__(self) -> None:
        self._launches: dict[Any, Launch] = {}
        self._stores: dict[tuple[int, int, torch.dtype], tuple[Launch, int]] = {}

    def _launch(
        self,
        kernel: Any,
        grid: Grid,
        tensors: Sequence[Tensor | None],
        numbers: tuple[int, ...],
        free: tuple[float, ...],
        **fixed: Any,
    ) -> None:
        """`Launch` of a kernel, remembered by its constants."""
        key = id(kernel), *fixed.values()  # kernels live as long as their modules
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = Kernel(kernel, fixed).bound({})
        launch(grid, tensors, numbers, free)

    def lens(self, out: Tensor, source: Tensor, *, add: int, active: Tensor | None) -> None:
        self._count(out, source=source, active=active, value=add)

    def row_lens(self, out: Tensor, *, value: int, active: Tensor) -> None:
        self._count(out, active=active, value=value)

    def step_lens(self, out: Tensor, source: Tensor | None, *, active: Tensor) -> None:
        self._count(out, source=source, active=active, value=1, step=1)

    def branch_positions(self, out: Tensor, source: Tensor, *, each: int) -> None:
        self._count(out, source=source, step=1, each=each)

    def sum(self, out: Tensor, source: Tensor, lens: Tensor) -> None:
        self._count(out, source=source, other=lens, active=lens)

    def offsets(self, out: Tensor, lens: Tensor) -> None:
        from faback.kernels.triton.fills import offsets

        size = min(4096, power_of_two(lens.shape[0]))
        self._launch(offsets, (1, 1, 1), (out, _plain(lens)), (), (lens.shape[0],), BLOCK=size)

    def tree(self, out: Tensor, custom_mask: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, *, size: int) -> None:
        from faback.kernels.triton.fills import tree

        rows, tokens = seq_lens.shape[0], out.shape[1]
        if not 0 < rows <= MAX_PLANNED_ROWS:
            super().tree(out, custom_mask, seq_lens, cu_seqlens_q, size=size)
            return
        if tokens == 0:
            return
        bits, mask, positions = tree_parts(out, size)
        index = positions, mask.view(torch.uint8), bits
        given = _plain(custom_mask).view(torch.uint8), _plain(seq_lens), cu_seqlens_q
        counts = rows, size, custom_mask.shape[0]
        blocks = {"ROWS": power_of_two(rows), "COLUMNS": power_of_two(mask.shape[1], least=32)}
        self._launch(tree, (tokens, 1, 1), (*index, *given), (mask.shape[1], bits.shape[1]), counts, **blocks)

    def page_table(self, out: Tensor, view: KVView, lens: Tensor) -> None:
        self._table(out, view, lens, page_size=view.page_size, divisor=view.slots_per_page)

    def slot_table(self, out: Tensor, segment: Segment) -> None:
        if segment.rows == 0:
            out.zero_()
            return
        tail, view = segment.tail, segment.kv
        more: dict[str, Any] = {
            "tail_lens": None if tail is None or tail.slots is not None else _plain(tail.lens),
            "cu_seqlens_k": segment.cu_seqlens_q if segment.cu_seqlens_k is None else segment.cu_seqlens_k,
            "KEY_ROWS": view is not None and not view.dense,
        }
        self._table(out, view, segment.kv_len, page_size=1, divisor=1, COMMITTED=segment.committed, **more)

    def virtual_batches(self, out: Tensor, segment: Segment) -> None:
        from faback.kernels.triton.fills import virtual_batches

        view, rows, pieces = segment.kv, segment.rows, out.shape[1] - 1
        if not 0 < rows <= MAX_PLANNED_ROWS:
            super().virtual_batches(out, segment)
            return
        assert view is not None
        held = power_of_two(rows)
        block = max(16, min(BLOCK, 8192 // held))
        chunk = segment.visibility.chunk
        assert chunk is not None
        lens = segment.cu_seqlens_q, _plain(segment.q_len), _plain(segment.kv_len)
        varying = out, *lens, _plain(view.start), _plain(view.req_pool_indices)
        grid = -(-(pieces + 1) // block), 1, 1
        self._launch(virtual_batches, grid, varying, (), (rows, pieces, chunk), ROWS=held, BLOCK=block)

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
        from faback.kernels.triton.fills import prompt_reach

        n = rows.shape[0]
        if n == 0:
            return
        known = (_plain(tensor) for tensor in (rows, seq_lens, extend_seq_lens, prompt_lens))
        grid = -(-n // BLOCK), 1, 1
        self._launch(prompt_reach, grid, (out, prompts, *known), (), (n, later, prompt), BLOCK=BLOCK)

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
        from faback.kernels.triton.fills import near_keys

        n = lens.shape[0]
        if n == 0:
            return
        varying = out, _plain(lens), offsets, _plain(active)
        self._launch(near_keys, (-(-n // BLOCK), 1, 1), varying, (page_size,), (n, left), BLOCK=BLOCK)

    def remember(self, prompts: Tensor, rows: Tensor, seq_lens: Tensor, later: Tensor | None) -> None:
        from faback.kernels.triton.fills import remember

        n = rows.shape[0]
        if n == 0:
            return
        varying = prompts, _plain(rows), _plain(seq_lens), later
        self._launch(remember, (-(-n // BLOCK), 1, 1), varying, (), (n,), BLOCK=BLOCK)

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
        """See `DeviceOps`; slot 0 is skipped."""
        assert write.slots is not None
        tokens, heads, dim = k.shape
        if tokens == 0:
            return
        k, v, strides = pair_by_token(k, v)
        value_dim = 0 if v is None else v.shape[2]
        key = dim, value_dim, k_cache.dtype
        found = self._stores.get(key)
        if found is None:
            found = self._stores[key] = _store(dim, value_dim, k_cache.dtype)
        launch, block_t = found
        scales, flags, factors = scale_args(k_scale, v_scale)
        launch(
            (-(-tokens // block_t), heads, 1),
            (k, v, k_cache, v_cache, _plain(write.slots), write.slot_map, *scales),
            (*flags, *strides, *k_cache.stride()[:2], *v_cache.stride()[:2]),
            (*factors, tokens),
        )

    def clear(self, out: Tensor, lse: Tensor | None, offsets: Tensor) -> None:
        from faback.kernels.triton.store import clear

        tokens, heads, dim = out.shape
        if tokens == 0:
            return
        strides = *out.stride()[:2], 0 if lse is None else lse.stride(0)
        blocks = {"BLOCK_H": power_of_two(heads, least=1), "BLOCK": power_of_two(dim), "BLOCK_T": BLOCK_T}
        grid = -(-tokens // BLOCK_T), 1, 1
        counts = offsets.shape[0] - 1, tokens
        self._launch(clear, grid, (out, lse, offsets), strides, counts, HEADS=heads, DV=dim, **blocks)

    def merge(
        self, outs: list[Tensor], lses: list[Tensor], out: Tensor, lse: Tensor | None, sinks: Tensor | None
    ) -> None:
        """See `DeviceOps`."""
        from faback.kernels.triton.store import merge

        tokens, heads, dim = out.shape
        if tokens == 0:
            return
        parts, part_lses = torch.stack(outs), torch.stack(lses)
        block, block_t = power_of_two(dim), 4
        lse_token = 0 if lse is None else lse.stride(0)
        strides = *parts.stride()[1:3], part_lses.stride(1), *out.stride()[:2], lse_token
        counts = len(outs), tokens, parts.stride(0), part_lses.stride(0)
        grid, blocks = (-(-tokens * heads // block_t), 1, 1), {"BLOCK": block, "BLOCK_T": block_t}
        self._launch(merge, grid, (parts, part_lses, out, lse, sinks), strides, counts, HEADS=heads, DV=dim, **blocks)

    def _count(
        self,
        out: Tensor,
        *,
        source: Tensor | None = None,
        other: Tensor | None = None,
        active: Tensor | None = None,
        value: int = 0,
        step: int = 0,
        each: int = 1,
    ) -> None:
        """out [n] or [steps, n], see `fills.count`."""
        from faback.kernels.triton.fills import count

        if out.numel() == 0:
            return
        n = out.shape[-1]
        grid = -(-n // BLOCK), out.numel() // n, 1
        varying = out, _plain(source), _plain(other), _plain(active)
        self._launch(count, grid, varying, (each,), (n, value, step), BLOCK=BLOCK)

    def _table(
        self, out: Tensor, view: KVView | None, lens: Tensor, *, page_size: int, divisor: int, **more: Any
    ) -> None:
        """out [rows, width], see `fills.table`."""
        from faback.kernels.triton.fills import table

        if out.numel() == 0:
            return
        rows, width = out.shape
        offsets, tail_lens = more.pop("cu_seqlens_k", None), more.pop("tail_lens", None)
        source: tuple[Tensor | None, ...] = (None, None, None, None)
        counts = 0, 0, width
        if view is not None:
            source = view.req_to_token, _plain(view.req_pool_indices), _plain(view.start), view.slot_map
            counts = view.req_to_token.stride(0), view.req_to_token.shape[1], width
        varying = out, *source, offsets, _plain(lens), tail_lens
        constants = {"COMMITTED": True, "KEY_ROWS": False, "BLOCK": BLOCK} | page_constants(view) | more
        self._launch(table, (rows, -(-width // BLOCK), 1), varying, (page_size, divisor), counts, **constants)


def _store(dim: int, value_dim: int, dtype: torch.dtype) -> tuple[Launch, int]:
    """The kernel that writes keys and values of these sizes, and the tokens of one program."""
    from faback.kernels.triton.store import store

    block_t = max(1, min(16, 2048 // power_of_two(dim)))
    constants = {
        "DK": dim,
        "DV": value_dim,
        "BLOCK_K": power_of_two(dim),
        "BLOCK_V": power_of_two(value_dim),
        "LIMIT": LIMITS.get(dtype, 0.0),
        "BLOCK_T": block_t,
    }
    return Kernel(store, constants).bound({}), block_t


@overload
def _plain(tensor: Tensor) -> Tensor: ...
@overload
def _plain(tensor: None) -> None: ...
@overload
def _plain(tensor: Tensor | None) -> Tensor | None: ...
def _plain(tensor: Tensor | None) -> Tensor | None:
    """The tensor with stride 1."""
    return tensor if tensor is None or tensor.is_contiguous() else tensor.contiguous()


@hookimpl
def faback_device_ops(device: torch.device) -> DeviceOps | None:
    return TritonOps() if device.type == "cuda" and find_spec("triton") is not None else None
