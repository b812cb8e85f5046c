"""The attention function and the description of layers."""

from __future__ import annotations

import pytest
import torch

from faback import BatchError, ConfigError, FabackError
from faback_transformers import attending, layers_of
from faback_transformers.attention import attention
from faback_transformers.layers import Recorder


def test_layers_say_what_they_are(models):
    layers = layers_of(models("gemma3"))
    assert sorted(layers) == [0, 1, 2]
    assert [layers[i].window for i in range(3)] == [8, None, 8]  # a width of 9 counts the query itself
    assert {(x.num_q_heads, x.num_kv_heads, x.head_dim, x.v_head_dim) for x in layers.values()} == {(4, 1, 16, 16)}
    assert layers[0].scale == pytest.approx(24**-0.5)
    assert not layers[0].sinks
    capped = layers_of(models("gemma2"))[0]
    assert capped.softcap == 2.0
    sinking = layers_of(models("gpt_oss"))[0]
    assert (sinking.sinks, sinking.window) == (True, 8)


def test_asking_leaves_the_model_as_it_was(models):
    model = models("llama")
    model.set_attn_implementation("sdpa")
    layers_of(model)
    assert model.config._attn_implementation == "sdpa"


def test_outside_a_generator_it_says_what_to_do(models):
    model = models("llama")
    with attending(model), pytest.raises(FabackError, match=r"PagedGenerator.*sdpa"):
        model(input_ids=torch.tensor([[1, 2]]))


def test_batches_must_be_packed(models):
    model = models("llama")
    with attending(model), pytest.raises(BatchError, match="Pack the requests"):
        model(input_ids=torch.tensor([[1, 2], [3, 4]]), faback_context=Recorder(), use_cache=False)


class Module(torch.nn.Module):
    """An attention module with a configuration."""

    def __init__(self, index=0, **config):
        super().__init__()
        self.layer_idx, self.is_causal = index, True
        self.config = type("Config", (), config)()


def described(module, **options):
    recorder, x = Recorder(), torch.zeros(1, 2, 3, 4)
    attention(module, x, x, x, None, faback_context=recorder, **options)
    return recorder.layers[0]


def test_configuration_fills_what_the_call_leaves_out():
    assert described(Module(layer_types=["chunked_attention"], attention_chunk_size=6)).chunk == 6
    assert described(Module(layer_types=["sliding_attention"], sliding_window=6)).window == 5
    assert described(Module(), sliding_window=6).window == 5


def test_what_cannot_be_described_is_refused():
    with pytest.raises(ConfigError, match="layer_types"):
        described(Module(layer_types=["full_attention"]), sliding_window=6)
    with pytest.raises(ConfigError, match="position_bias"):
        described(Module(), position_bias=torch.zeros(1))
    with pytest.raises(ConfigError, match="layer_idx"):
        described(Module(None))
