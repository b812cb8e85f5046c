"""Poison: contents that must never matter, so that reading them shows."""

from __future__ import annotations

import random

import torch

Tensor = torch.Tensor

FP8_BITS = {
    torch.float8_e4m3fn: (0x7F, 0xFF),
    torch.float8_e5m2: (0x7F, 0xFF, 0x7C, 0xFC),
}
"""NaN, and infinity where the format has it, as bytes."""

TABLE_FLAVOURS = ("foreign", "huge", "negative", "live")
"""How table entries beyond a request's live range are spoilt.

foreign: slots of pages that belong to nobody and hold NaN; huge: 2**30; negative: -1; live: slots of other requests,
whose finite values give a wrong answer instead of a NaN.
"""


def poison_(tensor: Tensor, rng: random.Random) -> Tensor:
    """Fills a float tensor of any shape in place with a random mix of NaN and infinities (fp8 included)."""
    generator = torch.Generator().manual_seed(rng.getrandbits(31))
    bits = FP8_BITS.get(tensor.dtype)
    if bits is not None:
        choices, target = torch.tensor(bits, dtype=torch.uint8), tensor.view(torch.uint8)
    else:
        nan, inf = float("nan"), float("inf")
        choices, target = torch.tensor([nan, nan, inf, -inf], dtype=tensor.dtype), tensor
    picks = torch.randint(len(choices), tuple(tensor.shape), generator=generator)
    target.copy_(choices[picks])
    return tensor


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, rng: random.Random) -> Tensor:
    """A new float tensor of NaN and infinities."""
    return poison_(torch.empty(shape, dtype=dtype), rng)


def is_poison(tensor: Tensor) -> Tensor:
    """bool, the tensor's shape: where it holds NaN or infinity."""
    return ~torch.isfinite(tensor.to(torch.float32))


def poison_entries(flavour: str, count: int, *, free: list[int], live: list[int], rng: random.Random) -> list[int]:
    """Entries for the unused part of a table.

    Args:
        flavour: one of `TABLE_FLAVOURS`.
        count: how many.
        free: slots that belong to nobody.
        live: slots of other requests.
    """
    if flavour == "huge":
        return [2**30] * count
    if flavour == "negative":
        return [-1] * count
    pool = live if flavour == "live" and live else free
    return [rng.choice(pool) for _ in range(count)] if pool else [-1] * count
