"""Tile shapes: a small table by architecture and shape class, read on the host, never tuned in traffic.

`benchmarks/tune.py` measures candidates on the machine at hand; the rows for sm_90 are what it found on an H200.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs


@attrs.frozen
class Tile:
    """How one launch is cut.

    Attributes:
        block_m: packed query rows of a program, a power of two from 16.
        block_n: keys of a step.
        warps, stages: Triton's `num_warps` and `num_stages`.
        waves: work items per multiprocessor that the split plan aims at.
        heads_first: neighbouring programs take the heads of one block of queries, not the blocks of one head.
        registers: Triton's `maxnreg`, None for as many as there are.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    waves: int
    heads_first: bool = True
    registers: int | None = None


@attrs.frozen(kw_only=True)
class Shape:
    """What the choice of a tile depends on.

    Attributes:
        packed_rows: the most query rows that a request could fill: queries * heads of a group.
        head_dim, v_head_dim: of k and of v.
        itemsize, kv_itemsize: bytes of q's dtype and of the cache's.
        pairs: rows of the batch * KV heads.
        processors: multiprocessors of the device.
        max_kv_len: bound of the keys that the queries of a request see: windows and chunks make contexts short.
        deterministic: the tile may depend on nothing that belongs to the batch.
    """

    packed_rows: int
    head_dim: int
    v_head_dim: int
    itemsize: int
    kv_itemsize: int
    pairs: int
    processors: int
    max_kv_len: int
    deterministic: bool = False

    @property
    def widest(self) -> int:
        """Bytes of the wider of a key and a value, as they are multiplied."""
        return max(self.head_dim, self.v_head_dim) * self.itemsize

    def classify(self) -> str:
        """The shape class, a row of `TABLE`."""
        one = "one" if self.packed_rows <= 16 and not self.deterministic else ""
        if self.widest > 1280:
            return f"latent32{one}"
        if self.widest > 512:
            return f"latent{one}"
        if self.widest > 256:
            return f"wide{one}"
        if self.deterministic:
            return "fixed"
        return self._classify_decode() if one else self._classify_more()

    @property
    def _long(self) -> bool:
        return self.max_kv_len > 16384

    def _classify_decode(self) -> str:
        if self.kv_itemsize == 1:
            return "fp8"
        if self.pairs >= 2 * self.processors:
            return "many" if self.max_kv_len > 2048 else "manyshort"
        if self._long:
            return "long" if self.pairs < self.processors else "longmany"
        return "few"

    def _classify_more(self) -> str:
        few = self.pairs * (self.packed_rows // 64) < self.processors
        if self.packed_rows <= 32:
            return "rows32"
        if self.packed_rows <= 64 or (few and not self._long):
            return "rows64few" if few else "rows64"
        if self._long:
            return "rows128long"
        if self.packed_rows < 256:
            return "rows128"
        return "rows256" if self.packed_rows < 512 else "prefill"


TABLE: Mapping[int, Mapping[str, Tile]] = MappingProxyType(
    {
        90: MappingProxyType(
            {
                "few": Tile(16, 128, 4, 3, 1),
                "long": Tile(16, 64, 2, 3, 2),
                "longmany": Tile(16, 64, 2, 3, 6),
                "many": Tile(16, 32, 1, 4, 6),
                "manyshort": Tile(16, 32, 1, 4, 3),
                "fp8": Tile(16, 64, 1, 3, 2),
                "rows32": Tile(32, 64, 4, 3, 1),
                "rows64few": Tile(64, 128, 4, 3, 1),
                "rows64": Tile(64, 32, 4, 4, 2),
                "rows128": Tile(128, 128, 8, 3, 1),
                "rows128long": Tile(128, 64, 8, 3, 1, heads_first=False),
                "rows256": Tile(256, 64, 16, 3, 1, heads_first=False, registers=128),
                "prefill": Tile(64, 64, 4, 3, 1, heads_first=False),
                "fixed": Tile(64, 64, 4, 3, 2),
                "wideone": Tile(16, 32, 4, 3, 2),
                "wide": Tile(64, 32, 4, 2, 2),
                "latentone": Tile(16, 64, 8, 2, 1),
                "latent": Tile(64, 64, 8, 2, 1),
                "latent32one": Tile(16, 16, 4, 2, 2),
                "latent32": Tile(16, 16, 4, 2, 2),
            }
        ),
        80: MappingProxyType(
            {
                "few": Tile(16, 64, 4, 3, 2),
                "long": Tile(16, 64, 4, 3, 2),
                "longmany": Tile(16, 64, 4, 3, 2),
                "many": Tile(16, 32, 1, 4, 6),
                "manyshort": Tile(16, 32, 1, 4, 3),
                "fp8": Tile(16, 64, 1, 3, 2),
                "rows32": Tile(32, 64, 4, 3, 1),
                "rows64few": Tile(64, 64, 4, 3, 1),
                "rows64": Tile(64, 32, 4, 3, 2),
                "rows128": Tile(128, 64, 8, 2, 1),
                "rows128long": Tile(128, 64, 8, 2, 1, heads_first=False),
                "rows256": Tile(128, 64, 8, 2, 1, heads_first=False),
                "prefill": Tile(128, 64, 8, 2, 1, heads_first=False),
                "fixed": Tile(64, 64, 4, 2, 2),
                "wideone": Tile(16, 32, 4, 2, 2),
                "wide": Tile(64, 32, 4, 2, 2),
                "latentone": Tile(16, 32, 4, 2, 2),
                "latent": Tile(16, 32, 4, 2, 2),
                "latent32one": Tile(16, 16, 4, 2, 2),
                "latent32": Tile(16, 16, 4, 2, 2),
            }
        ),
    }
)
"""Architecture -> shape class -> tile; an architecture that is not here takes the next older one."""


def power_of_two(n: int, least: int = 16) -> int:
    """The smallest power of two that holds n, and is not below `least`."""
    return max(least, 1 << max(0, n - 1).bit_length())


def pick(shape: Shape, arch: int) -> Tile:
    """The tile for a shape on an architecture (90 for sm_90)."""
    known = max((a for a in TABLE if a <= arch), default=min(TABLE))
    return TABLE[known][shape.classify()]
