"""What the kernel does not claim is refused, each with its reason; nothing else is taken in its place."""

from __future__ import annotations

import attrs
import pytest
import torch
from backends import registry

from faback import AttentionBackend, ConfigError, NoKernelError
from faback.core.kernel import KernelRequest
from faback.testing import MODES, Scenario, run_scenario
from faback_sdpa import Sdpa

CPU = torch.device("cpu")
REFUSED = {
    "sinks": ({"sinks": True}, "sinks (a logit per head in the denominator)", "returns no log-sum-exp"),
    "softcap": ({"softcap": True}, "softcap (tanh cap on the scores)", "kernel 'reference' does it"),
    "wide cache": (
        {"dtype": torch.bfloat16, "kv_dtype": torch.float32},
        "dtypes: wanted torch.bfloat16 queries on torch.float32 keys",
        "keys would lose digits",
    ),
}


def pinned(config, pools, layers, kernels="sdpa", **more):
    config = attrs.evolve(config, kernels=kernels, **more)
    return AttentionBackend(config, pools, layers, registry=registry(config))


def ask(*features, **changes):
    base = {"forward_mode": "decode", "device": "cpu", "arch": 0, "q_dtype": torch.float32, "kv_dtype": torch.float32}
    sizes = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "v_head_dim": 64, "page_size": 1}
    return KernelRequest(**{**base, **sizes, "features": frozenset(features), **changes})


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("mode", MODES)
def test_refused_with_its_reason_and_a_hint(mode, name):
    fields, reason, hint = REFUSED[name]
    scenario = Scenario.make(mode=mode, page_size=4, seed=1, **fields)
    if mode == "embedding" and name == "wide cache":  # drawn with a cache: one without has keys in the dtype of q
        scenario = next(s for s in embeddings(fields) if s.layers[0].cached)
    [result] = run_scenario(scenario, pinned)
    assert result.status == "refused"
    assert f"sdpa: {reason}" in result.reason or f"sdpa: feature: wanted {reason}" in result.reason
    assert hint in result.reason
    assert "pins this kernel" in result.reason


def embeddings(fields):
    return (Scenario.make(mode="embedding", page_size=4, seed=seed, **fields) for seed in range(50))


def test_the_log_sum_exp_is_refused_when_the_pass_is_planned_and_when_it_runs():
    scenario = Scenario.make(mode="decode", seed=1)
    made, step = pinned(scenario.config, scenario.pools(), scenario.layers), scenario.steps[0]
    with pytest.raises(NoKernelError, match="lse .*so nothing can be merged with its results"):
        made.plan(step.batch, return_lse=True)
    made.plan(step.batch)
    call = step.calls[0]
    with pytest.raises(Exception, match="a kernel that returns its log-sum-exp"):
        made.forward(call.q, call.k, call.v, call.layer, return_lse=True)


def test_determinism_is_refused():
    scenario = Scenario.make(mode="decode")
    with pytest.raises(NoKernelError, match="deterministic.*sums depend on the longest row"):
        pinned(scenario.config, scenario.pools(), scenario.layers, deterministic=True)


@pytest.mark.parametrize("feature", ["lse", "sinks", "softcap", "deterministic", "tail", "tree", "tail_only", "mine"])
def test_features_that_are_not_claimed(feature):
    [reason] = Sdpa().reject(ask(feature), CPU)
    assert (reason.kernel, reason.aspect) == ("sdpa", "feature")
    assert reason.wanted.startswith(f"{feature} (")
    assert bool(reason.hint) == (feature in ("lse", "sinks", "softcap", "deterministic"))


@pytest.mark.parametrize(
    ("q_dtype", "kv_dtype", "aspects"),
    [
        (torch.float32, torch.bfloat16, []),
        (torch.float32, torch.float16, []),
        (torch.float16, torch.float8_e5m2, []),
        (torch.bfloat16, torch.float8_e4m3fn, []),
        (torch.float16, torch.bfloat16, ["dtypes"]),
        (torch.bfloat16, torch.float16, ["dtypes"]),
        (torch.bfloat16, torch.float32, ["dtypes"]),
        (torch.float64, torch.float32, ["q dtype"]),
        (torch.float32, torch.float64, ["kv dtype"]),
    ],
)
def test_dtypes(q_dtype, kv_dtype, aspects):
    reasons = Sdpa().reject(ask(q_dtype=q_dtype, kv_dtype=kv_dtype), CPU)
    assert [reason.aspect for reason in reasons] == aspects


def test_devices():
    assert Sdpa().probe(CPU) is None
    assert Sdpa().probe(torch.device("cuda")) is None
    assert "not meta" in Sdpa().probe(torch.device("meta"))
    assert [reason.aspect for reason in Sdpa().reject(ask(device="meta"), CPU)] == ["device"]


@pytest.mark.parametrize("by", ["config", "mode", "layer"])
def test_a_pinned_kernel_is_not_replaced(by):
    """Kernel 'reference' is there and could; it is not asked."""
    scenario = Scenario.make(mode="decode", softcap=True)
    layers, kernels = scenario.layers, {"config": "sdpa", "mode": {"decode": "sdpa"}, "layer": "auto"}[by]
    if by == "layer":
        layers = tuple(attrs.evolve(layer, kernel="sdpa") for layer in layers)
    with pytest.raises(NoKernelError) as caught:
        pinned(scenario.config, scenario.pools(), layers, kernels).plan(scenario.steps[0].batch)
    assert {reason.partition(":")[0] for reason in caught.value.reasons} == {"sdpa"}
    free = pinned(scenario.config, scenario.pools(), scenario.layers, "auto")
    assert free.explain(scenario.steps[0].batch, scenario.layers[0]).kernel == "reference"


@pytest.mark.parametrize("overlay", ["full", "window", "local", "mla"])
@pytest.mark.parametrize("mode", MODES)
def test_no_other_kernel_has_a_part_in_it(mode, overlay):
    more = {"topk": 2} if mode in ("target_verify", "draft_decode") else {}
    scenario = Scenario.make(mode=mode, overlay=overlay, page_size=4, **more)
    made = pinned(scenario.config, scenario.pools(), scenario.layers)
    explained = [made.explain(step.batch, layer) for step in scenario.steps for layer in scenario.layers]
    assert {name for found in explained for route in found.routes for name in route.kernels()} == {"sdpa"}


def test_lowerings_go_with_it():
    """A tree is compacted for the kernel; a cascade, which would have to be merged, is not taken."""
    scenario = Scenario.make(mode="target_verify", topk=2, seed=1)
    made = pinned(scenario.config, scenario.pools(), scenario.layers)
    assert made.explain(scenario.steps[0].batch, scenario.layers[0]).kernel == "compact(sdpa)"


def test_settings_that_nobody_reads_are_refused():
    scenario = Scenario.make(mode="decode")
    with pytest.raises(ConfigError, match="options.*sdpa.*kernels='sdpa'"):
        pinned(scenario.config, scenario.pools(), scenario.layers, options={"sdpa": {"fast": True}})
