"""The facade: the one object that an engine talks to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from faback.builtins import BUILTINS
from faback.core.batch import ForwardBatch
from faback.core.config import BackendConfig
from faback.core.contracts import Mode, Overlay, PlanContext
from faback.core.errors import BatchError, ConfigError, PluginError
from faback.core.explain import Explanation
from faback.core.graphs import Arena, Graphs, tensors_of
from faback.core.kernel import KernelRequest, arch_of
from faback.core.layer import AttentionLayer, LayerKind, by_id
from faback.core.measured import bucket
from faback.core.plan import Arguments, Plan, Preparation, Step
from faback.core.pools import Pools
from faback.core.registry import Contribution, Registry
from faback.core.segment import Segment
from faback.core.select import Route, Selector
from faback.core.tensors import by_head, check_call, fused
from faback.core.workspace import DryWorkspace, EagerWorkspace, Workspace

Tensor = torch.Tensor
T = TypeVar("T")

CALL_FEATURES = frozenset({"softcap", "sinks", "kv_scales", "latent"})
"""What a layer asks of every call; window, chunk and direction come from the segment."""


class AttentionBackend:
    """Plans once per forward pass and attends once per layer.

    Args:
        config: what is fixed for the life of the backend.
        pools: the engine's request table and KV storage, ours or its own.
        layers: every attention layer of the model.
        registry: plugins; loaded from the built-ins and the entry points unless given.

    Raises:
        ConfigError: layers or pools that contradict each other.
        NoKernelError: a layer kind that no kernel can serve, with all reasons.
        PluginError: plugins that collide, or a required one that is missing or broken.
    """

    def __init__(
        self,
        config: BackendConfig,
        pools: Pools,
        layers: Iterable[AttentionLayer],
        *,
        registry: Registry | None = None,
    ) -> None:
        self.config = config
        self.pools = pools
        self.registry = Registry.load(config, BUILTINS) if registry is None else registry
        self.layers = by_id(layers)
        self.device = pools.device
        self._context = PlanContext(config, pools, tuple(self.layers.values()))
        self._modes = self.registry.modes(config)
        self._overlays = self.registry.overlays(config)
        self._selector = Selector(config, self.registry, self.device)
        typos = sorted(set(config.named_modes) - set(self._modes) - {"default"})
        if typos:
            wanted = f"forward modes {sorted(self._modes)} or 'default'"
            raise ConfigError("config.kernels", wanted=wanted, got=", ".join(typos))
        self._check_options()
        self._ops = self.registry.device_ops(self.device)
        self._constants: dict[Any, Any] = {}
        self._arch = arch_of(self.device)
        self._kinds: dict[LayerKind, list[Contribution[Overlay]]] = {}
        self._kind_of = {layer.layer_id: layer.kind for layer in self.layers.values()}
        self._routes: dict[Any, Route] = {}
        for contribution in self._builders():
            contribution.guard(contribution.value.bind, self._context)
        for layer in self.layers.values():
            self._admit(layer)
        self.current: Plan | None = None
        self._arena = Arena(self.device)
        self._graphs = self.graphs(self.build)

    @property
    def modes(self) -> dict[str, Contribution[Mode]]:
        """The forward modes there are, by key."""
        return dict(self._modes)

    @property
    def selector(self) -> Selector:
        """The kernels there are, and how one is chosen."""
        return self._selector

    def plan(self, batch: ForwardBatch, *, return_lse: bool = False) -> Plan:
        """Builds the metadata of one forward pass for all layers. Reads the batch, never changes it.

        Args:
            batch: the batch; its tensors must stay as they are until the last `forward`.
            return_lse: choose kernels that can return their log-sum-exp; without it `forward` can return one where the
                chosen kernel happens to have it.

        Raises:
            BatchError: fields that are missing, contradict each other or lie on another device.
            NoKernelError: with all reasons.
        """
        self.current = None
        self.current = self.build(batch, self.workspace(), return_lse=return_lse)
        self.registry.planned(self.current)
        return self.current

    def build(self, batch: ForwardBatch, ws: Workspace, *, return_lse: bool = False) -> Plan:
        """Builds a plan in a given workspace without making it the current one. Raises like `plan`."""
        mode = self._mode(batch)
        base = self._asked(mode, mode.value.build, batch, ws)
        wanted = ws.features | {"lse"} if return_lse else ws.features
        steps = {}
        for kind in self._kinds:
            segment = self._segment(base, kind, batch, ws)
            parts, routes = self._calls(mode, segment, kind, batch, wanted)
            preparation = Preparation(kind, ws, self._context, self._selector.guard)
            steps[kind] = Step(segment, preparation.calls(parts, routes), self._ops)
        return Plan(batch, {layer_id: steps[kind] for layer_id, kind in self._kind_of.items()}, ws)

    def reserve(self, batches: Iterable[ForwardBatch], bounds: Mapping[str, int] | None = None) -> int:
        """Allocates the metadata of captured plans for the largest batch of every mode; afterwards nothing grows.

        Args:
            batches: only their sizes matter.
            bounds: as for `capture`.

        Returns:
            Bytes.
        """
        return self._graphs.reserve(batches, bounds or {})

    def capture(self, batch: ForwardBatch, bounds: Mapping[str, int] | None = None) -> Plan:
        """Plans for a batch of static tensors whose contents will change, and makes it the current plan.

        Called while a CUDA graph is recorded, the metadata becomes part of it: a replay of the graph then needs nothing
        of faback. Otherwise `replay` brings the metadata up to date.

        Args:
            batch: the tensors that every replay reads, valid contents in them. Host copies are not looked at.
            bounds: longest lengths that a replay may bring, by name of the field; from the configuration unless given.

        Raises:
            CapacityError: memory that was not reserved.
            FabackError: like `plan`.
        """
        self.current = None
        self.current = self._graphs.capture(batch, bounds or {})
        return self.current

    def replay(self, batch: ForwardBatch) -> Plan:
        """Brings the plan that was captured for a batch of this size up to date and makes it the current one.

        Issues the recorded fills; no hook is called and nothing allocated. Tensors that are not the captured ones are
        copied into those.

        Raises:
            BatchError: nothing was captured for this size, or a length is beyond its bound.
        """
        self.current = self._graphs.replay(batch)
        return self.current

    def graphs(self, build: Callable[[ForwardBatch, Workspace], T]) -> Graphs[T]:
        """Captured plans of another builder, in the memory that this backend's captured plans share."""
        spec, longest = self.config.speculative, self.config.context_len
        bounds = {"seq_lens": longest, "extend_prefix_lens": longest, "encoder_lens": longest}
        bounds |= {} if spec is None else {"verify_lens": spec.num_draft_tokens}
        fresh = (self._ops, self.device, self._constants)
        return Graphs(build, lambda kind, arena: kind(*fresh, arena), bounds, self._arena)

    def workspace(self) -> Workspace:
        """A fresh eager workspace on this backend's device."""
        return EagerWorkspace(self._ops, self.device, self._constants)

    def release(self, req_pool_indices: Tensor) -> None:
        """Says that requests have finished, so that plugins forget what they remember of them.

        Args:
            req_pool_indices: int32 or int64 [n] rows that are free again.
        """
        for contribution in self._builders():
            contribution.guard(contribution.value.release, req_pool_indices)

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        *,
        out: Tensor | None = None,
        sinks: Tensor | None = None,
        q_rope: Tensor | None = None,
        k_rope: Tensor | None = None,
        save_kv_cache: bool = True,
        return_lse: bool = False,
        plan: Plan | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Writes the layer's new keys and values, then attends.

        Args:
            q: [tokens, num_q_heads, head_dim], or flat [tokens, num_q_heads * head_dim].
            k: [tokens, num_kv_heads, head_dim] or flat, None where nothing is written.
            v: [tokens, num_kv_heads, v_head_dim] or flat, None where nothing is written.
            layer: one of the backend's layers.
            out: [tokens, num_q_heads, v_head_dim] to write into, any strides with the last 1.
            sinks: [num_q_heads] logits, for layers described with `sinks=True`.
            q_rope, k_rope: trailing part of q and k, [tokens, heads, rope_dim], for latent layers whose q and k come
                in two parts. Such layers take their values from k; v is not read.
            save_kv_cache: False if k and v are in the cache already.
            return_lse: also return the log-sum-exp.
            plan: a plan of this backend to use instead of the last one, for passes that interleave several.

        Returns:
            out [tokens, num_q_heads, v_head_dim] in q's dtype; with `return_lse` also float32 [tokens, num_q_heads],
            natural logarithm, sinks not included, -inf where a query sees nothing.

        Raises:
            BatchError: no plan, an unknown layer, or tensors that do not fit the plan.
        """
        plan = plan or self.current
        if plan is None:
            raise BatchError("forward", wanted="a plan", got=None, hint="Call backend.plan(batch) first.")
        self._known(layer)
        plan.ws.used()
        step = plan.steps[layer.layer_id]
        q = fused(q, q_rope, layer.num_q_heads, layer.head_dim)
        check_call(q, out, sinks, layer, self.config.dtype)
        if return_lse and not step.has_lse:
            hint = "Plan with return_lse=True, so that one is chosen that can."
            raise BatchError("return_lse", wanted="a kernel that returns its log-sum-exp", got=None, hint=hint)
        cached = self.pools.kv.buffers(layer) if layer.cached else None
        k = fused(k, k_rope, layer.num_kv_heads, layer.head_dim)
        v = None if layer.latent else by_head(v, layer.num_kv_heads, layer.v_head_dim)
        if (k is None) != (v is None) and not layer.latent:
            got = "k alone" if v is None else "v alone"
            raise BatchError(f"k and v of layer {layer.layer_id}", wanted="both or none", got=got)
        if save_kv_cache and cached is not None and k is not None:
            step.write(k, v, layer, cached)
        if layer.latent and k is not None:
            v = k[..., : layer.v_head_dim]
        if out is None:
            out = torch.empty((q.shape[0], layer.num_q_heads, layer.v_head_dim), dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
        step.attend(Arguments(q, (k, v), cached, sinks, (layer.k_scale, layer.v_scale)), out, lse)
        return out if lse is None else (out, lse)

    def write_kv(
        self,
        k: Tensor,
        v: Tensor | None,
        layer: AttentionLayer,
        *,
        k_rope: Tensor | None = None,
        plan: Plan | None = None,
    ) -> None:
        """Writes a layer's new keys and values where the plan says, and attends to nothing.

        Args:
            k, v, k_rope, layer, plan: as for `forward`.

        Raises:
            BatchError: no plan, an unknown layer, or tensors that do not fit the plan.
        """
        plan = plan or self.current
        if plan is None:
            raise BatchError("write_kv", wanted="a plan", got=None, hint="Call backend.plan(batch) first.")
        self._known(layer)
        plan.ws.used()
        if not layer.cached:
            raise BatchError(f"layer {layer.layer_id}", wanted="a layer with a cache", got="kv_group='none'")
        k = fused(k, k_rope, layer.num_kv_heads, layer.head_dim)
        v = None if layer.latent else by_head(v, layer.num_kv_heads, layer.v_head_dim)
        plan.steps[layer.layer_id].write(k, v, layer, self.pools.kv.buffers(layer))

    def merge(
        self, outs: Sequence[Tensor], lses: Sequence[Tensor], *, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Merges results over disjoint sets of keys, as `forward` returns them with `return_lse`.

        Args:
            outs: each [tokens, heads, v_head_dim].
            lses: each float32 [tokens, heads].
            sinks: [heads] logits, which enter here if they are in none of the parts.

        Returns:
            out [tokens, heads, v_head_dim] and the log-sum-exp of all keys, sinks not included.
        """
        out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
        self._ops.merge(list(outs), list(lses), out, lse, sinks)
        return out, lse

    def explain(self, batch: ForwardBatch, layer: AttentionLayer) -> Explanation:
        """Who contributed what to a layer's plan, which kernels were chosen, and why not the others.

        Leaves the current plan alone.
        """
        self._known(layer)
        mode, kind = self._mode(batch), self._kind_of[layer.layer_id]
        ws = DryWorkspace(self._ops, self.device, self._constants)
        base = self._asked(mode, mode.value.build, batch, ws)
        segment = self._segment(base, kind, batch, ws)
        _, routes = self._calls(mode, segment, kind, batch, ws.features)
        return Explanation(
            mode=str(mode),
            overlays=tuple(str(c) for c in self._kinds[kind]),
            segment=segment,
            routes=routes,
            evidence=tuple(line for line in (self._selector.evidence(route.request) for route in routes) if line),
            rejections=tuple(r for route in routes for r in self._selector.rejections(route.request)),
            absent=self._selector.absent,
        )

    def _check_options(self) -> None:
        """Raises for settings of a plugin that is not there: misspelt, not installed, broken or blocked."""
        brought = {c.value.key for c in self._builders()} | {k.name for k in self._selector.kernels}
        known = brought | {record.name for record in self.registry.records if record.status == "loaded"}
        strangers = sorted(set(self.config.options) - known)
        if strangers:
            hint = "`faback doctor` lists the plugins that were loaded and those that broke."
            raise ConfigError("config.options", wanted=f"settings of {sorted(known)}", got=strangers, hint=hint)

    def _builders(self) -> list[Contribution[Any]]:
        return [*self._modes.values(), *self._overlays]

    def _known(self, layer: AttentionLayer) -> None:
        """Raises unless the layer is one of the backend's, as it was described."""
        mine = self.layers.get(layer.layer_id)
        if mine is layer:
            return
        if mine is None:
            hint = "Name every layer when the backend is built."
            raise BatchError("layer", wanted=f"one of {sorted(self.layers)}", got=layer.layer_id, hint=hint)
        if mine != layer:
            raise BatchError(f"layer {layer.layer_id}", wanted=f"as the backend was built with: {mine}", got=layer)

    def _mode(self, batch: ForwardBatch) -> Contribution[Mode]:
        mode = self._modes.get(batch.forward_mode)
        if mode is None:
            wanted = f"one of {sorted(self._modes)}"
            hint = "`faback doctor` lists the plugins that were loaded and those that broke."
            raise BatchError("batch.forward_mode", wanted=wanted, got=repr(batch.forward_mode), hint=hint)
        batch.check_fields(mode.value.needs)
        batch.check_device(self.device)
        batch.check_lengths(self.pools.req_to_token.shape[1], self.pools.kv.num_slots, self.config.checks)
        return mode

    def _segment(self, base: Segment, kind: LayerKind, batch: ForwardBatch, ws: Workspace) -> Segment:
        segment = base
        for overlay in self._kinds[kind]:
            segment = self._asked(overlay, overlay.value.transform, batch, ws, segment, kind)
        return segment

    def _asked(
        self, owner: Contribution[Any], call: Callable[..., Any], batch: ForwardBatch, ws: Workspace, *before: Any
    ) -> Segment:
        """What a mode or overlay makes of a batch, looked at before anybody relies on it."""
        versions = self._versions(batch)
        found = owner.guard(call, *before, batch, ws, self._context)
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
        if not self.config.checks:
            return []
        return [t._version for t in tensors_of(batch).values() if not t.is_inference()]

    def _calls(
        self, mode: Contribution[Mode], segment: Segment, kind: LayerKind, batch: ForwardBatch, wanted: frozenset[str]
    ) -> tuple[tuple[Segment, ...], tuple[Route, ...]]:
        """The parts that are attended separately, and the route of each."""
        parts: tuple[Segment, ...] = mode.guard(mode.value.calls, segment, kind, self._context)
        shared = kind.features() & CALL_FEATURES | wanted
        if len(parts) > 1 or (segment.exchange is not None and segment.exchange.needs_lse):
            shared = shared - {"sinks"} | {"lse"}  # sinks enter where the parts are merged
        return parts, tuple(self._route(batch.forward_mode, kind, part, shared) for part in parts)

    def _route(self, forward_mode: str, kind: LayerKind, part: Segment, shared: frozenset[str]) -> Route:
        """How a part is served. The same question comes with every plan: a request is made once."""
        fresh = part.kv is None
        page_size = 1 if part.kv is None else part.kv.page_size
        sizes = bucket(part.rows), bucket(part.max_seqlen_q), bucket(part.reach)
        key = forward_mode, kind, page_size, part.features() | shared, fresh, sizes
        found = self._routes.get(key)
        if found is None:
            found = self._routes[key] = self._selector.route(self._ask(*key))
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
            device=self.device.type,
            arch=self._arch,
            q_dtype=self.config.dtype,
            kv_dtype=self.config.dtype if fresh else self.pools.kv.dtype(kind),
            num_q_heads=kind.num_q_heads,
            num_kv_heads=kind.num_kv_heads,
            head_dim=kind.head_dim,
            v_head_dim=kind.v_head_dim,
            page_size=page_size,
            features=features | ({"deterministic"} if self.config.deterministic else frozenset()),
            rows=sizes[0],
            queries=sizes[1],
            keys=sizes[2],
            kernel=kind.kernel,
        )

    def _admit(self, layer: AttentionLayer) -> None:
        """Checks a layer against its pool and finds the overlays and a kernel for its kind, or raises."""
        if layer.cached:
            k, v = self.pools.kv.buffers(layer)
            dims = (layer.num_kv_heads, layer.head_dim), (layer.num_kv_heads, layer.v_head_dim)
            if (tuple(k.shape[1:]), tuple(v.shape[1:])) != dims:
                got = f"{tuple(k.shape)} and {tuple(v.shape)}"
                raise ConfigError(f"KV buffers of layer {layer.layer_id}", wanted=f"heads, dims {dims}", got=got)
        kind = self._kind_of[layer.layer_id]
        if kind in self._kinds:
            return
        self._kinds[kind] = [c for c in self._overlays if c.guard(c.value.applies, kind)]
        honoured = CALL_FEATURES.union(*(c.value.honours for c in self._kinds[kind]))
        ignored = sorted(kind.features() - honoured)
        if ignored:
            hint = "`faback doctor` lists plugins that are blocked or broken."
            wanted = f"an overlay that honours {', '.join(ignored)}"
            raise ConfigError(f"layer {layer.layer_id}", wanted=wanted, got="none", hint=hint)
        features = kind.features() | (frozenset() if layer.cached else {"raw_kv"})
        self._selector.route(self._ask("any mode", kind, self.pools.kv.page_size, features, not layer.cached))
