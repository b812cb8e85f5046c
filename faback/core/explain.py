"""The answer to: what will happen to this layer in this batch, and why not otherwise?"""

from __future__ import annotations

from typing import Any

import attrs

from faback.core.kernel import Rejection
from faback.core.registry import Contribution
from faback.core.segment import Segment
from faback.core.select import Route


@attrs.frozen(eq=False)
class Stage:
    """One step on the way from a batch to a segment.

    Attributes:
        by: the mode or overlay.
        segment: what it made; an overlay that had nothing to vary hands on what it was given.
    """

    by: Contribution[Any]
    segment: Segment


@attrs.frozen(eq=False, kw_only=True)
class Explanation:
    """Printable, and readable field by field.

    Attributes:
        stages: the mode, and the overlays that vary this kind of layer, in order.
        parts: what is attended separately, usually the segment whole.
        routes: the kernels chosen, one route per part.
        evidence: the measured figures that a choice went by, one line per call that has any.
        rejections: each reason of each kernel against the request as it stands.
        absent: kernels that cannot run here, and why.
    """

    stages: tuple[Stage, ...]
    parts: tuple[Segment, ...]
    routes: tuple[Route, ...]
    evidence: tuple[str, ...]
    rejections: tuple[Rejection, ...]
    absent: dict[str, str]

    @property
    def mode(self) -> str:
        """The mode and its distribution."""
        return str(self.stages[0].by)

    @property
    def overlays(self) -> tuple[str, ...]:
        """Overlays that vary this kind of layer, in order, each with its distribution."""
        return tuple(str(stage.by) for stage in self.stages[1:])

    @property
    def segment(self) -> Segment:
        """Who sees what."""
        return self.stages[-1].segment

    @property
    def kernel(self) -> str:
        """The route in short, for example "triton" or "cascade(fa3, triton)"."""
        return " + ".join(str(route) for route in self.routes)

    def __str__(self) -> str:
        rule, segment = self.segment.visibility, self.segment
        needs = ", ".join(sorted(segment.features())) or "nothing special"
        lines = [
            f"mode      {self.mode}",
            f"overlays  {', '.join(self.overlays) or 'none'}",
            f"segment   {sizes_of(segment)}",
            f"sees      causal={rule.causal} window={rule.window} chunk={rule.chunk}; needs {needs}",
            f"kernel    {self.kernel}",
        ]
        lines += [f"asked     {route.request}" for route in self.routes]
        lines += [f"measured  {line}" for line in self.evidence]
        lines += [f"rejected  {reason}" for reason in self.rejections]
        lines += [f"absent    {name}: {reason}" for name, reason in self.absent.items()]
        return "\n".join(lines)


def sizes_of(segment: Segment) -> str:
    """How large a segment is, in words."""
    return f"{segment.rows} rows, up to {segment.max_seqlen_q} queries and {segment.max_kv_len} keys each"
