"""What the options may say, and what is refused with which words."""

from __future__ import annotations

import pytest
import torch
from backends import backend, registry
from judge import streaming

from faback import AttentionBackend, AttentionLayer, BackendConfig, BatchError, ConfigError, ForwardBatch, Pools
from faback.pools import MHAPool
from faback.testing import Scenario, run_scenario

SHAPE = {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 8}


def layer(number, **more):
    return AttentionLayer(layer_id=number, **SHAPE, **more)


def build(model, **options):
    config = BackendConfig(
        context_len=16, dtype=torch.float32, options={"streaming-llm": {"sinks": 2, "window": 3} | options}
    )
    kept = [layer for layer in model if layer.cached]
    pools = Pools(req_to_token=torch.arange(32).view(2, 16), kv=MHAPool(num_pages=32, layers=kept, dtype=torch.float32))
    return AttentionBackend(config, pools, model, registry=registry(config))


def overlays(built, number):
    one = torch.tensor([1])
    lens = {"seq_lens": one, "encoder_lens": one}
    batch = ForwardBatch(forward_mode="decode", req_pool_indices=one, out_cache_loc=one, **lens)
    return [name.partition(" ")[0] for name in built.explain(batch, built.layers[number]).overlays]


@pytest.mark.parametrize("options", [{"sinks": -1}, {"sinks": None}, {"window": 2.0}, {"window": True}, {"wide": 3}])
def test_settings_that_mean_nothing(options):
    with pytest.raises(ConfigError, match=r"streaming-llm") as caught:
        build([layer(0)], **options)
    assert next(iter(options)) in str(caught.value)


@pytest.mark.parametrize("name", [7, "all", [0], None])
def test_layers_that_there_are_not(name):
    with pytest.raises(ConfigError, match="layers.*ids or kinds.*got"):
        build([layer(0)], layers=[name])


@pytest.mark.parametrize("more", [{"window": 3}, {"chunk": 4}, {"cross": True}, {"causal": False}])
def test_layers_that_are_something_else_cannot_be_named(more):
    layers = [layer(0), layer(1, **more)]
    for name in (1, layers[1].kind):
        with pytest.raises(ConfigError, match=r"without window or chunk: \[0\]"):
            build(layers, layers=[name])
    assert "streaming-llm" in overlays(build(layers), 0)
    assert "streaming-llm" not in overlays(build(layers), 1)


def test_a_model_without_such_layers_is_not_ignored():
    with pytest.raises(ConfigError, match="wanted a layer to vary"):
        build([layer(0, window=3), layer(1, causal=False)])


def test_layers_by_id_and_by_kind():
    layers = [layer(0, softcap=3.0), layer(1), layer(2, softcap=3.0), layer(3, softcap=5.0)]
    built = build(layers, layers=[1, layers[2].kind])
    assert ["streaming-llm" in overlays(built, number) for number in range(4)] == [True, True, True, False]
    assert ["streaming-llm" in overlays(build(layers), number) for number in range(4)] == [True] * 4


def test_layers_of_one_kind_go_together():
    with pytest.raises(ConfigError, match=r"also layers \[0, 2\].*got \[1\]"):
        build([layer(0), layer(1), layer(2)], layers=[1])


@pytest.mark.parametrize("topk", [2, 3])
@pytest.mark.parametrize("mode", ["target_verify", "draft_decode"])
def test_a_window_narrower_than_the_drafts_is_refused(mode, topk):
    sizes = {"topk": topk, "num_steps": 4, "num_draft_tokens": 4, "draft_step": 3}
    scenario = streaming(Scenario.make(mode=mode, page_size=4, batch_size=2, **sizes), 2, 2)
    results = run_scenario(scenario, backend("reference"))
    assert [result.status for result in results] == ["refused"]
    assert "a window over all 4 drafted tokens, got a window of 2" in results[0].reason


def test_keys_of_the_batch_that_are_not_the_beginning_are_refused():
    """A layer without a cache, in a pass that does not say that it brings its requests whole."""
    built = build([layer(0), layer(1, kv_group="none")])
    two = torch.tensor([2])
    lens = {"seq_lens": torch.tensor([6]), "extend_seq_lens": two}
    batch = ForwardBatch(forward_mode="extend", req_pool_indices=torch.tensor([1]), out_cache_loc=two.repeat(2), **lens)
    with pytest.raises(BatchError, match="counted from the first token"):
        built.plan(batch)
