"""A plan: for each kind of layer, where its keys go and which prepared calls attend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from faback.core.batch import ForwardBatch
from faback.core.contracts import PlanContext
from faback.core.errors import BatchError, PluginError
from faback.core.kernel import KernelProvider
from faback.core.layer import AttentionLayer, LayerKind
from faback.core.segment import Segment
from faback.core.select import Route, Selector
from faback.core.workspace import DeviceOps, Workspace

Tensor = torch.Tensor


@attrs.frozen(eq=False)
class Arguments:
    """What one layer brings to its calls.

    Attributes:
        q: [tokens, num_q_heads, head_dim].
        fresh: k and v of the batch, as given to `forward`.
        cached: k and v storage of the layer, None for a layer without a cache.
        sinks: [num_q_heads] or None.
        scales: k and v scale, or None each.
        new: k and v to write before, for calls that store them; None for none.
    """

    q: Tensor
    fresh: tuple[Tensor | None, Tensor | None]
    cached: tuple[Tensor, Tensor] | None
    sinks: Tensor | None
    scales: tuple[float | Tensor | None, float | Tensor | None]
    new: tuple[Tensor, Tensor | None] | None = None


@attrs.frozen(eq=False)
class Call:
    """One kernel, prepared for one segment.

    Attributes:
        kernel: who runs.
        prepared: what its `prepare` returned.
        fresh: keys and values are the batch's own, not the cache's.
        has_lse: the kernel can return its log-sum-exp.
        fault: what to raise for an exception of a kernel's method.
        stores: the kernel writes new keys and values itself.
    """

    kernel: KernelProvider
    prepared: Any
    fresh: bool
    has_lse: bool
    fault: Callable[[object, Callable[..., Any], Exception], Exception]
    stores: bool = False

    def run(self, args: Arguments, out: Tensor, lse: Tensor | None) -> None:
        """Attends into out [tokens, num_q_heads, v_head_dim] and lse [tokens, num_q_heads]."""
        k, v = args.fresh if self.fresh or args.cached is None else args.cached
        k_scale, v_scale = (None, None) if self.fresh else args.scales
        if k is None or v is None:
            raise BatchError("k and v", wanted="the batch's keys and values, which this layer attends to", got=None)
        run = self.kernel.run
        new: dict[str, Any] = {} if args.new is None else {"new": args.new}
        try:
            run(self.prepared, args.q, k, v, out, lse=lse, sinks=args.sinks, k_scale=k_scale, v_scale=v_scale, **new)
        except Exception as error:
            fault = self.fault(self.kernel, run, error)
            if fault is error:
                raise
            raise fault from error


@attrs.frozen(eq=False)
class Merged:
    """Several calls over parts of the keys, merged by log-sum-exp; sinks enter at the merge and nowhere else."""

    parts: tuple[Call | Merged, ...]
    ops: DeviceOps
    has_lse: bool = attrs.field(default=True, init=False)
    stores: bool = attrs.field(default=False, init=False)

    def run(self, args: Arguments, out: Tensor, lse: Tensor | None) -> None:
        """Like `Call.run`."""
        partial = attrs.evolve(args, sinks=None)
        outs = [torch.empty_like(out) for _ in self.parts]
        lses = [torch.empty(out.shape[:2], dtype=torch.float32, device=out.device) for _ in self.parts]
        for part, part_out, part_lse in zip(self.parts, outs, lses, strict=True):
            part.run(partial, part_out, part_lse)
        self.ops.merge(outs, lses, out, lse, args.sinks)


@attrs.frozen(eq=False)
class Step:
    """What all layers of one kind do in one forward pass.

    Attributes:
        segment: who sees what, and where new keys go.
        call: the prepared call or merge of calls.
        ops: the device's operations.
    """

    segment: Segment
    call: Call | Merged
    ops: DeviceOps

    @property
    def has_lse(self) -> bool:
        """Whether the calls can return their log-sum-exp."""
        return self.call.has_lse

    def store(
        self, k: Tensor, v: Tensor | None, layer: AttentionLayer, cached: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor | None] | None:
        """Like `write`, or hands k and v back for the call that writes them itself."""
        if not self.call.stores:
            self.write(k, v, layer, cached)
            return None
        self._check_new(k, v, layer)
        return k, v

    def write(self, k: Tensor, v: Tensor | None, layer: AttentionLayer, cached: tuple[Tensor, Tensor]) -> None:
        """Stores new k [tokens, heads, head_dim] and v [tokens, heads, v_head_dim] where the plan says."""
        write, exchange = self.segment.write, self.segment.exchange
        if write.slots is None:
            if layer.cross and self.segment.kv is not None and k.shape[0]:
                what = f"slots for k of layer {layer.layer_id}"
                hint = "Give encoder_out_cache_loc, or say save_kv_cache=False if they are in the cache."
                raise BatchError(what, wanted="one per token that is to be seen", got=None, hint=hint)
            return
        if exchange is not None:
            k, v = exchange.spread(k), None if v is None else exchange.spread(v)
        self._check_new(k, v, layer)
        self.ops.set_kv(k, v, *cached, write, layer.k_scale, layer.v_scale)

    def _check_new(self, k: Tensor, v: Tensor | None, layer: AttentionLayer) -> None:
        """Raises unless k and v have a token for each slot, and the layer's heads."""
        slots = self.segment.write.slots
        assert slots is not None
        for name, new, dim in (("k", k, layer.head_dim), ("v", v, layer.v_head_dim)):
            if new is None:
                continue
            if new.shape[0] != slots.shape[0]:
                wanted = f"{slots.shape[0]} tokens, one per write slot"
                raise BatchError(f"{name} of layer {layer.layer_id}", wanted=wanted, got=new.shape[0])
            if new.shape[1:] != (layer.num_kv_heads, dim):
                wanted = f"[tokens, {layer.num_kv_heads}, {dim}]"
                raise BatchError(f"{name} of layer {layer.layer_id}", wanted=wanted, got=list(new.shape))

    def attend(self, args: Arguments, out: Tensor, lse: Tensor | None) -> None:
        """Attends into out [tokens, num_q_heads, v_head_dim] and lse [tokens, num_q_heads]."""
        exchange = self.segment.exchange
        if args.q.shape[0] < self.segment.tokens:
            raise BatchError("q", wanted=f"{self.segment.tokens} tokens, as planned", got=args.q.shape[0])
        if exchange is None:
            self.call.run(args, out, lse)
            return
        if exchange.needs_lse:
            lse = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device) if lse is None else lse
            self.call.run(attrs.evolve(args, sinks=None), out, lse)
        else:
            self.call.run(args, out, lse)
        exchange.collect(out, lse, args.sinks)


