"""Passes as vLLM makes them, every layer compared with plain attention over the true tokens."""

import pytest
import torch
from vllm_world import World, layer

SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
LAYERS = {
    "plain": {},
    "window": {"sliding_window": 5},
    "window of one": {"sliding_window": 1},
    "sinks": {"sinks": SINKS},
    "softcap": {"logits_soft_cap": 1.5},
    "all": {"sliding_window": 9, "sinks": SINKS, "logits_soft_cap": 3.0},
}


def everything():
    return [layer(f"model.layers.{name}.attn", **options) for name, options in LAYERS.items()]


@pytest.mark.parametrize("order", ["LBNHC", "LBHNC", "LHBNC", "apart"])
@pytest.mark.parametrize("block_size", [16, 1, 3, 32])
def test_a_life_of_requests(block_size, order):
    """Prompts in chunks, decoding, both together, drafts to verify, ragged ones, and a request with nothing new."""
    world = World(everything(), block_size=block_size, order=order)
    a, b, c = world.add(), world.add(), world.add()
    world.step([(a, 20)])
    world.step([(a, 1), (b, 7)])  # a decodes while b's first chunk runs
    world.step([(b, 1 + block_size), (a, 1), (c, 33)])
    world.step([(a, 1), (b, 1), (c, 1)])
    world.step([(c, 4), (a, 4), (b, 4)])
    world.step([(a, 3), (b, 1), (c, 5)])
    world.step([(a, 0), (b, 2)])


def test_multi_query_and_multi_head():
    world = World([layer("one", num_heads=6, num_kv_heads=1), layer("each", num_heads=6, num_kv_heads=6)][:1])
    a = world.add()
    world.step([(a, 9)])
    world.step([(a, 1)])
    world = World([layer("each", num_heads=3, num_kv_heads=3, head_size=24)])
    world.add()
    world.step([(0, 9)])
    world.step([(0, 1)])


def test_no_request_at_all():
    world = World(everything())
    world.add()
    world.step([])
    world.step([], padded=(2, 3))
    world.step([(0, 4)])


@pytest.mark.parametrize("order", ["LBNHC", "LBHNC"])
def test_padding(order):
    """Padded requests, padded tokens with slot -1, and rows that are not counted."""
    world = World(everything(), order=order)
    a, b = world.add(), world.add()
    world.step([(a, 5), (b, 17)], padded=(2, 0))
    world.step([(a, 1), (b, 1)], padded=(2, 2))
    world.step([(a, 1), (b, 1)], padded=(0, 3), extra=4)
    written = {number for table in world.tables for number in table}
    for one in world.layers:
        others = [number for number in range(1, world.blocks) if number not in written]
        assert one.kv_cache[others].isnan().all(), "padding went into somebody's block"


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, 2.0), ([0.5, 2.0], [4.0, 0.25])], ids=str)
@pytest.mark.parametrize("order", ["LBNHC", "LBHNC"])
def test_8_bit_caches(dtype, scales, order):
    options = {"kv_cache_dtype": dtype, "scales": scales}
    world = World([layer("a", **options), layer("b", sliding_window=4, **options)], order=order)
    a, b = world.add(), world.add()
    world.step([(a, 20), (b, 3)])
    world.step([(a, 1), (b, 6)])


def test_layers_that_share_a_cache():
    """The second writes nothing, and reads what the first wrote."""
    world = World([layer("first"), layer("second", kv_sharing_target_layer_name="first")])
    world.add()
    world.step([(0, 18)])
    world.step([(0, 1)])


def test_keys_that_are_in_the_cache_already():
    world = World([layer("a")])
    world.add()
    common = world.common([(0, 6)])
    metadata = world.builder.build(0, common)
    world.attend(metadata, common, [(0, 6)])
    one, q = world.layers[0], world.noise(6, 4, 16)
    out = torch.empty(6, 4, 16)
    one.impl.forward(one, q, None, None, one.kv_cache, metadata, out)
    torch.testing.assert_close(out, world.expected(one, q, [(0, 6)], True), atol=2e-5, rtol=0)


@pytest.mark.parametrize("block_size", [16, 3])
@pytest.mark.parametrize("blocks", [1, 2])
def test_a_prefix_in_common(block_size, blocks):
    """Blocks of the first request are the others', too; windowed layers do without the split."""
    world = World(everything(), block_size=block_size)
    a, b, c = world.add(), world.add(), world.add()
    shared = blocks * block_size
    world.step([(a, shared)])
    for other in (b, c):
        world.tables[other] = list(world.tables[a])
        world.texts[other] = dict(world.texts[a])
    world.step([(a, 4), (b, 1), (c, 9)], prefix=shared)
    world.step([(c, 1), (b, 1), (a, 1)], prefix=shared, padded=(2, 2))
    world.step([(c, 1)], prefix=shared)


def test_a_prefix_in_common_is_read_once():
    world = World([layer("plain"), layer("window", sliding_window=5)])
    a, b = world.add(), world.add()
    world.step([(a, 16)])
    world.tables[b], world.texts[b] = list(world.tables[a]), dict(world.texts[a])
    plan = world.builder.build(16, world.common([(a, 1), (b, 1)])).plan
    calls = [type(plan.steps[number].call).__name__ for number in (0, 1)]
    assert calls == ["Merged", "Call"]


def test_both_directions():
    """What vLLM's drafters of whole blocks ask for: `causal=False` over the cache, with a window to both sides."""
    world = World(everything())
    a, b = world.add(), world.add()
    world.step([(a, 20), (b, 3)])
    world.step([(a, 4), (b, 4)], causal=False)
    world.step([(a, 1), (b, 1)])


@pytest.mark.parametrize("attn_type", ["encoder_only", "encoder"])
def test_layers_without_a_cache(attn_type):
    options = {"attn_type": attn_type}
    world = World([layer("a", **options), layer("b", sliding_window=3, **options)])
    a, b = world.add(), world.add()
    for one in world.layers:
        one.kv_cache = torch.tensor([])
    world.step([(a, 9), (b, 4)], causal=False, extra=2)


def test_the_profiling_run_gets_zeros():
    one = layer("a")
    out = torch.full((3, 4, 16), 7.0)
    q, kv = torch.zeros(3, 4, 16), torch.zeros(3, 2, 16)
    assert not one.impl.forward(one, q, kv, kv, torch.tensor([]), None, out).any()


def test_batch_invariance(monkeypatch):
    """A request's result is bit-equal whatever else is in the batch."""
    from vllm import envs

    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    world = World([layer("a")])
    assert world.builder.passes(causal=True).backend.config.deterministic
    world.add(), world.add()
    world.step([(0, 20), (1, 3)])


def test_nothing_of_vllm_is_copied():
    """Cache, lengths, offsets, block table and slots are read where vLLM keeps them."""
    world = World([layer("a")])
    world.add()
    common = world.common([(0, 5)])
    metadata = world.builder.build(0, common)
    segment, ws = metadata.plan.steps[0].segment, metadata.plan.ws
    assert segment.cu_seqlens_q is common.query_start_loc and segment.kv_len is common.seq_lens
    assert segment.kv.req_to_token is common.block_table_tensor and segment.write.slots is common.slot_mapping
    assert not ws._made, "no metadata of its own"
    k, v = world.builder.passes(causal=True).pool.buffers(world.builder.passes(causal=True).layers["a"])
    storage = world.layers[0].kv_cache.untyped_storage().data_ptr()
    assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr() == storage
