"""The facade: the one object that an engine talks to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from faback.builtins import BUILTINS
from faback.core.batch import ForwardBatch
from faback.core.config import BackendConfig
from faback.core.contracts import Mode
from faback.core.errors import BatchError
from faback.core.explain import Explanation
from faback.core.graphs import Arena, Graphs
from faback.core.layer import AttentionLayer, by_id
from faback.core.plan import Arguments, Plan
from faback.core.planner import Planner
from faback.core.pools import Pools
from faback.core.registry import Contribution, Registry
from faback.core.select import Selector
from faback.core.tensors import by_head, check_call, fused
from faback.core.workspace import DryWorkspace, EagerWorkspace, Workspace

Tensor = torch.Tensor
T = TypeVar("T")


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
        self._ops = self.registry.device_ops(self.device)
        self._constants: dict[Any, Any] = {}
        self._planner = Planner(config, pools, self.layers, self.registry, self._ops)
        self.current: Plan | None = None
        self._arena = Arena(self.device)
        self._graphs = self.graphs(self.build)

    @property
    def modes(self) -> dict[str, Contribution[Mode]]:
        """The forward modes there are, by key."""
        return dict(self._planner.modes)

    @property
    def selector(self) -> Selector:
        """The kernels there are, and how one is chosen."""
        return self._planner.selector

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
        plan = self.build(batch, self.workspace(), return_lse=return_lse)
        self.registry.planned(plan)
        self.current = plan
        return plan

    def build(self, batch: ForwardBatch, ws: Workspace, *, return_lse: bool = False) -> Plan:
        """Builds a plan in a given workspace without making it the current one. Raises like `plan`."""
        return self._planner.build(batch, ws, return_lse=return_lse)

    def reserve(self, batches: Iterable[ForwardBatch], bounds: Mapping[str, int] | None = None) -> int:
        """Allocates the metadata of captured plans for the largest batch of every mode; afterwards nothing grows.

        Either all of it is there afterwards, or what was there before; a smaller reservation may then be tried. Later
        calls only make sure that more batches fit.

        Args:
            batches: only their sizes matter.
            bounds: as for `capture`.

        Returns:
            Bytes.

        Raises:
            torch.OutOfMemoryError: there is not enough memory.
            CapacityError: a later call with a batch that does not fit.
            FabackError: like `plan`.
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
        self.current = None
        self.current = self._graphs.replay(batch)
        return self.current

    def graphs(self, build: Callable[[ForwardBatch, Workspace], T], *, apart: bool = False) -> Graphs[T]:
        """Captured plans of another builder, in the memory that this backend's captured plans share.

        Args:
            build: makes a plan in a workspace.
            apart: in memory of their own, for plans that are brought up to date while another one still counts.
        """
        spec, longest = self.config.speculative, self.config.context_len
        bounds = {"seq_lens": longest, "extend_prefix_lens": longest, "encoder_lens": longest}
        bounds |= {} if spec is None else {"verify_lens": spec.num_draft_tokens}
        fresh = (self._ops, self.device, self._constants)
        arena = Arena(self.device) if apart else self._arena
        return Graphs(build, lambda kind, arena: kind(*fresh, arena), bounds, arena)

    def workspace(self) -> Workspace:
        """A fresh eager workspace on this backend's device."""
        return EagerWorkspace(self._ops, self.device, self._constants)

    def release(self, req_pool_indices: Tensor) -> None:
        """Says that requests have finished, so that plugins forget what they remember of them.

        Args:
            req_pool_indices: int32 or int64 [n] rows that are free again.

        Raises:
            PluginError: a plugin raised. All others have been told.
        """
        errors = []
        for contribution in self._planner.builders():
            try:
                contribution.guard(contribution.value.release, req_pool_indices)
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)
        if errors:
            raise errors[0]

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
        self.check_layer(layer)
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
        new = None
        if save_kv_cache and cached is not None and k is not None:
            new = step.store(k, v, layer, cached)
        if layer.latent and k is not None:
            v = k[..., : layer.v_head_dim]
        if out is None:
            out = torch.empty((q.shape[0], layer.num_q_heads, layer.v_head_dim), dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
        step.attend(Arguments(q, (k, v), cached, sinks, (layer.k_scale, layer.v_scale), new), out, lse)
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
        self.check_layer(layer)
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
        self.check_layer(layer)
        return self._planner.explain(batch, layer, DryWorkspace(self._ops, self.device, self._constants))

    def check_layer(self, layer: AttentionLayer) -> None:
        """Raises unless the layer is one of the backend's, as it was described."""
        mine = self.layers.get(layer.layer_id)
        if mine is layer:
            return
        if mine is None:
            hint = "Name every layer when the backend is built."
            raise BatchError("layer", wanted=f"one of {sorted(self.layers)}", got=layer.layer_id, hint=hint)
        if mine != layer:
            raise BatchError(f"layer {layer.layer_id}", wanted=f"as the backend was built with: {mine}", got=layer)
