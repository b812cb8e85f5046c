"""`faback.core.workspace.DeviceOps` on CUDA: one launch each, without a sync.

Two fills are left to torch: those of lowerings that only kernels without windows and trees need.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from faback.core.hooks import hookimpl
from faback.core.segment import KVView, KVWrite, Segment
from faback.core.workspace import DeviceOps
from faback.kernels.torch_fills import TorchFills
from faback.kernels.torch_ops import FP8_DTYPES
from faback.kernels.triton.provider import MAX_PLANNED_ROWS, scale_args
from faback.kernels.triton.tiles import power_of_two

Tensor = torch.Tensor


BLOCK = 256
"""Elements that one program of a fill writes."""


class TritonOps(TorchFills):
    """Operations in Triton; fills over more rows than a program can hold go to torch."""

    def lens(self, out: Tensor, source: Tensor, *, add: int, active: Tensor | None) -> None:
        _count(out, source=source, active=active, value=add)

    def row_lens(self, out: Tensor, *, value: int, active: Tensor) -> None:
        _count(out, active=active, value=value)

    def step_lens(self, out: Tensor, source: Tensor | None, *, active: Tensor) -> None:
        _count(out, source=source, active=active, value=1, step=1)

    def branch_positions(self, out: Tensor, source: Tensor, *, each: int) -> None:
        _count(out, source=source, step=1, each=each)

    def sum(self, out: Tensor, source: Tensor, lens: Tensor) -> None:
        _count(out, source=source, other=lens, active=lens)

    def offsets(self, out: Tensor, lens: Tensor) -> None:
        from faback.kernels.triton.fills import offsets

        size = min(4096, power_of_two(lens.shape[0]))
        offsets[(1,)](out=out, lens=_plain(lens), n=lens.shape[0], BLOCK=size)

    def tree(self, out: Tensor, custom_mask: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, *, size: int) -> None:
        from faback.kernels.triton.fills import tree

        rows, tokens = seq_lens.shape[0], out.shape[1]
        if not 0 < rows <= MAX_PLANNED_ROWS:
            super().tree(out, custom_mask, seq_lens, cu_seqlens_q, size=size)
            return
        if tokens == 0:
            return
        mask = out[1:].view(-1).view(torch.uint8).view(tokens, -1)
        tree[(tokens,)](
            positions=out[0],
            mask=mask,
            custom_mask=_plain(custom_mask).view(torch.uint8),
            seq_lens=_plain(seq_lens),
            cu_seqlens_q=cu_seqlens_q,
            rows=rows,
            size=size,
            mask_size=custom_mask.shape[0],
            mask_row=mask.shape[1],
            ROWS=power_of_two(rows),
            COLUMNS=power_of_two(mask.shape[1]),
        )

    def page_table(self, out: Tensor, view: KVView, lens: Tensor) -> None:
        _table(out, view, lens, page_size=view.page_size)

    def slot_table(self, out: Tensor, segment: Segment) -> None:
        tail, view = segment.tail, segment.kv
        more: dict[str, Any] = {
            "tail_lens": None if tail is None or tail.slots is not None else _plain(tail.lens),
            "cu_seqlens_k": segment.cu_seqlens_q if segment.cu_seqlens_k is None else segment.cu_seqlens_k,
            "KEY_ROWS": view is not None and not view.dense,
        }
        _table(out, view, segment.kv_len, page_size=1, COMMITTED=segment.committed, **more)

    def virtual_batches(self, out: Tensor, segment: Segment) -> None:
        from faback.kernels.triton.fills import virtual_batches

        view, rows, pieces = segment.kv, segment.rows, out.shape[1] - 1
        if not 0 < rows <= MAX_PLANNED_ROWS:
            super().virtual_batches(out, segment)
            return
        assert view is not None
        held = power_of_two(rows)
        block = max(16, min(BLOCK, 8192 // held))
        virtual_batches[(-(-(pieces + 1) // block),)](
            out=out,
            cu_seqlens_q=segment.cu_seqlens_q,
            q_len=None if segment.q_len is None else _plain(segment.q_len),
            kv_len=_plain(segment.kv_len),
            start=None if view.start is None else _plain(view.start),
            req_pool_indices=_plain(view.req_pool_indices),
            rows=rows,
            pieces=pieces,
            chunk=segment.visibility.chunk,
            ROWS=held,
            BLOCK=block,
        )

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
        from faback.kernels.triton.store import store

        assert write.slots is not None
        tokens, heads, dim = k.shape
        if tokens == 0:
            return
        slots = write.slots if write.slots.is_contiguous() else write.slots.contiguous()
        k = k if k.stride(-1) == 1 else k.contiguous()
        v = v if v is None or v.stride(-1) == 1 else v.contiguous()
        block_t = max(1, min(16, 2048 // power_of_two(dim)))
        store[(-(-tokens // block_t), heads)](
            k=k,
            v=v,
            k_cache=k_cache,
            v_cache=v_cache,
            slots=slots,
            slot_map=write.slot_map,
            tokens=tokens,
            k_token=k.stride(0),
            k_head=k.stride(1),
            v_token=0 if v is None else v.stride(0),
            v_head=0 if v is None else v.stride(1),
            kc_slot=k_cache.stride(0),
            kc_head=k_cache.stride(1),
            vc_slot=v_cache.stride(0),
            vc_head=v_cache.stride(1),
            **scale_args(k_scale, v_scale),
            DK=dim,
            DV=0 if v is None else v.shape[2],
            BLOCK_K=power_of_two(dim),
            BLOCK_V=power_of_two(1 if v is None else v.shape[2]),
            LIMIT=torch.finfo(k_cache.dtype).max if k_cache.dtype in FP8_DTYPES else 0.0,
            BLOCK_T=block_t,
        )

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
        merge[(-(-tokens * heads // block_t),)](
            outs=parts,
            lses=part_lses,
            out=out,
            lse=lse,
            sinks=sinks,
            parts=len(outs),
            tokens=tokens,
            part_out=parts.stride(0),
            part_lse=part_lses.stride(0),
            p_token=parts.stride(1),
            p_head=parts.stride(2),
            l_token=part_lses.stride(1),
            o_token=out.stride(0),
            o_head=out.stride(1),
            lse_token=0 if lse is None else lse.stride(0),
            HEADS=heads,
            DV=dim,
            BLOCK=block,
            BLOCK_T=block_t,
        )


def _plain(tensor: Tensor) -> Tensor:
    """The tensor with stride 1."""
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _count(
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

    n = out.shape[-1]
    if out.numel() == 0:
        return
    tensors = {"source": source, "other": other, "active": active}
    count[(-(-n // BLOCK), out.numel() // n)](
        out=out,
        **{name: None if tensor is None else _plain(tensor) for name, tensor in tensors.items()},
        n=n,
        value=value,
        step=step,
        each=each,
        BLOCK=BLOCK,
    )


def _table(out: Tensor, view: KVView | None, lens: Tensor, *, page_size: int, **more: Any) -> None:
    """out [rows, width], see `fills.table`."""
    from faback.kernels.triton.fills import table

    rows, width = out.shape
    if out.numel() == 0:
        return
    source: dict[str, Any] = {"req_to_token": None, "req_pool_indices": None, "start": None, "slot_map": None}
    if view is not None:
        source |= {"req_to_token": view.req_to_token, "req_pool_indices": _plain(view.req_pool_indices)}
        source |= {"start": None if view.start is None else _plain(view.start), "slot_map": view.slot_map}
    usual: dict[str, Any] = {"tail_lens": None, "cu_seqlens_k": None, "COMMITTED": True, "KEY_ROWS": False}
    table[(rows, -(-width // BLOCK))](
        out=out,
        lens=_plain(lens),
        table_row=0 if view is None else view.req_to_token.stride(0),
        table_width=0 if view is None else view.req_to_token.shape[1],
        width=width,
        page_size=page_size,
        BLOCK=BLOCK,
        **source,
        **(usual | more),
    )


@hookimpl
def faback_device_ops(device: torch.device) -> DeviceOps | None:
    return TritonOps() if device.type == "cuda" and find_spec("triton") is not None else None
