"""Writing keys and values, beside a plain copy of as many bytes in the same run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from faback.bench.problem import DIM, KV_HEADS
from faback.bench.timing import graph_us
from faback.core.segment import KVWrite
from faback.core.workspace import DeviceOps
from faback.testing.layers import as_bits

Tensor = torch.Tensor

TOKENS = (64, 4096, 16384, 65536)
PAGE = 16
SHARE = 0.8
"""Of the bandwidth of a copy, from 4096 tokens up: what is aimed at."""


def run(ops: DeviceOps, only: str = "", device: str = "cuda") -> Iterator[dict[str, Any]]:
    """One row for each number of tokens and each storage: microseconds, those of a copy, and their ratio.

    Args:
        ops: whose `set_kv` writes.
        only: part of a case's name.
        device: where everything lies.

    Raises:
        ArithmeticError: something else was written than what torch would have.
    """
    for dtype, scale in ((torch.bfloat16, None), (torch.float8_e4m3fn, 0.5)):
        for tokens in TOKENS:
            name = f"set_kv {tokens} tokens {str(dtype).removeprefix('torch.')}"
            if only in name:
                yield {"case": name, **measure(ops, tokens, dtype, scale, torch.device(device))}


def measure(
    ops: DeviceOps, tokens: int, dtype: torch.dtype, scale: float | None, device: torch.device
) -> dict[str, float]:
    """Random whole pages, eight KV heads of dim 128; slot translation included."""
    write = written(ops, tokens, dtype, scale, device)
    source = torch.empty(tokens * KV_HEADS * DIM * 2, dtype=torch.bfloat16, device=device)
    moved = source.nbytes * (2 + dtype.itemsize) // 4  # what a write reads and stores, halved
    copied = source.view(torch.uint8)[:moved]
    target = torch.empty_like(copied)
    copy = graph_us(lambda: target.copy_(copied))
    triton = graph_us(write)
    return {"triton_us": round(triton, 2), "copy_us": round(copy, 2), "share_of_copy": round(copy / triton, 3)}


def written(ops: DeviceOps, tokens: int, dtype: torch.dtype, scale: float | None, device: torch.device) -> Any:
    """The write as a call, after one whose result was looked at."""
    pages = tokens // PAGE
    generator = torch.Generator(device).manual_seed(tokens)
    k, v = (
        torch.randn(tokens, KV_HEADS, DIM, dtype=torch.bfloat16, device=device, generator=generator) for _ in range(2)
    )
    caches = [torch.zeros((pages + 1) * PAGE, KV_HEADS, DIM, dtype=dtype, device=device) for _ in range(2)]
    order = torch.randperm(pages, device=device, generator=generator) + 1
    slots = (order[:, None] * PAGE + torch.arange(PAGE, device=device)).flatten()
    slot_map = torch.arange((pages + 1) * PAGE, dtype=torch.int32, device=device)

    def write() -> None:
        ops.set_kv(k, v, caches[0], caches[1], KVWrite(slots, slot_map), scale, scale)

    write()
    for new, cache in zip((k, v), caches, strict=True):
        wanted = (new if scale is None else new.float() / scale).to(dtype)
        if not torch.equal(as_bits(cache[slots]), as_bits(wanted)):
            raise ArithmeticError("set_kv wrote something else")
    return write
