"""A scenario under another rule: who sees what by somebody else's word, and the oracle asked again."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from faback.core.layer import AttentionLayer
from faback.testing.layers import make_store
from faback.testing.oracle import oracle_attention
from faback.testing.scenario import LayerCall, Scenario
from faback.testing.stories import told
from faback.testing.visibility import Token

Tensor = torch.Tensor

Sees = Callable[[Token, Token, AttentionLayer], bool]
"""Whether a query may see a key that the scenario's own rule shows it."""


def rejudged(scenario: Scenario, sees: Sees) -> Scenario:
    """The scenario as it must come out where `sees` narrows what each query is shown.

    Args:
        scenario: as `Scenario.make` makes it.
        sees: knows tokens by identity: no slot, page or table.
    """
    world = told(scenario.options).world
    stores = {layer.layer_id: make_store(world, layer, scenario.options) for layer in scenario.layers}

    def call_judged(call: LayerCall, queries: tuple[Token | None, ...], embedding: bool) -> LayerCall:
        store, layer = stores[call.layer.layer_id], call.layer
        source = store.given if embedding or not layer.cached else store.true
        keys = tuple(
            tuple(key for key in seen if query is not None and sees(query, key, layer))
            for query, seen in zip(queries, call.keys, strict=True)
        )
        numbers = {"scale": layer.scale, "softcap": layer.softcap, "sinks": call.sinks}
        exact, plain = [], []
        for row, tokens in enumerate(keys):
            at, everything = world.index(list(tokens)), torch.ones(1, len(tokens), dtype=torch.bool)
            args = (call.q[row : row + 1], source[0][at], source[1][at], everything)
            exact.append(oracle_attention(*args, **numbers))  # type: ignore[arg-type]
            plain.append(oracle_attention(*args, **numbers, dtype=scenario.options.dtype))  # type: ignore[arg-type]
        if not keys:
            return call
        out, lse = (torch.cat(parts) for parts in zip(*exact, strict=True))
        gaps = [_gap(torch.cat(rough), fine) for rough, fine in zip(zip(*plain, strict=True), (out, lse), strict=True)]
        return attrs.evolve(call, out=out, lse=lse, out_error=gaps[0], lse_error=gaps[1], keys=keys)

    steps = []
    for step in scenario.steps:
        embedding = step.batch.forward_mode == "embedding"
        calls = tuple(call_judged(call, step.queries, embedding) for call in step.calls)
        steps.append(attrs.evolve(step, calls=calls))
    return attrs.evolve(scenario, steps=tuple(steps))


def _gap(plain: Tensor, exact: Tensor) -> float:
    finite = torch.isfinite(exact)
    return float((plain - exact)[finite].abs().max()) if bool(finite.any()) else 0.0
