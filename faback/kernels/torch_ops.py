"""Metadata fills, KV writes and merges in plain torch: the definition, and what runs on a CPU."""

from __future__ import annotations

import torch

from faback.core.hooks import hookimpl
from faback.core.segment import KVWrite
from faback.core.workspace import DeviceOps

Tensor = torch.Tensor
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


class TorchOps:
    """`faback.core.workspace.DeviceOps` in torch, on any device."""

    def lens(self, out: Tensor, source: Tensor, *, add: int, active: Tensor | None) -> None:
        total = source + add
        out.copy_(total if active is None else total * (active != 0))

    def offsets(self, out: Tensor, lens: Tensor) -> None:
        out[:1] = 0
        torch.cumsum(lens, 0, dtype=torch.int32, out=out[1:])

    def step_lens(self, out: Tensor, source: Tensor | None, *, active: Tensor) -> None:
        steps = torch.arange(1, out.shape[0] + 1, device=out.device)[:, None]
        out.copy_((steps if source is None else source + steps) * (active != 0))

    def row_lens(self, out: Tensor, *, value: int, active: Tensor) -> None:
        out.copy_((active != 0) * value)

    def tree_mask(self, out: Tensor, custom_mask: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor) -> None:
        offsets = cu_seqlens_q.long()
        counts = offsets.diff()
        width = seq_lens.long() + counts
        blocks = (counts * width).cumsum(0) - counts * width
        request, index = _owners(offsets, out.shape[0])
        column = torch.arange(out.shape[1], device=out.device)
        flat = (blocks[request] + index * width[request] + seq_lens.long()[request])[:, None] + column
        inside = (column < counts[request][:, None]) & (flat < custom_mask.shape[0])
        out.copy_(custom_mask[torch.where(inside, flat, 0)] & inside)

    def tree_positions(self, out: Tensor, mask: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor) -> None:
        request, index = _owners(cu_seqlens_q.long(), out.shape[0])
        others = torch.arange(mask.shape[1], device=out.device) != index[:, None]
        out.copy_(seq_lens[request] + (mask & others).sum(1))

    def branch_positions(self, out: Tensor, source: Tensor, *, each: int) -> None:
        steps = torch.arange(out.shape[0], device=out.device)
        out.copy_(source.repeat_interleave(each) + steps[:, None])

    def sum(self, out: Tensor, source: Tensor, lens: Tensor) -> None:
        out.copy_((source + lens) * (lens != 0))

    def set_kv(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        write: KVWrite,
        k_scale: float | Tensor | None,
        v_scale: float | Tensor | None,
    ) -> None:
        assert write.slots is not None
        slots = write.slots.long()
        if write.slot_map is not None:
            slots = write.slot_map[slots].long()
        for cache, new, scale in ((k_cache, k, k_scale), (v_cache, v, v_scale)):
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


def _owners(offsets: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """int64 [tokens] request of each token and the token's index in it; tokens past the last offset follow on."""
    token = torch.arange(tokens, device=offsets.device)
    request = torch.searchsorted(offsets[1:], token, right=True).clamp(max=offsets.shape[0] - 2)
    return request, token - offsets[request]


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
