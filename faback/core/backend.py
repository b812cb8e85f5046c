"""The facade: the one object that an engine talks to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from faback.builtins import BUILTINS
from faback.core.batch import ForwardBatch
from faback.core.config import BackendConfig
from faback.core.contracts import Mode, Overlay, PlanContext
from faback.core.errors import BatchError, ConfigError
from faback.core.explain import Explanation
from faback.core.kernel import KernelRequest
from faback.core.layer import AttentionLayer, LayerKind
from faback.core.plan import Arguments, Plan, Step, prepare_calls
from faback.core.pools import Pools
from faback.core.registry import Contribution, Registry
from faback.core.segment import Segment
from faback.core.select import Selector
from faback.core.workspace import DryWorkspace, EagerWorkspace, Workspace

Tensor = torch.Tensor

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
        self.layers = _unique(layers)
        self.device = pools.device
        self._context = PlanContext(config, pools)
        self._modes = self.registry.modes(config)
        self._overlays = self.registry.overlays(config)
        self._selector = Selector(config, self.registry, self.device)
        self._ops = self.registry.device_ops(self.device)
        self._constants: dict[Any, Tensor] = {}
        self._arch = _arch(self.device)
        self._kinds: dict[LayerKind, list[Contribution[Overlay]]] = {}
        for contribution in self._builders():
            contribution.guard(contribution.value.bind, self._context)
        for layer in self.layers.values():
            self._admit(layer)
        self.current: Plan | None = None

    @property
    def modes(self) -> dict[str, Contribution[Mode]]:
        """The forward modes there are, by key."""
        return dict(self._modes)

    @property
    def selector(self) -> Selector:
        """The kernels there are, and how one is chosen."""
        return self._selector

    def plan(self, batch: ForwardBatch) -> Plan:
        """Builds the metadata of one forward pass for all layers. Reads the batch, never changes it.

        Args:
            batch: the batch; its tensors must stay as they are until the last `forward`.

        Raises:
            BatchError: fields that are missing, contradict each other or lie on another device.
            NoKernelError: with all reasons.
        """
        self.current = None
        self.current = self.build(batch, self.workspace())
        self.registry.planned(self.current)
        return self.current

    def build(self, batch: ForwardBatch, ws: Workspace) -> Plan:
        """Builds a plan in a given workspace without making it the current one. Raises like `plan`."""
        mode = self._mode(batch)
        base = mode.guard(mode.value.build, batch, ws, self._context).check(str(mode))
        steps = {}
        for kind in self._kinds:
            segment = self._segment(base, kind, batch, ws)
            calls = mode.guard(mode.value.calls, segment, kind, self._context)
            route = [self._selector.route(self._request(part, kind, batch.forward_mode)) for part in calls]
            prepared = prepare_calls(calls, route, kind, ws, self._context)
            steps[kind] = Step(segment, prepared, self._ops)
        return Plan(batch, {layer.layer_id: steps[layer.kind] for layer in self.layers.values()})

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
        step = plan.steps.get(layer.layer_id)
        if step is None:
            hint = "Name every layer when the backend is built."
            raise BatchError("layer", wanted=f"one of {sorted(self.layers)}", got=layer.layer_id, hint=hint)
        if (sinks is not None) != layer.sinks:
            got = None if sinks is None else tuple(sinks.shape)
            hint = "A layer that brings sinks is described with sinks=True, so that a kernel is chosen that has them."
            raise BatchError(f"sinks of layer {layer.layer_id}", wanted=f"sinks={layer.sinks}", got=got, hint=hint)
        q = _fused(q, q_rope, layer.num_q_heads, layer.head_dim)
        cached = self.pools.kv.buffers(layer) if layer.cached else None
        k = _fused(k, k_rope, layer.num_kv_heads, layer.head_dim)
        v = None if layer.latent else _by_head(v, layer.num_kv_heads, layer.v_head_dim)
        if save_kv_cache and cached is not None and k is not None and (layer.latent or v is not None):
            step.write(k, v, layer, cached)
        if layer.latent and k is not None:
            v = k[..., : layer.v_head_dim]
        if out is None:
            out = torch.empty((q.shape[0], layer.num_q_heads, layer.v_head_dim), dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
        step.attend(Arguments(q, (k, v), cached, sinks, (layer.k_scale, layer.v_scale)), out, lse)
        return out if lse is None else (out, lse)

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
        mode = self._mode(batch)
        ws = DryWorkspace(self._ops, self.device, self._constants)
        base = mode.guard(mode.value.build, batch, ws, self._context).check(str(mode))
        segment = self._segment(base, layer.kind, batch, ws)
        calls = mode.guard(mode.value.calls, segment, layer.kind, self._context)
        requests = [self._request(part, layer.kind, batch.forward_mode) for part in calls]
        return Explanation(
            mode=str(mode),
            overlays=tuple(str(c) for c in self._kinds[layer.kind]),
            segment=segment,
            routes=tuple(self._selector.route(request) for request in requests),
            rejections=tuple(r for request in requests for r in self._selector.rejections(request)),
            absent=self._selector.absent,
        )

    def _builders(self) -> list[Contribution[Any]]:
        return [*self._modes.values(), *self._overlays]

    def _mode(self, batch: ForwardBatch) -> Contribution[Mode]:
        mode = self._modes.get(batch.forward_mode)
        if mode is None:
            wanted = f"one of {sorted(self._modes)}"
            hint = "`faback doctor` lists the plugins that were loaded and those that broke."
            raise BatchError("batch.forward_mode", wanted=wanted, got=repr(batch.forward_mode), hint=hint)
        batch.check_fields(mode.value.needs)
        batch.check_device(self.device)
        return mode

    def _segment(self, base: Segment, kind: LayerKind, batch: ForwardBatch, ws: Workspace) -> Segment:
        segment = base
        for overlay in self._kinds[kind]:
            transform = overlay.value.transform
            segment = overlay.guard(transform, segment, kind, batch, ws, self._context).check(str(overlay))
        return segment

    def _request(self, segment: Segment, kind: LayerKind, forward_mode: str) -> KernelRequest:
        features = segment.features() | (kind.features() & CALL_FEATURES)
        if segment.exchange is not None and segment.exchange.needs_lse:
            features = features - {"sinks"} | {"lse"}
        page_size = 1 if segment.kv is None else segment.kv.page_size
        return self._ask(forward_mode, kind, page_size, features, fresh=segment.kv is None)

    def _ask(
        self, forward_mode: str, kind: LayerKind, page_size: int, features: frozenset[str], fresh: bool = False
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
        )

    def _admit(self, layer: AttentionLayer) -> None:
        """Checks a layer against its pool and finds the overlays and a kernel for its kind, or raises."""
        if layer.cached:
            k, v = self.pools.kv.buffers(layer)
            wanted = (layer.num_kv_heads, layer.head_dim), (layer.num_kv_heads, layer.v_head_dim)
            if (tuple(k.shape[1:]), tuple(v.shape[1:])) != wanted:
                got = f"{tuple(k.shape)} and {tuple(v.shape)}"
                raise ConfigError(f"KV buffers of layer {layer.layer_id}", wanted=f"heads, dims {wanted}", got=got)
        kind = layer.kind
        if kind in self._kinds:
            return
        self._kinds[kind] = [c for c in self._overlays if c.guard(c.value.applies, kind)]
        features = kind.features() | (frozenset() if layer.cached else {"raw_kv"})
        self._selector.route(self._ask("any mode", kind, self.pools.kv.page_size, features, fresh=not layer.cached))


def _unique(layers: Iterable[AttentionLayer]) -> dict[int, AttentionLayer]:
    found: dict[int, AttentionLayer] = {}
    for layer in layers:
        if layer.layer_id in found:
            raise ConfigError("layers", wanted="one description per layer_id", got=f"two of {layer.layer_id}")
        found[layer.layer_id] = layer
    if not found:
        raise ConfigError("layers", wanted="at least one AttentionLayer", got="none")
    return found


def _arch(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def _by_head(tensor: Tensor | None, heads: int, dim: int) -> Tensor | None:
    """[tokens, heads * dim] -> [tokens, heads, dim]."""
    return tensor if tensor is None or tensor.ndim == 3 else tensor.view(tensor.shape[0], heads, dim)


def _fused(tensor: Tensor | None, rope: Tensor | None, heads: int, dim: int) -> Any:
    """q or k whole, by head, its trailing part appended where it came apart."""
    if tensor is None or rope is None:
        return _by_head(tensor, heads, dim)
    tokens = tensor.shape[0]
    return torch.cat([tensor.reshape(tokens, heads, -1), rope.reshape(tokens, heads, -1)], dim=-1)
