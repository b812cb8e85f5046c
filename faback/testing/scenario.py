"""Scenarios: complete forward passes with everything an engine would bring, and what must come out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from faback.core.batch import ForwardBatch
from faback.core.config import BackendConfig
from faback.core.layer import AttentionLayer
from faback.core.pools import Pools
from faback.testing.engine import SimulatedPool
from faback.testing.options import Options
from faback.testing.visibility import Token

Tensor = torch.Tensor


@attrs.frozen(kw_only=True, eq=False)
class LayerCall:
    """One layer of one forward pass.

    Attributes:
        layer: which.
        q: [tokens, heads, dim], poisoned in padded rows; not always contiguous.
        k, v: [new tokens, kv_heads, dim] to be written, or None.
        sinks: [heads] or None.
        out: expected, float64 [tokens, heads, v_dim].
        lse: expected, float64 [tokens, heads], natural log.
        out_error, lse_error: largest error of the same computation in plain torch in the dtype of q.
        write_slots: int64 [new tokens] slots of the layer's group that receive stored_k, stored_v; padding is slot 0.
        stored_k, stored_v: [new tokens, kv_heads, dim] what they receive.
        keys: per row of q, the tokens it must see.
    """

    layer: AttentionLayer
    q: Tensor
    k: Tensor | None
    v: Tensor | None
    sinks: Tensor | None
    out: Tensor
    lse: Tensor
    out_error: float
    lse_error: float
    write_slots: Tensor
    stored_k: Tensor
    stored_v: Tensor
    keys: tuple[tuple[Token, ...], ...]


@attrs.frozen(kw_only=True, eq=False)
class Step:
    """One forward pass.

    Attributes:
        batch: as an engine would make it.
        req_to_token: [request rows, columns] the engine's table at this time, everything unused poisoned.
        slot_maps: group -> map of the KV pool at this time.
        calls: one per layer.
        queries: the token of each row of q, None for padding.
    """

    batch: ForwardBatch
    req_to_token: Tensor
    slot_maps: Mapping[str, Tensor]
    calls: tuple[LayerCall, ...]
    queries: tuple[Token | None, ...]

    def enter(self, pools: Pools) -> None:
        """Brings the engine's tables to this time, in place."""
        pools.req_to_token.copy_(self.req_to_token)
        assert isinstance(pools.kv, SimulatedPool)
        for group, slot_map in self.slot_maps.items():
            pools.kv.maps[group].copy_(slot_map)


@attrs.frozen(kw_only=True, eq=False)
class Scenario:
    """One or more forward passes over one simulated engine.

    Attributes:
        options: what was asked for; equal options give equal scenarios.
        config: for the backend.
        layers: of the model.
        steps: the passes, in order.
    """

    options: Options
    config: BackendConfig
    layers: tuple[AttentionLayer, ...]
    steps: tuple[Step, ...]
    _pool: SimulatedPool

    @classmethod
    def make(cls, **options: Any) -> Scenario:
        """A scenario; see `faback.testing.Options` for the arguments.

        Raises:
            ValueError: a combination that means nothing.
        """
        from faback.testing.realise import realised

        return realised(Options(**options))

    def pools(self) -> Pools:
        """A fresh copy of the engine's pools, as they are before the first step."""
        storage = {layer.layer_id: _cloned(layer, self._pool) for layer in self.layers}
        maps = {group: slot_map.clone() for group, slot_map in self._pool.maps.items()}
        kv = attrs.evolve(self._pool, storage=storage, maps=maps)
        return Pools(req_to_token=self.steps[0].req_to_token.clone(), kv=kv)

    def to(self, device: torch.device | str) -> Scenario:
        """The scenario with its tensors on another device; expectations stay where they are."""
        return moved(self, torch.device(device))

    def __str__(self) -> str:
        return str(self.options)


def _cloned(layer: AttentionLayer, pool: SimulatedPool) -> tuple[Tensor, Tensor]:
    """Copies of k and v with the strides, and the shared memory, of the originals."""
    k, v = pool.buffers(layer)
    base = k if layer.latent or k._base is None else k._base
    copy = base.clone()
    dim, v_dim = layer.head_dim, layer.v_head_dim
    if layer.latent:
        return copy, copy[..., :v_dim]
    if base is k:
        return copy, v.clone()
    return copy[..., :dim], copy[..., dim : dim + v_dim]


def moved(scenario: Scenario, device: torch.device) -> Scenario:
    """See `Scenario.to`."""

    def there(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    def layer_there(layer: AttentionLayer) -> AttentionLayer:
        return attrs.evolve(layer, k_scale=there(layer.k_scale), v_scale=there(layer.v_scale))

    def batch_there(batch: ForwardBatch) -> ForwardBatch:
        names = [f.name for f in attrs.fields(ForwardBatch)]
        return attrs.evolve(batch, **{n: there(getattr(batch, n)) for n in names if not n.endswith("_cpu")})

    layers = {layer.layer_id: layer_there(layer) for layer in scenario.layers}
    names = ("q", "k", "v", "sinks")
    steps = [
        attrs.evolve(
            step,
            batch=batch_there(step.batch),
            req_to_token=there(step.req_to_token),
            slot_maps={group: there(slot_map) for group, slot_map in step.slot_maps.items()},
            calls=tuple(
                attrs.evolve(c, layer=layers[c.layer.layer_id], **{n: there(getattr(c, n)) for n in names})
                for c in step.calls
            ),
        )
        for step in scenario.steps
    ]
    pool = scenario.pools().kv
    assert isinstance(pool, SimulatedPool)
    storage = {i: _moved_pair(layers[i], *pool.storage[i], device) for i in layers}
    maps = {group: there(slot_map) for group, slot_map in pool.maps.items()}
    return attrs.evolve(
        scenario,
        layers=tuple(layers.values()),
        steps=tuple(steps),
        pool=attrs.evolve(pool, storage=storage, maps=maps),
    )


def _moved_pair(layer: AttentionLayer, k: Tensor, v: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    base = k if k._base is None else k._base
    if layer.latent:
        there = base.to(device)
        return there, there[..., : layer.v_head_dim]
    if base is k:
        return k.to(device), v.to(device)
    both = base.to(device)
    return both[..., : layer.head_dim], both[..., layer.head_dim :]
