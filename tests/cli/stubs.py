"""Plugins for the tests of the command line, good and bad."""

from importlib import metadata

import torch

import faback
from faback.kernels.reference import Reference


class Point:
    """An entry point that loads what it was given, or raises it."""

    def __init__(self, name, target):
        self.name, self._target = name, target
        self.dist = type("Dist", (), {"name": f"{name}-dist", "version": "9.9"})

    def load(self):
        if isinstance(self._target, Exception):
            raise self._target
        return self._target


class Skewed(Reference):
    """A kernel that is wrong by one tenth."""

    name = "skewed"
    priority = 1000

    def run(self, prepared, q, k, v, out, **rest):
        super().run(prepared, q, k, v, out, **rest)
        out.add_(0.1)


class Elsewhere(Reference):
    """A kernel for machines that nobody has."""

    name = "elsewhere"

    def probe(self, device):
        return "needs a tachyon accelerator"


class Picky(Reference):
    """A kernel that has no sliding window."""

    name = "picky"
    priority = -200

    def capabilities(self, device: torch.device):
        can = super().capabilities(device)
        return type(can)(
            devices=can.devices, q_dtypes=can.q_dtypes, kv_dtypes=can.kv_dtypes, features=can.features - {"window"}
        )


class Plugin:
    """A plugin that brings one kernel."""

    def __init__(self, kernel):
        self._kernel = kernel

    @faback.hookimpl
    def faback_kernels(self, device):
        return [self._kernel]


class Raising:
    """A plugin whose hook raises."""

    @faback.hookimpl
    def faback_modes(self, config):
        raise ZeroDivisionError("no mode today")


def install(monkeypatch, *points):
    """Makes these entry points the installed ones."""
    found = metadata.entry_points
    ours = lambda **asked: list(points) if asked.get("group") == "faback" else found(**asked)  # noqa: E731
    monkeypatch.setattr("faback.core.registry.metadata.entry_points", ours)
