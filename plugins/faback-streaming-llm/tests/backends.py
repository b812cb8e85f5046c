"""Backends with this plugin and no other installed one."""

from __future__ import annotations

import attrs

import faback_streaming_llm.overlay as plugin
from faback import AttentionBackend, hookimpl
from faback.builtins import BUILTINS
from faback.core.registry import Registry
from faback.kernels.reference import Reference
from faback.testing.late import Late, Replayed
from faback.testing.poor import Poor


class Kernels:
    """Everything natively, late enough to be captured, and hardly anything, so that lowerings are needed."""

    @hookimpl
    def faback_kernels(self):
        return [Late(Reference()), Poor()]


def registry(config):
    found = Registry.load(config, BUILTINS, entry_points=[])
    found.register(plugin, "streaming-llm")
    found.register(Kernels(), "kernels of the tests")
    return found


def backend(kernel):
    """Makes eager backends with one kernel."""

    def make(config, pools, layers):
        config = attrs.evolve(config, kernels=kernel, checks=True)
        return AttentionBackend(config, pools, layers, registry=registry(config))

    return make


def replayed(kernel):
    """Makes backends that capture each size of batch once and replay it."""

    def make(config, pools, layers):
        config = attrs.evolve(config, kernels=kernel)
        return Replayed(config, pools, layers, registry(config))

    return make
