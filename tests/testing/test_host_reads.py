"""Reads of the device by the host are found where the CPU plays the device, and named."""

from __future__ import annotations

import attrs
import pytest
import torch

from faback import PluginError, hookimpl
from faback.builtins import BUILTINS
from faback.core.registry import Registry
from faback.kernels.reference import Reference
from faback.modes.decode import Decode
from faback.testing.host_reads import HostReads
from faback.testing.late import Late, Replayed
from faback.testing.scenario import Scenario

LENS = torch.tensor([3, 5])
READS = {
    "item": lambda x: (x + 1).max().item(),
    "int": lambda x: int(x[0]),
    "list": lambda x: x.tolist(),
    "array": lambda x: (x * 2).numpy(),
    "truth": lambda x: bool((x > 2).all()),
    "mask": lambda x: x[x > 3],
    "nonzero": lambda x: (x - 3).nonzero(),
    "repeat": lambda x: torch.arange(2).repeat_interleave(x),
    "unique": lambda x: x.unique(),
    "written elsewhere": lambda x: torch.zeros(2, dtype=torch.int64).copy_(x).sum().item(),
}
ON_DEVICE = {
    "arithmetic": lambda x: (x * 2).cumsum(0),
    "another tensor": lambda x: torch.tensor([4]).item(),
    "gathered": lambda x: torch.tensor([True, False, True] * 3)[x],
    "repeated a known number of times": lambda x: x.repeat_interleave(3),
    "chosen": lambda x: torch.where(x > 3, x, 0),
}


@pytest.mark.parametrize("name", READS)
def test_reads_are_found(name):
    with pytest.raises(RuntimeError, match="the host reads a tensor"), HostReads([LENS]):
        READS[name](LENS)
    READS[name](LENS)


@pytest.mark.parametrize("name", ON_DEVICE)
def test_what_stays_on_the_device_is_not(name):
    with HostReads([LENS]):
        result = ON_DEVICE[name](LENS)
    assert torch.equal(torch.as_tensor(result), torch.as_tensor(ON_DEVICE[name](LENS)))


class Impatient(Decode):
    key = "impatient"

    def build(self, batch, ws, ctx):
        batch.seq_lens.max().item()
        return super().build(batch, ws, ctx)


class Plugin:
    @hookimpl
    def faback_modes(self):
        return [Impatient()]

    @hookimpl
    def faback_kernels(self):
        return [Late(Reference())]


def test_who_waits_for_the_device_under_capture_is_named():
    scenario = Scenario.make(mode="decode")
    config = attrs.evolve(scenario.config, kernels="late reference")
    registry = Registry.load(config, BUILTINS, entry_points=[])
    registry.register(Plugin(), "hasty plugin")
    backend = Replayed(config, scenario.pools(), scenario.layers, registry=registry)
    batch = scenario.steps[0].batch
    with pytest.raises(PluginError, match="(?s)impatient.*hasty plugin.*aten._local_scalar_dense"):
        backend.plan(attrs.evolve(batch, forward_mode="impatient"))
    backend.plan(batch)
