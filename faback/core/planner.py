"""From a batch to a plan: who contributes what, in which order, and which kernels serve the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from faback.core.batch import ForwardBatch
from faback.core.config import BackendConfig
from faback.core.contracts import Mode, Overlay, PlanContext
from faback.core.errors import BatchError, ConfigError, PluginError
from faback.core.explain import Explanation, Stage
from faback.core.graphs import tensors_of
from faback.core.kernel import KernelRequest, arch_of
from faback.core.layer import AttentionLayer, LayerKind
from faback.core.measured import bucket
from faback.core.plan import Plan, Preparation, Step
from faback.core.pools import MAX_SLOTS, Pools
from faback.core.registry import Contribution, Registry
from faback.core.segment import Segment
from faback.core.select import Route, Selector
from faback.core.workspace import DeviceOps, Workspace

Tensor = torch.Tensor

CALL_FEATURES = frozenset({"softcap", "sinks", "kv_scales", "latent"})
"""What a layer asks of every call; window, chunk and direction come from the segment."""


class Planner:
    """Composes modes, overlays, lowerings and kernels for the layers of one model. Knows no current plan.

    Args:
        config: what is fixed.
        pools: the engine's.
        layers: by number.
        registry: the plugins.
        ops: the device's operations.

    Raises:
        As `AttentionBackend`.
    """

    def __init__(
        self,
        config: BackendConfig,
        pools: Pools,
        layers: Mapping[int, AttentionLayer],
        registry: Registry,
        ops: DeviceOps,
    ) -> None:
        self._config, self._pools, self._registry, self._ops = config, pools, registry, ops
        self._device, self._arch = pools.device, arch_of(pools.device)
        self.context = PlanContext(config, pools, tuple(layers.values()))
        self.modes = registry.modes(config)
        self.overlays = registry.overlays(config)
        self.selector = Selector(config, registry, self._device)
        typos = sorted(set(config.named_modes) - set(self.modes) - {"default"})
        if typos:
            wanted = f"forward modes {sorted(self.modes)} or 'default'"
            raise ConfigError("config.kernels", wanted=wanted, got=", ".join(typos))
        self._check_options()
        self._kinds: dict[LayerKind, list[Contribution[Overlay]]] = {}
        alike: dict[LayerKind, LayerKind] = {}  # one object for each kind, so that looking it up compares nothing
        self._kind_of = {layer.layer_id: alike.setdefault(kind := layer.kind, kind) for layer in layers.values()}
        self._routes: dict[Any, Route] = {}
        for contribution in self.builders():
            contribution.guard(contribution.value.bind, self.context)
        for layer in layers.values():
            self._admit(layer)

    def build(self, batch: ForwardBatch, ws: Workspace, *, return_lse: bool = False) -> Plan:
        """A plan in a given workspace. Raises like `AttentionBackend.plan`."""
        mode = self._mode(batch)
        base = self._asked(mode, mode.value.build, batch, ws)
        wanted = ws.features | {"lse"} if return_lse else ws.features
        steps = {}
        for kind in self._kinds:
            segment = self._segment(base, kind, batch, ws)
            parts, routes = self._calls(mode, segment, kind, batch, wanted)
            preparation = Preparation(kind, ws, self.context, self.selector)
            steps[kind] = Step(segment, preparation.calls(parts, routes), self._ops)
        return Plan(batch, {layer_id: steps[kind] for layer_id, kind in self._kind_of.items()}, ws)

    def explain(self, batch: ForwardBatch, layer: AttentionLayer, ws: Workspace) -> Explanation:
        """Who contributed what to a layer's plan, which kernels were chosen, and why not the others."""
        mode, kind = self._mode(batch), self._kind_of[layer.layer_id]
        base = self._asked(mode, mode.value.build, batch, ws)
        stages = [Stage(mode, base)]
        segment = self._segment(base, kind, batch, ws, stages)
        parts, routes = self._calls(mode, segment, kind, batch, ws.features)
        return Explanation(
            stages=tuple(stages),
            parts=parts,
            routes=routes,
            evidence=tuple(line for line in (self.selector.evidence(route.request) for route in routes) if line),
            rejections=tuple(r for route in routes for r in self.selector.rejections(route.request)),
            absent=self.selector.absent,
        )

    def _check_options(self) -> None:
        """Raises for settings of a plugin that is not there: misspelt, not installed, broken or blocked."""
        brought = {c.value.key for c in self.builders()} | {k.name for k in self.selector.kernels}
        known = brought | {record.name for record in self._registry.records if record.status == "loaded"}
        strangers = sorted(set(self._config.options) - known)
        if strangers:
            hint = "`faback doctor` lists the plugins that were loaded and those that broke."
            raise ConfigError("config.options", wanted=f"settings of {sorted(known)}", got=strangers, hint=hint)

    def builders(self) -> list[Contribution[Any]]:
        """All modes and overlays."""
        return [*self.modes.values(), *self.overlays]

    def _mode(self, batch: ForwardBatch) -> Contribution[Mode]:
        mode = self.modes.get(batch.forward_mode)
        if mode is None:
            wanted = f"one of {sorted(self.modes)}"
            hint = "`faback doctor` lists the plugins that were loaded and those that broke."
            raise BatchError("batch.forward_mode", wanted=wanted, got=repr(batch.forward_mode), hint=hint)
        batch.check_fields(mode.value.needs)
        batch.check_device(self._device)
        batch.check_lengths(self._pools.req_to_token.shape[1], self._pools.kv.num_slots, self._config.checks)
        return mode

    def _segment(
        self, base: Segment, kind: LayerKind, batch: ForwardBatch, ws: Workspace, stages: list[Stage] | None = None
    ) -> Segment:
        """The base varied by the kind's overlays; each step is noted in the stages, where they are given."""
        segment = base
        for overlay in self._kinds[kind]:
            segment = self._asked(overlay, overlay.value.transform, batch, ws, segment, kind)
            if stages is not None:
                stages.append(Stage(overlay, segment))
        return segment

    def _asked(
        self, owner: Contribution[Any], call: Callable[..., Any], batch: ForwardBatch, ws: Workspace, *before: Any
    ) -> Segment:
        """What a mode or overlay makes of a batch, looked at before anybody relies on it."""
        versions = self._versions(batch)
        found = owner.guard(call, *before, batch, ws, self.context)
        if self._versions(batch) != versions:
            hint = "A batch belongs to the engine: ask the workspace for tensors of your own."
            raise PluginError(f"batch changed by {owner}", wanted="tensors as they were", got="others", hint=hint)
        if before and found is before[0]:
            return before[0]  # type: ignore[no-any-return]
        if not isinstance(found, Segment):
            raise PluginError(f"what {owner} returned", wanted="a Segment", got=type(found).__name__)
        return found.check(str(owner))

    def _versions(self, batch: ForwardBatch) -> list[int]:
        """How often each tensor has been changed, as far as torch counts that; only with `config.checks`."""
        if not self._config.checks:
            return []
        return [t._version for t in tensors_of(batch).values() if not t.is_inference()]

    def _calls(
        self, mode: Contribution[Mode], segment: Segment, kind: LayerKind, batch: ForwardBatch, wanted: frozenset[str]
    ) -> tuple[tuple[Segment, ...], tuple[Route, ...]]:
        """The parts that are attended separately, and the route of each."""
        parts: tuple[Segment, ...] = mode.guard(mode.value.calls, segment, kind, self.context)
        shared = kind.features() & CALL_FEATURES | wanted
        if len(parts) > 1 or (segment.exchange is not None and segment.exchange.needs_lse):
            shared = shared - {"sinks"} | {"lse"}  # sinks enter where the parts are merged
        return parts, tuple(self._route(batch.forward_mode, kind, part, shared) for part in parts)

    def _route(self, forward_mode: str, kind: LayerKind, part: Segment, shared: frozenset[str]) -> Route:
        """How a part is served. The same question comes with every plan: a request is made once."""
        fresh = part.kv is None
        page_size = 1 if part.kv is None else part.kv.page_size
        # Another kernel for another size of batch would be another result.
        any_size = self._config.deterministic
        sizes = (0, 0, 0) if any_size else (bucket(part.rows), bucket(part.max_seqlen_q), bucket(part.reach))
        key = forward_mode, kind, page_size, part.features() | shared, fresh, sizes
        found = self._routes.get(key)
        if found is None:
            found = self._routes[key] = self.selector.route(self._ask(*key))
        return found

    def _ask(
        self,
        forward_mode: str,
        kind: LayerKind,
        page_size: int,
        features: frozenset[str],
        fresh: bool,
        sizes: tuple[int, int, int] = (0, 0, 0),
    ) -> KernelRequest:
        return KernelRequest(
            forward_mode=forward_mode,
            device=self._device.type,
            arch=self._arch,
            q_dtype=self._config.dtype,
            kv_dtype=self._config.dtype if fresh else self._pools.kv.dtype(kind),
            num_q_heads=kind.num_q_heads,
            num_kv_heads=kind.num_kv_heads,
            head_dim=kind.head_dim,
            v_head_dim=kind.v_head_dim,
            page_size=page_size,
            features=features | ({"deterministic"} if self._config.deterministic else frozenset()),
            rows=sizes[0],
            queries=sizes[1],
            keys=sizes[2],
            kernel=kind.kernel,
        )

    def _admit(self, layer: AttentionLayer) -> None:
        """Checks a layer against its pool and finds the overlays and a kernel for its kind, or raises."""
        if layer.cached:
            k, v = self._pools.kv.buffers(layer)
            dims = (layer.num_kv_heads, layer.head_dim), (layer.num_kv_heads, layer.v_head_dim)
            if (tuple(k.shape[1:]), tuple(v.shape[1:])) != dims:
                got = f"{tuple(k.shape)} and {tuple(v.shape)}"
                raise ConfigError(f"KV buffers of layer {layer.layer_id}", wanted=f"heads, dims {dims}", got=got)
            if k.shape[0] > MAX_SLOTS:
                what = f"KV buffers of layer {layer.layer_id}"
                raise ConfigError(what, wanted=f"at most {MAX_SLOTS} slots", got=k.shape[0])
        kind = self._kind_of[layer.layer_id]
        if kind in self._kinds:
            return
        self._kinds[kind] = [c for c in self.overlays if c.guard(c.value.applies, kind)]
        honoured = CALL_FEATURES.union(*(c.value.honours for c in self._kinds[kind]))
        ignored = sorted(kind.features() - honoured)
        if ignored:
            hint = "`faback doctor` lists plugins that are blocked or broken."
            wanted = f"an overlay that honours {', '.join(ignored)}"
            raise ConfigError(f"layer {layer.layer_id}", wanted=wanted, got="none", hint=hint)
        features = kind.features() | (frozenset() if layer.cached else {"raw_kv"})
        self.selector.route(self._ask("any mode", kind, self._pools.kv.page_size, features, not layer.cached))