@attrs.frozen(eq=False)
class Plan:
    """One planned forward pass.

    Attributes:
        batch: what was planned.
        steps: by layer id; layers of one kind share one step.
        ws: owns the metadata.
    """

    batch: ForwardBatch
    steps: dict[int, Step]
    ws: Workspace


@attrs.frozen(eq=False)
class Preparation:
    """Walks routes, lowers and prepares.

    Attributes:
        layer: the kind of layer.
        ws: where metadata goes.
        ctx: what lowerings may know.
        selector: chose the routes, and knows whose the kernels and lowerings are.
    """

    layer: LayerKind
    ws: Workspace
    ctx: PlanContext
    selector: Selector

    def calls(self, segments: Sequence[Segment], routes: Sequence[Route]) -> Call | Merged:
        """The prepared calls of the parts that a mode wants attended separately, usually one."""
        alone = len(segments) == 1
        pairs = zip(segments, routes, strict=True)
        calls = tuple(self._prepare(segment, route, segment.kv is None, whole=alone) for segment, route in pairs)
        return calls[0] if alone else Merged(calls, self.ws.ops)

    def _prepare(self, segment: Segment, route: Route, fresh: bool, whole: bool = False) -> Call | Merged:
        """The call of a segment, or those that it is lowered to; `whole` is what a mode asked for, in one piece."""
        kernel, lowering, guard = route.kernel, route.lowering, self.selector.guard
        if kernel is not None:
            prepared = guard(kernel, kernel.prepare, segment, self.layer, route.request, self.ws)
            writable = whole and not fresh and segment.exchange is None
            stores = writable and guard(kernel, kernel.stores, prepared)
            return Call(kernel, prepared, fresh, route.has_lse, self.selector.fault, stores)
        assert lowering is not None
        segments = guard(lowering, lowering.lower, segment, self.ws, self.ctx)
        if self.ctx.config.checks:
            _check_lowered(lowering.key, segments, route)
        calls = tuple(self._prepare(s, r, fresh) for s, r in zip(segments, route.parts, strict=True))
        return Merged(calls, self.ws.ops) if lowering.merges else calls[0]


def _check_lowered(key: str, segments: Sequence[Segment], route: Route) -> None:
    """Raises if a lowering's parts need more than it declared."""
    for segment, part in zip(segments, route.parts, strict=True):
        segment.check(f"lowering {key!r}")
        undeclared = segment.features() - part.request.features
        if undeclared:
            wanted = f"no more features than it declared ({', '.join(sorted(part.request.features))})"
            raise PluginError(f"lowering {key!r}", wanted=wanted, got=", ".join(sorted(undeclared)))
