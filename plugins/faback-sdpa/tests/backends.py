"""Backends that this package's kernel serves, and what watches it."""

from __future__ import annotations

from importlib.metadata import entry_points

import attrs
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from faback import AttentionBackend, hookimpl
from faback.builtins import BUILTINS
from faback.core.registry import Registry
from faback.testing.late import Replayed
from faback_sdpa import Sdpa
from faback_sdpa.fills import query_tokens, visible


def points():
    """The installed entry point and no other."""
    found = [point for point in entry_points(group="faback") if point.name == "sdpa"]
    assert found, "not installed: pip install --no-deps -e plugins/faback-sdpa"
    return found


def registry(config):
    """The built-ins and this package."""
    return Registry.load(config, BUILTINS, points())


class Judged:
    """A backend that `run_scenario` can judge although its kernel has no log-sum-exp: kernel 'reference' lends its own.

    What the scenario says about log-sum-exp is then no statement about the kernel; all else is.
    """

    def __init__(self, made, lender):
        self.made, self._lender = made, lender

    def plan(self, batch):
        plan = self.made.plan(batch)
        planned = getattr(plan, "steps", {})
        assert {step.call.kernel.name for step in planned.values()} == {"sdpa"}
        self._lender.plan(batch)

    def forward(self, *args, return_lse=False, **options):
        out = self.made.forward(*args, **options)
        if not return_lse:
            return out
        lent = {"sinks": options.get("sinks"), "save_kv_cache": False}
        return out, self._lender.forward(*args, return_lse=True, **lent)[1]


def backend(config, pools, layers):
    """Every pass is planned; each lowering is held to what it declares."""
    config = attrs.evolve(config, checks=True)
    made = AttentionBackend(attrs.evolve(config, kernels="sdpa"), pools, layers, registry=registry(config))
    return Judged(made, lender(config, pools, layers))


def replayed(config, pools, layers):
    """Each size of batch is captured once, on zeros, and replayed."""
    made = Replayed(attrs.evolve(config, kernels="sdpa"), pools, layers, registry(config))
    return Judged(made, lender(config, pools, layers))


def lender(config, pools, layers):
    plain = Registry.load(config, BUILTINS, [])
    return AttentionBackend(attrs.evolve(config, kernels="reference"), pools, layers, registry=plain)


class Watched(Sdpa):
    """The kernel; all of its work is done once more with tensors that have no contents, so that none can be read."""

    def prepare(self, segment, layer, request, ws):
        prepared = super().prepare(segment, layer, request, ws)
        if prepared is not None:
            with FakeTensorMode() as mode:
                tokens, seen = (mode.from_tensor(tensor) for tensor in (prepared.tokens, prepared.visible))
                blank = emptied(segment, mode)
                query_tokens(tokens, segment=blank)
                visible(seen, tokens, segment=blank)
        return prepared

    def run(self, prepared, *tensors, lse, sinks, **scales):
        assert lse is None and sinks is None
        with FakeTensorMode() as mode:
            blank = [emptied(value, mode) for value in (prepared, *tensors)]
            super().run(*blank, **{name: emptied(scale, mode) for name, scale in scales.items()})
        super().run(prepared, *tensors, **scales)


def emptied(value, mode):
    """The same tensors without contents, in attrs objects too."""
    if isinstance(value, torch.Tensor):
        return mode.from_tensor(value)
    if attrs.has(type(value)):
        return attrs.evolve(
            value, **{field.name: emptied(getattr(value, field.name), mode) for field in attrs.fields(type(value))}
        )
    return value


class WatchedPlugin:
    def __init__(self, kernel):
        self._kernel = kernel

    @hookimpl
    def faback_kernels(self):
        return [self._kernel]


def watched(config, pools, layers, kernel=Watched):
    found = Registry.load(config, BUILTINS, [])
    found.register(WatchedPlugin(kernel()), "watched")
    made = AttentionBackend(attrs.evolve(config, kernels="sdpa"), pools, layers, registry=found)
    return Judged(made, lender(config, pools, layers))
