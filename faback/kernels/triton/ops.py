"""`faback.core.workspace.DeviceOps` on CUDA: KV writes and merges in Triton, fills in torch, all without a sync."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from faback.core.hooks import hookimpl
from faback.core.segment import KVWrite
from faback.core.workspace import DeviceOps
from faback.kernels.torch_fills import TorchFills
from faback.kernels.torch_ops import FP8_DTYPES
from faback.kernels.triton.provider import scale_args
from faback.kernels.triton.tiles import power_of_two

Tensor = torch.Tensor


class TritonOps(TorchFills):
    """One launch per KV write and per merge."""

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


@hookimpl
def faback_device_ops(device: torch.device) -> DeviceOps | None:
    return TritonOps() if device.type == "cuda" and find_spec("triton") is not None else None
