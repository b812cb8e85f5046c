"""The checks find what they must: sound backends pass, and each kind of fault is reported as such."""

from __future__ import annotations

import attrs
import pytest
import torch

from faback import AttentionBackend, ConfigError, PluginError
from faback.testing import MODES, OVERLAYS, Options, Scenario, impossible, run_scenario, wrong

CELLS = [
    {"mode": mode, "overlay": overlay, **more}
    for mode in MODES
    for overlay in OVERLAYS
    for more in ({}, {"topk": 3}, {"ragged": True}, {"hybrid": True}, {"strided_rows": True})
    if impossible(Options(mode=mode, overlay=overlay, **more)) is None
]


def reference(config, pools, layers):
    return AttentionBackend(attrs.evolve(config, kernels="reference"), pools, layers)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell.values())))
def test_the_reference_kernel_is_equal(cell):
    for page_size in (1, 3, 16):
        scenario = Scenario.make(**cell, page_size=page_size, seed=page_size, padded_rows=1, padded_tokens=1)
        results = run_scenario(scenario, reference)
        assert [result for result in results if result.status != "equal"] == []
        assert len(results) == len(scenario.steps) * len(scenario.layers)


def altered(**changes):
    """A backend whose layers are not those it was asked for."""

    class Altered:
        def __init__(self, config, pools, layers):
            fields = [{name: change(layer) for name, change in changes.items()} for layer in layers]
            others = [attrs.evolve(layer, **field) for layer, field in zip(layers, fields, strict=True)]
            self.layers = {layer.layer_id: layer for layer in others}
            self.inner = reference(config, pools, others)

        def plan(self, batch):
            self.inner.plan(batch)

        def forward(self, q, k, v, layer, **options):
            return self.inner.forward(q, k, v, self.layers[layer.layer_id], **options)

    return Altered


@pytest.mark.parametrize(
    ("wanted", "fault"),
    [
        ({"overlay": "window", "windows": (3, 5)}, {"window": lambda layer: layer.window and layer.window + 1}),
        ({"overlay": "window", "windows": (3, 5)}, {"window": lambda layer: layer.window and layer.window - 1}),
        ({"overlay": "local", "chunk": 4}, {"chunk": lambda layer: layer.chunk and layer.chunk * 2}),
        ({"softcap": True}, {"softcap": lambda layer: 0.0}),
        ({}, {"scale": lambda layer: 1.01 * layer.scale}),
        ({"overlay": "encoder_only"}, {"causal": lambda layer: True}),
    ],
)
def test_a_wrong_rule_is_found(wanted, fault):
    scenario = Scenario.make(mode="extend", lengths=((3, 9), (0, 7)), page_size=4, **wanted)
    found = wrong(run_scenario(scenario, altered(**fault)))
    assert found
    assert "must see" in found[0].reason
    assert "request" in found[0].reason


class Meddler:
    """Forwards to a sound backend, and then does something that it must not."""

    def __init__(self, config, pools, layers):
        self.inner, self.pools, self.batch = reference(config, pools, layers), pools, None

    def plan(self, batch):
        self.batch = batch
        self.inner.plan(batch)

    def forward(self, q, k, v, layer, **options):
        result = self.inner.forward(q, k, v, layer, **options)
        self.meddle(q, k, v, layer, options, result)
        return result

    def meddle(self, q, k, v, layer, options, result):
        raise NotImplementedError


class ForeignSlot(Meddler):
    def meddle(self, q, k, v, layer, options, result):
        buffer = self.pools.kv.buffers(layer)[0]
        buffer[-1] = 1.0


class NeverStores(Meddler):
    def forward(self, q, k, v, layer, **options):
        before = [buffer.clone() for buffer in self.pools.kv.buffers(layer)]
        result = self.inner.forward(q, k, v, layer, **options)
        for buffer, old in zip(self.pools.kv.buffers(layer), before, strict=True):
            buffer.copy_(old)
        return result


