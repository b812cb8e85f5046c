"""With `deterministic=True`, on the reference kernel: a token's answer is one and the same bit pattern, always."""

from __future__ import annotations

import attrs
import pytest
import torch

from core.plugins import Point, plugin
from determinism.texts import Texts
from faback import AttentionBackend, AttentionLayer, BackendConfig, NoKernelError
from faback.core.files import write_json
from faback.core.measured import VARIABLE
from faback.kernels.reference import Reference
from faback.testing.late import Replayed
from graphs.test_simulated import registry

SHAPE = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 24}
LAYERS = (
    AttentionLayer(layer_id=0, **SHAPE),
    AttentionLayer(layer_id=1, window=20, **SHAPE),
    AttentionLayer(layer_id=2, chunk=16, softcap=5.0, **SHAPE),
)
TEXTS = Texts([150, 9, 61, 33], LAYERS)
WAYS = {
    "in chunks": TEXTS.chunked([13, 1, 40]),
    "token by token": TEXTS.decoded([1, 1, 1, 1], seed=1),
    "together": TEXTS.together(seed=2),
    "together, mixed": TEXTS.together(seed=3, mode="mixed"),
    "prompts, then decode": TEXTS.decoded([100, 3, 60, 8], seed=4),
}


def eager(config, pools, layers, **changes):
    config = attrs.evolve(config, kernels="reference")
    return AttentionBackend(config, pools, layers, registry=registry(config))


def replayed(config, pools, layers):
    config = attrs.evolve(config, kernels="late reference")
    return Replayed(config, pools, layers, registry(config))


@pytest.fixture(scope="module")
def whole():
    return TEXTS.run(eager, TEXTS.whole())


@pytest.mark.parametrize("make", [eager, replayed])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_same_bits(whole, way, make):
    assert TEXTS.same(whole, TEXTS.run(make, WAYS[way], seed=7)) == []


def test_without_the_flag_bits_differ(whole):
    """Or the tests above would test nothing."""

    def careless(config, pools, layers):
        return eager(attrs.evolve(config, deterministic=False), pools, layers)

    assert TEXTS.same(whole, TEXTS.run(careless, WAYS["together"])) != []


def test_latent_layers_and_8_bit_caches():
    latent = AttentionLayer(layer_id=0, num_q_heads=4, num_kv_heads=1, head_dim=40, v_head_dim=32, latent=True)
    for layers, dtypes in (((latent,), {}), (LAYERS[:2], {"dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn})):
        texts = Texts([50, 9], layers, **dtypes)
        wanted = texts.run(eager, texts.whole())
        assert texts.same(wanted, texts.run(eager, texts.chunked([7, 30]))) == []
        assert texts.same(wanted, texts.run(eager, texts.together(seed=5))) == []


class Few(Reference):
    """Said to be the fastest for one row."""

    name = "few"


class Many(Reference):
    """Said to be the fastest for many."""

    name = "many"


@pytest.mark.parametrize(("deterministic", "names"), [(True, ["few", "few"]), (False, ["few", "many"])])
def test_kernels_are_not_chosen_by_sizes(world, layer, monkeypatch, tmp_path, deterministic, names):
    """A batch of another size would otherwise come to another kernel."""
    shape = {"queries": 1, "keys": 32, "traits": []}
    points = [
        {**shape, "rows": 1, "figures": {"few": 1.0, "many": 2.0}},
        {**shape, "rows": 32, "figures": {"few": 2.0, "many": 1.0}},
    ]
    write_json(tmp_path / "table.json", {"points": points})
    monkeypatch.setenv(VARIABLE, str(tmp_path / "table.json"))
    plugins = [Point("p", plugin(faback_kernels=[Few(), Many()]))]
    chosen = []
    for rows in (1, 32):
        made = world([layer()], [30] * rows, [1] * rows, points=plugins, deterministic=deterministic)
        chosen.append(made.backend.plan(made.batch("decode")).steps[0].call.kernel.name)
    assert chosen == names


def test_a_kernel_that_does_not_promise_it_is_not_asked(world, layer):
    with pytest.raises(NoKernelError, match="deterministic"):
        config = BackendConfig(context_len=8, kernels="poor", deterministic=True)
        made = world([layer()], [3], [1])
        AttentionBackend(config, made.pools, [layer()], registry=registry(config))
