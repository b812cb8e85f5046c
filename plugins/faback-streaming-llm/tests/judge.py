"""What must come out, said once more: token t is seen by query p iff t <= p and (t < sinks or t >= p - window).

A scenario of `faback.testing` says for each query whom a full-attention layer shows it. Here that list is narrowed by
token identity, and the oracle is asked again. No slot, page, table or segment is looked at.
"""

from __future__ import annotations

from collections.abc import Collection

import attrs
import torch

from faback.testing import Scenario, Token, oracle_attention
from faback.testing.layers import make_store
from faback.testing.scenario import LayerCall
from faback.testing.stories import told


def sees(query: Token, key: Token, sinks: int, window: int) -> bool:
    t, p = key.position, query.position
    return t <= p and (t < sinks or t >= p - window)


def full_layers(scenario: Scenario) -> list[int]:
    """Ids of the layers that StreamingLLM is about."""
    return [
        layer.layer_id
        for layer in scenario.layers
        if layer.causal and not layer.cross and layer.window is None and layer.chunk is None
    ]


def streaming(scenario: Scenario, sinks: int, window: int, *, layers: Collection[int] | None = None) -> Scenario:
    """The scenario with the plugin switched on, and what must come out then.

    Args:
        layers: those that are varied, and named in the options; all full-attention layers unless given.
    """
    options = {"sinks": sinks, "window": window} | ({} if layers is None else {"layers": list(layers)})
    varied = full_layers(scenario) if layers is None else layers
    judge = _Judge(scenario, sinks, window)
    steps = [
        attrs.evolve(
            step,
            calls=tuple(
                judge.call(call, step.queries, raw=step.batch.forward_mode == "embedding")
                if call.layer.layer_id in varied
                else call
                for call in step.calls
            ),
        )
        for step in scenario.steps
    ]
    config = attrs.evolve(scenario.config, options={**scenario.config.options, "streaming-llm": options})
    return attrs.evolve(scenario, config=config, steps=tuple(steps))


class _Judge:
    def __init__(self, scenario: Scenario, sinks: int, window: int) -> None:
        self._options, self._sizes = scenario.options, (sinks, window)
        self._world = told(scenario.options).world
        self._stores = {
            layer.layer_id: make_store(self._world, layer, scenario.options) for layer in scenario.layers
        }  # every token's keys and values, by identity

    def call(self, call: LayerCall, queries: tuple[Token | None, ...], *, raw: bool) -> LayerCall:
        store, layer = self._stores[call.layer.layer_id], call.layer
        source = store.given if raw else store.true
        keys = tuple(
            tuple(key for key in seen if query is not None and sees(query, key, *self._sizes))
            for query, seen in zip(queries, call.keys, strict=True)
        )
        found = {dtype: [] for dtype in (torch.float64, self._options.dtype)}
        for row, tokens in enumerate(keys):
            at = self._world.index(tokens)
            everything = torch.ones(1, len(tokens), dtype=torch.bool)
            args = (call.q[row : row + 1], source[0][at], source[1][at], everything)
            numbers = {"scale": layer.scale, "softcap": layer.softcap, "sinks": call.sinks}
            for dtype, results in found.items():
                results.append(oracle_attention(*args, **numbers, dtype=dtype))
        if not keys:
            return call
        out, lse = (torch.cat(parts) for parts in zip(*found[torch.float64], strict=True))
        plain = [torch.cat(parts) for parts in zip(*found[self._options.dtype], strict=True)]
        errors = [_gap(rough, exact) for rough, exact in zip(plain, (out, lse), strict=True)]
        return attrs.evolve(call, out=out, lse=lse, out_error=errors[0], lse_error=errors[1], keys=keys)


def _gap(plain: torch.Tensor, exact: torch.Tensor) -> float:
    finite = torch.isfinite(exact)
    return float((plain - exact)[finite].abs().max()) if bool(finite.any()) else 0.0
