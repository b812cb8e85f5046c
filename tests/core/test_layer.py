"""Layer descriptions: what makes two layers one kind, and what is refused."""

import pytest
import torch

from faback import AttentionLayer, ConfigError, LayerKind

KIND = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16}


def test_defaults_follow_the_key_head_dim(layer):
    made = layer(head_dim=192, v_head_dim=128)
    assert made.scale == pytest.approx(192**-0.5)
    assert layer(head_dim=80).v_head_dim == 80
    assert layer(scale=0.5).scale == 0.5
    assert layer(num_q_heads=6, num_kv_heads=2).group_size == 3


def test_equal_descriptions_are_one_kind(layer):
    assert layer(0, window=4).kind == layer(1, window=4).kind
    assert hash(layer(0, window=4).kind) == hash(layer(1, window=4).kind)
    assert layer(0) != layer(1)
    assert type(layer(0).kind) is LayerKind
    assert layer(0).kind == LayerKind(**{**KIND, "head_dim": 8})


@pytest.mark.parametrize(
    "change",
    [
        {"num_q_heads": 8},
        {"num_kv_heads": 4},
        {"head_dim": 32},
        {"v_head_dim": 8},
        {"scale": 0.1},
        {"softcap": 30.0},
        {"window": 4},
        {"window": 0},
        {"chunk": 4},
        {"causal": False},
        {"cross": True},
        {"sinks": True},
        {"kv_scales": True},
        {"kv_group": "swa"},
    ],
)
def test_each_field_tells_kinds_apart(change):
    assert LayerKind(**KIND) != LayerKind(**{**KIND, **change})
    assert len({LayerKind(**KIND), LayerKind(**{**KIND, **change}), LayerKind(**KIND)}) == 2


def test_scales_are_a_flag_of_the_kind_and_a_value_of_the_layer(layer):
    plain, scaled = layer(0), layer(0, k_scale=0.5)
    assert not plain.kind.kv_scales
    assert scaled.kind.kv_scales and scaled.kind != plain.kind
    assert layer(1, v_scale=torch.ones(2)).kind == scaled.kind
    assert not layer(0, kv_scales=True).kv_scales


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scale_per_kv_head(layer, name):
    layer(**{name: torch.ones(1)})
    layer(**{name: torch.ones(2)})
    with pytest.raises(ConfigError, match=rf"layer.{name}.*KV head \(2\), got \(4,\)"):
        layer(**{name: torch.ones(4)})


@pytest.mark.parametrize("name", ["num_q_heads", "num_kv_heads", "v_head_dim", "chunk"])
@pytest.mark.parametrize("value", [0, -2, 1.5, "4", True])
def test_sizes_are_positive_integers(layer, name, value):
    with pytest.raises(ConfigError, match=f"layer.{name}: wanted a positive integer"):
        layer(**{name: value})


@pytest.mark.parametrize(
    "value",
    [
        0,
        -8,
        8.0,
        "8",
    ],
)
def test_head_dim_is_a_positive_integer(layer, value):
    with pytest.raises(ConfigError, match="layer.head_dim"):
        layer(head_dim=value)


@pytest.mark.parametrize("value", [-1, 1.5, "4"])
def test_window(layer, value):
    with pytest.raises(ConfigError, match="layer.window.*None means no limit"):
        layer(window=value)


def test_heads_divide(layer):
    with pytest.raises(ConfigError, match="layer.num_q_heads: wanted a multiple of num_kv_heads=3"):
        layer(num_q_heads=4, num_kv_heads=3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("softcap", -1.0),
        ("softcap", None),
        ("softcap", float("nan")),
        ("scale", None),
        ("scale", float("nan")),
        ("k_scale", 0.0),
        ("v_scale", float("inf")),
    ],
)
def test_factors(layer, name, value):
    with pytest.raises(ConfigError, match=f"layer.{name}"):
        layer(**{name: value})


def test_features():
    assert LayerKind(**KIND).features() == frozenset()
    everything = LayerKind(**KIND, softcap=1.0, sinks=True, kv_scales=True, window=0, chunk=4, causal=False)
    assert everything.features() == {"softcap", "sinks", "kv_scales", "window", "chunk", "non_causal"}
    assert LayerKind(**KIND, cross=True, window=3, chunk=4).features() == {"non_causal"}


def test_layer_id_is_required():
    with pytest.raises(TypeError, match="layer_id"):
        AttentionLayer(**KIND)