class ChangesLengths(Meddler):
    def meddle(self, q, k, v, layer, options, result):
        self.batch.seq_lens.add_(1)


class ChangesQueries(Meddler):
    def meddle(self, q, k, v, layer, options, result):
        q.mul_(2)


class WritesAroundOut(Meddler):
    def meddle(self, q, k, v, layer, options, result):
        if options.get("out") is not None:
            out = options["out"]
            out.as_strided((1,), (1,), out.storage_offset() - 1).zero_()


class IgnoresOut(Meddler):
    def forward(self, q, k, v, layer, out=None, **options):
        return self.inner.forward(q, k, v, layer, **options)


class LogTwo(Meddler):
    def meddle(self, q, k, v, layer, options, result):
        if isinstance(result, tuple):
            result[1].mul_(1.4427)


class StalePadding(Meddler):
    def meddle(self, q, k, v, layer, options, result):
        out = result[0] if isinstance(result, tuple) else result
        out[-1] = 7.0


class Breaks(Meddler):
    def meddle(self, q, k, v, layer, options, result):
        raise RuntimeError("illegal memory access")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (ForeignSlot, "written in slots"),
        (NeverStores, "not stored right in slots"),
        (ChangesLengths, "changed batch.seq_lens"),
        (ChangesQueries, "changed q of layer 0"),
        (WritesAroundOut, "memory around out"),
        (IgnoresOut, "did not return the tensor given as out"),
        (LogTwo, "lse off by"),
        (StalePadding, "is padding and must be 0"),
        (Breaks, "forward raised RuntimeError: illegal memory access"),
    ],
)
def test_a_misdeed_is_found(fault, words):
    scenario = Scenario.make(mode="decode", lengths=((3, 1), (8, 1)), page_size=4, padded_rows=1, seed=1)
    results = run_scenario(scenario, fault)
    assert [result.status for result in results] == ["wrong"]
    assert words in results[0].reason


def test_a_refusal_is_no_fault():
    def refuses(config, pools, layers):
        raise ConfigError("layer.window", wanted="None", got=3)

    results = run_scenario(Scenario.make(mode="decode", seed=3), refuses)
    assert [result.status for result in results] == ["refused"]
    assert "layer.window" in results[0].reason
    assert "Scenario.make(mode='decode', seed=3)" in str(results[0])


def test_a_wrapped_crash_is_no_refusal():
    class Wrapped(Meddler):
        def plan(self, batch):
            raise PluginError("prepare of kernel") from IndexError()

    results = run_scenario(Scenario.make(mode="decode"), Wrapped)
    assert results[0].status == "wrong"
    assert "plan raised PluginError" in results[0].reason


def test_a_refusal_in_forward_comes_too_late():
    class Late(Meddler):
        def meddle(self, q, k, v, layer, options, result):
            raise ConfigError("too late")

    assert run_scenario(Scenario.make(mode="decode"), Late)[0].status == "wrong"


def test_swapped_fp8_scales_are_found():
    scenario = Scenario.make(mode="extend", seed=2, kv_dtype=torch.float8_e4m3fn, kv_scales=True, lengths=((4, 3),))
    swapped = altered(k_scale=lambda layer: layer.v_scale, v_scale=lambda layer: layer.k_scale)
    assert wrong(run_scenario(scenario, swapped))


def test_moving_a_scenario_changes_nothing():
    scenario = Scenario.make(mode="extend", overlay="window", hybrid=True, page_size=4, seed=9)
    moved = scenario.to("cpu")
    assert moved.steps[0].calls[0].q.data_ptr() != scenario.steps[0].calls[0].q.data_ptr()
    for one, two in zip(scenario.steps[0].calls, moved.steps[0].calls, strict=True):
        assert one.q.stride() == two.q.stride()
        assert one.k.stride() == two.k.stride()
    assert {result.status for result in run_scenario(moved, reference)} == {"equal"}
