"""Backends that vLLM derives from ours, and its own `Attention` module: only where vLLM itself is installed."""

from __future__ import annotations

import pytest
import torch
import vllm_here
from vllm_world import World, layer

from faback_vllm.backend import FabackAttentionBackend

pytestmark = pytest.mark.skipif(not vllm_here.REAL, reason="vLLM is not installed here: these are its own classes")


def derived(world, backend):
    """The world with a builder and impls of another backend."""
    old = world.builder
    world.builder = backend.get_builder_cls()(old.kv_cache_spec, old.layer_names, old.vllm_config, old.device)
    for one in world.layers:
        one.impl.__class__ = backend.get_impl_cls()
    return world


def test_encoder_only():
    from vllm.model_executor.layers.attention.encoder_only_attention import create_encoder_only_attention_backend

    world = World([layer("a", attn_type="encoder_only"), layer("b", attn_type="encoder_only", sliding_window=3)])
    derived(world, create_encoder_only_attention_backend(FabackAttentionBackend))
    a, b = world.add(), world.add()
    common = world.common([(a, 9), (b, 4)])
    metadata = world.builder.build(0, common)
    common.causal = False
    world.attend(metadata, common, [(a, 9), (b, 4)])


def test_cross_attention():
    """The encoder's keys are written once, by the slots that vLLM works out, and seen by all later tokens."""
    import numpy as np
    from vllm.model_executor.layers.attention.cross_attention import create_cross_attention_backend

    world = World([layer("cross", attn_type="encoder_decoder")], block_size=4)
    derived(world, create_cross_attention_backend(FabackAttentionBackend))
    one, encoders = world.layers[0], [11, 6]
    for length in encoders:
        world.tables.append([world.free.pop() for _ in range(-(-length // 4))])
    blocks = torch.zeros(2, 5, dtype=torch.int32)
    for row, table in enumerate(world.tables):
        blocks[row, : len(table)] = torch.tensor(table, dtype=torch.int32)
    texts = [(world.noise(n, 2, 16), world.noise(n, 2, 16)) for n in encoders]

    def run(queries, lens, key, value):
        offsets = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        world.texts = [{"cross": (world.noise(n, 2, 16), world.noise(n, 2, 16))} for n in lens]
        world.tables = [[], []]
        common = world.common([(0, 0), (1, 0)])
        common.query_start_loc, common.query_start_loc_cpu = offsets, offsets.clone()
        common.num_actual_tokens, common.max_query_len = sum(queries), max(queries)
        common.seq_lens_cpu_upper_bound = torch.tensor(lens, dtype=torch.int32)
        common.seq_lens = common.seq_lens_cpu_upper_bound.clone()
        common.encoder_seq_lens = torch.tensor(encoders, dtype=torch.int32)
        common.encoder_seq_lens_cpu = np.array(encoders, dtype=np.int32)
        common.block_table_tensor = blocks
        common.slot_mapping = torch.full((sum(queries),), -1)
        metadata = world.builder.build(0, common)
        q, out = world.noise(sum(queries), 4, 16), torch.empty(sum(queries), 4, 16)
        one.impl.forward(one, q, key, value, one.kv_cache, metadata, out)
        world.texts = [{"cross": text} for text in texts]
        for row, (begin, count) in enumerate(zip(offsets.tolist(), queries, strict=False)):
            for j in range(begin, begin + count):
                wanted = world.one_query(one, q[j], *texts[row])
                torch.testing.assert_close(out[j], wanted, atol=2e-5, rtol=0)

    key, value = (torch.cat([text[i] for text in texts]) for i in (0, 1))
    run([3, 2], [3, 2], key, value)
    run([1, 1], [4, 3], None, None)


def test_chunked_local_attention(monkeypatch):
    """vLLM cuts requests at chunk borders itself, and hands over block tables of the pieces."""
    from vllm.model_executor.layers.attention.chunked_local_attention import create_chunked_local_attention_backend

    monkeypatch.setattr("vllm.utils.torch_utils.PIN_MEMORY", False)  # needs a GPU
    world = World([layer("local")], block_size=4)
    derived(world, create_chunked_local_attention_backend(FabackAttentionBackend, 8))
    world.builder.kv_cache_spec.attention_chunk_size = 8

    def in_chunk(one, q, new, causal, plain=world.one_query):
        found, begin = [], 0
        for request, count in new:
            k, v = world.texts[request][one.layer_name]
            for j in range(count):
                p = k.shape[0] - count + j
                seen = slice(p // 8 * 8, p + 1)
                found.append(plain(one, q[begin + j], k[seen], v[seen]))
            begin += count
        return torch.stack(found)

    world.expected = in_chunk
    a, b = world.add(), world.add()
    for new in ([(a, 20), (b, 3)], [(a, 1), (b, 7)], [(b, 1), (a, 5)]):
        common = world.common(new)
        common.seq_lens_cpu_upper_bound = common.seq_lens.clone()
        common.block_table_tensor[common.block_table_tensor == 1 << 30] = 0
        world.attend(world.builder.build(0, common), common, new)


def test_fast_prefill_of_layers_that_share_a_cache():
    """vLLM copies the metadata's fields into a class of its own; only the last token of each prompt is asked about."""
    from vllm.v1.attention.backends.utils import create_fast_prefill_custom_backend

    world = World([layer("first")])
    plain = world.builder
    derived(world, create_fast_prefill_custom_backend("FastPrefill", FabackAttentionBackend))
    a, b = world.add(), world.add()
    common = world.common([(a, 9), (b, 4)])
    world.attend(plain.build(0, common), common, [(a, 9), (b, 4)])
    one = world.layers[0]
    common.logits_indices_padded = torch.tensor([8, 12])
    common.num_logits_indices, common.max_logits_per_req = 2, 1
    metadata = world.builder.build(0, common)
    assert type(metadata).__name__ == "KVSharingFastPrefillAttentionMetadata"
    q, out = world.noise(2, 4, 16), torch.empty(2, 4, 16)
    one.impl.forward(one, q, None, None, one.kv_cache, metadata, out)
    for row, request in enumerate((a, b)):
        wanted = world.one_query(one, q[row], *world.texts[request]["first"])
        torch.testing.assert_close(out[row], wanted, atol=2e-5, rtol=0)


def test_vllms_attention_module():
    """Layer, custom operators and forward context are vLLM's; it makes the impl, and calls it."""
    from vllm.config import CacheConfig, DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from faback_vllm import register

    register()
    vllm_config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    cache = CacheConfig(block_size=16)
    with set_current_vllm_config(vllm_config):
        real = Attention(
            4, 16, 0.25, num_kv_heads=2, cache_config=cache, prefix="model.layers.0.attn",
            attn_backend=FabackAttentionBackend,
        )  # fmt: skip
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=16, dtype=torch.float32)
    world = World([layer("model.layers.0.attn")])
    world.builder.kv_cache_spec = spec
    real.kv_cache = world.layers[0].kv_cache
    a, b = world.add(), world.add()
    for new in ([(a, 20), (b, 3)], [(a, 1), (b, 1)]):
        common = world.common(new)
        metadata = world.builder.build(0, common)
        tokens = common.num_actual_tokens
        q, k, v = (world.noise(tokens, heads * 16) for heads in (4, 2, 2))
        slots = {real.layer_name: common.slot_mapping}
        with set_forward_context({real.layer_name: metadata}, vllm_config, num_tokens=tokens, slot_mapping=slots):
            out = real(q, k, v)
        begin = 0
        for request, count in new:
            for name, (old_k, old_v) in world.texts[request].items():
                more = (x.view(-1, 2, 16)[begin : begin + count] for x in (k, v))
                world.texts[request][name] = tuple(torch.cat(pair) for pair in zip((old_k, old_v), more, strict=True))
            begin += count
        wanted = world.expected(world.layers[0], q.view(-1, 4, 16), new, True)
        torch.testing.assert_close(out.view(-1, 4, 16), wanted, atol=2e-5, rtol=0)
