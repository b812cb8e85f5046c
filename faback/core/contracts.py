"""What a plugin brings: modes, overlays and lowerings."""

from __future__ import annotations

import abc

import attrs
import torch

from faback.core.batch import ForwardBatch
from faback.core.config import BackendConfig
from faback.core.kernel import KernelRequest
from faback.core.layer import AttentionLayer, LayerKind
from faback.core.pools import Pools
from faback.core.segment import Segment
from faback.core.workspace import Workspace


@attrs.frozen(eq=False)
class PlanContext:
    """What builders may know besides the batch.

    Attributes:
        config: the backend's configuration.
        pools: the engine's pools.
        layers: every attention layer of the model, for plugins that keep something for each of them.
    """

    config: BackendConfig
    pools: Pools
    layers: tuple[AttentionLayer, ...] = ()

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.pools.kv.page_size

    @property
    def device(self) -> torch.device:
        """Where the pools live."""
        return self.pools.device


class Mode(abc.ABC):
    """A forward mode: turns a batch into the segment that a plain layer would need.

    Attributes:
        key: the `forward_mode` it answers to.
        needs: names of batch fields (or of `extras`) that must be present.
        replaces: key of another mode that this one takes the place of.
    """

    key: str
    needs: tuple[str, ...] = ()
    replaces: str | None = None

    def bind(self, ctx: PlanContext) -> None:
        """Called once when a backend is built: the place to allocate state of one's own."""

    def release(self, req_pool_indices: torch.Tensor) -> None:
        """These requests have finished: what is remembered of them must be forgotten."""

    @abc.abstractmethod
    def build(self, batch: ForwardBatch, ws: Workspace, ctx: PlanContext) -> Segment:
        """The base segment. Allocates and launches through `ws` only, never synchronises with the device."""

    def calls(self, segment: Segment, layer: LayerKind, ctx: PlanContext) -> tuple[Segment, ...]:
        """Parts that are attended separately and merged by log-sum-exp; by default the segment whole."""
        return (segment,)


class Overlay(abc.ABC):
    """A variation of some layers on top of any mode.

    Attributes:
        key: its name.
        honours: features of a layer's description (`LayerKind.features`) that it brings about; a layer whose window,
            chunk or direction no overlay honours is refused.
        after: keys of overlays that come first, where present.
        priority: among those free to go, the highest goes first.
        replaces: key of another overlay that this one takes the place of.
    """

    key: str
    honours: frozenset[str] = frozenset()
    after: tuple[str, ...] = ()
    priority: int = 0
    replaces: str | None = None

    def bind(self, ctx: PlanContext) -> None:
        """Called once when a backend is built: the place to allocate state of one's own."""

    def release(self, req_pool_indices: torch.Tensor) -> None:
        """These requests have finished: what is remembered of them must be forgotten."""

    @abc.abstractmethod
    def applies(self, layer: LayerKind) -> bool:
        """Whether layers of this kind are varied. Asked once, when the backend is built."""

    @abc.abstractmethod
    def transform(
        self, segment: Segment, layer: LayerKind, batch: ForwardBatch, ws: Workspace, ctx: PlanContext
    ) -> Segment:
        """The segment as this kind of layer needs it."""


class Lowering(abc.ABC):
    """Rewrites a segment that a kernel cannot do into ones that it can. A pure function with a declaration.

    The parts keep the order of the queries.

    Attributes:
        key: its name.
        removes: features that the parts no longer need.
        merges: the parts are merged by log-sum-exp, where sinks enter; else there is exactly one part.
        priority: among lowerings that remove the same, the highest is tried first.
        replaces: key of another lowering that this one takes the place of.
    """

    key: str
    removes: frozenset[str]
    merges: bool = False
    priority: int = 0
    replaces: str | None = None

    @abc.abstractmethod
    def becomes(self, request: KernelRequest) -> tuple[KernelRequest, ...]:
        """What the parts will ask of a kernel, one request per part; empty if this segment cannot be rewritten so."""

    @abc.abstractmethod
    def lower(self, segment: Segment, ws: Workspace, ctx: PlanContext) -> tuple[Segment, ...]:
        """The parts."""
