"""The segment of a block-sparse pass: a plain one, and which blocks each of its pieces has chosen."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch

from faback.core.layer import LayerKind
from faback.core.segment import Segment
from faback_block_sparse.options import Options

FEATURE = "block_sparse"


@attrs.frozen(eq=False)
class Choice:
    """What the pieces of a segment see. A piece is the queries of one row that stand in one block.

    Piece p sees blocks 0, `chosen[p]` and all from the first of its run to its own. The run begins at its local blocks,
    or where summaries end, if that is earlier and recent tokens are seen.

    Attributes:
        options: the sizes.
        pieces: int32 [4, n + 1]: offsets of the pieces' queries; row, own block and end of each piece. Its end is the
            position behind its last query, 0 for pieces of padding and those beyond the last.
        known: int32 [2, rows]: the page at which the plan began to take in, and the tokens that have summaries now.
        chosen: int32 [n, k] block numbers, ascending, then -1.
        width: most keys that a piece sees, on the host.
    """

    options: Options
    pieces: torch.Tensor
    known: torch.Tensor
    chosen: torch.Tensor
    width: int

    @property
    def count(self) -> int:
        """n, pieces beyond the last included."""
        return self.chosen.shape[0]


@attrs.frozen(eq=False)
class BlockSparseSegment(Segment):
    """A causal segment of which only some blocks are seen, where there is a choice.

    Attributes:
        choices: the choice of each kind of layers.
        choice: that of the kind at hand; None is a plain segment.
    """

    choices: Mapping[LayerKind, Choice] = attrs.field(factory=dict)
    choice: Choice | None = None

    @classmethod
    def of(cls, segment: Segment, choices: Mapping[LayerKind, Choice]) -> BlockSparseSegment:
        """A plain segment with choices."""
        plain = {field.name: getattr(segment, field.name) for field in attrs.fields(Segment)}
        return cls(**plain, choices=choices)

    def features(self) -> frozenset[str]:
        """The `FEATURES` that this segment needs of a kernel, and the plugin's own word."""
        found = super().features()
        return found if self.choice is None else found | {FEATURE}
