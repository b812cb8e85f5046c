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
        table = self.steps[0].req_to_token
        mover = Mover(table.device)
        return Pools(req_to_token=mover(table), kv=mover.pool(self._pool))

    def to(self, device: torch.device | str) -> Scenario:
        """The scenario with its tensors on another device; expectations stay where they are."""
        return moved(self, torch.device(device))

    def __str__(self) -> str:
        return str(self.options)


class Mover:
    """Copies tensors to a device. Views keep their strides, and views of one allocation share one again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bases: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, value: Any) -> Any:
        """A tensor's copy; anything else as it is."""
        if not isinstance(value, Tensor):
            return value
        base = value if value._base is None else value._base
        if id(base) not in self._bases:
            self._bases[id(base)] = (base, base.to(self._device, copy=True))
        moved = self._bases[id(base)][1]
        return moved if base is value else moved.as_strided(value.shape, value.stride(), value.storage_offset())

    def pool(self, pool: SimulatedPool) -> SimulatedPool:
        """A pool with storage and maps of its own."""
        storage = {layer_id: (self(k), self(v)) for layer_id, (k, v) in pool.storage.items()}
        return attrs.evolve(pool, storage=storage, maps={group: self(entries) for group, entries in pool.maps.items()})


def moved(scenario: Scenario, device: torch.device) -> Scenario:
    """See `Scenario.to`."""
    mover = Mover(device)
    layers = {
        layer.layer_id: attrs.evolve(layer, k_scale=mover(layer.k_scale), v_scale=mover(layer.v_scale))
        for layer in scenario.layers
    }

    def call_there(call: LayerCall) -> LayerCall:
        tensors = {name: mover(getattr(call, name)) for name in ("q", "k", "v", "sinks")}
        return attrs.evolve(call, layer=layers[call.layer.layer_id], **tensors)

    def batch_there(batch: ForwardBatch) -> ForwardBatch:
        names = [field.name for field in attrs.fields(ForwardBatch) if not field.name.endswith("_cpu")]
        extras = {name: mover(value) for name, value in batch.extras.items()}
        return attrs.evolve(batch, **{name: mover(getattr(batch, name)) for name in names} | {"extras": extras})

    steps = [
        attrs.evolve(
            step,
            batch=batch_there(step.batch),
            req_to_token=mover(step.req_to_token),
            slot_maps={group: mover(entries) for group, entries in step.slot_maps.items()},
            calls=tuple(call_there(call) for call in step.calls),
        )
        for step in scenario.steps
    ]
    pool = mover.pool(scenario._pool)
    return attrs.evolve(scenario, layers=tuple(layers.values()), steps=tuple(steps), pool=pool)
