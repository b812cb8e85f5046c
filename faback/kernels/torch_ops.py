"""KV writes and merges in plain torch: the definition, and what runs on a CPU."""

from __future__ import annotations

import torch

from faback.core.hooks import hookimpl
from faback.core.segment import KVWrite
from faback.core.workspace import DeviceOps
from faback.kernels.torch_fills import TorchFills

Tensor = torch.Tensor
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


class TorchOps(TorchFills):
    """`faback.core.workspace.DeviceOps` in torch, on any device."""

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
        assert write.slots is not None
        slots = write.slots.long().clamp(min=0)
        if write.slot_map is not None:
            slots = write.slot_map[slots].long()
        for cache, new, scale in ((k_cache, k, k_scale), (v_cache, v, v_scale)):
            if new is not None:
                cache[slots] = _quantised(new, scale, cache.dtype)

    def merge(
        self, outs: list[Tensor], lses: list[Tensor], out: Tensor, lse: Tensor | None, sinks: Tensor | None
    ) -> None:
        stacked = torch.stack(lses)
        total = stacked.logsumexp(0)
        # A part, or a sum of parts, that saw nothing has weight 0, and never exp(-inf + inf).
        denominator = total if sinks is None else torch.logaddexp(total, sinks.float())
        weights = torch.where(stacked == -torch.inf, 0.0, (stacked - denominator).exp())
        parts = torch.stack(outs).float()
        out.copy_((parts * weights[..., None]).sum(0))
        if lse is not None:
            lse.copy_(total)


def _quantised(new: Tensor, scale: float | Tensor | None, dtype: torch.dtype) -> Tensor:
    """k or v [tokens, heads, dim] as it is stored: divided by the scale, saturated where the format has no infinity."""
    if scale is not None:
        new = new.float() / (scale.view(-1, 1) if isinstance(scale, Tensor) else scale)
    if dtype in FP8_DTYPES:
        limit = torch.finfo(dtype).max
        new = new.float().clamp(-limit, limit)
    return new.to(dtype)


@hookimpl(trylast=True)
def faback_device_ops(device: torch.device) -> DeviceOps:
    return TorchOps()
