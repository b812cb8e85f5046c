"""Tile shapes: a small table by architecture and shape class, read on the host, never tuned in traffic."""

from __future__ import annotations

import attrs


@attrs.frozen
class Tile:
    """How one launch is cut.

    Attributes:
        block_m: packed query rows of a program, a power of two from 16.
        block_n: keys of a step.
        warps, stages: Triton's `num_warps` and `num_stages`.
        waves: work items per multiprocessor that the split plan aims at.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    waves: int


def power_of_two(n: int, least: int = 16) -> int:
    """The smallest power of two that holds n, and is not below `least`."""
    return max(least, 1 << max(0, n - 1).bit_length())


def pick(packed_rows: int, head_dim: int, v_head_dim: int, itemsize: int) -> Tile:
    """The tile for a shape class.

    Args:
        packed_rows: the most query rows that one block could use: queries of a request * heads of a group.
        head_dim, v_head_dim: of k and of v.
        itemsize: bytes of q's dtype.
    """
    widest = max(head_dim, v_head_dim) * itemsize
    if widest > 512:
        return Tile(min(power_of_two(packed_rows), 32 if widest <= 1024 else 16), 32 if widest <= 1024 else 16, 4, 2, 2)
    if packed_rows <= 32:
        return Tile(power_of_two(packed_rows), 64 if widest <= 256 else 32, 4, 3, 4)
    if packed_rows <= 64:
        return Tile(64, 64 if widest <= 256 else 32, 4, 3, 3)
    if widest <= 256:
        return Tile(128, 64, 8, 3, 2)
    return Tile(64, 32, 4, 2, 2)
