"""Backends with this package's kernel pinned, and what watches it."""

from __future__ import annotations

from importlib.metadata import entry_points

import attrs
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from faback import AttentionBackend, hookimpl
from faback.builtins import BUILTINS
from faback.core.registry import Registry
from faback.testing import run_scenario
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


def backend(config, pools, layers):
    """Every pass is planned; each lowering is held to what it declares."""
    config = attrs.evolve(config, kernels="sdpa", checks=True)
    return AttentionBackend(config, pools, layers, registry=registry(config))


def replayed(config, pools, layers):
    """Each size of batch is captured once, on zeros, and replayed."""
    config = attrs.evolve(config, kernels="sdpa")
    return Replayed(config, pools, layers, registry(config))


def failures(scenario, make, **where):
    """Cells that are not equal. No log-sum-exp is asked for: the kernel has none."""
    return [str(result) for result in run_scenario(scenario, make, lse=False, **where) if result.status != "equal"]


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
    return AttentionBackend(attrs.evolve(config, kernels="sdpa"), pools, layers, registry=found)
