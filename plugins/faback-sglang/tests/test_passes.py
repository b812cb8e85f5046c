"""Passes of a target model on SGLang's own batches and pools, against plain torch over the true tokens."""

import pytest
import torch

sg = pytest.importorskip("sglang_here", exc_type=ImportError, reason="SGLang's modules are not importable here")

from world import HEADS, Query, World, batch, causal, decode, extend, index  # noqa: E402

MIXED_LAYERS = [{}, {"sliding_window_size": 5}, {"logit_cap": 3.0}, {"sinks": True}, {"sliding_window_size": 0}]


pytestmark = pytest.mark.usefixtures("served")


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_life(page_size, hybrid):
    """Prefill, chunks, decode rows among them, decoding, with every kind of layer."""
    world = World(MIXED_LAYERS, page_size, hybrid)
    backend = world.backend()
    a, b, c = (world.text() for _ in range(3))
    extend(world, backend, [a, b], [9, 3])
    extend(world, backend, [a, c, b], [4, 6, 2])
    decode(world, backend, [c, a])
    extend(world, backend, [b, a, c], [5, 1, 1], mode=sg.ForwardMode.MIXED)
    decode(world, backend, [a, b, c])


def test_idle_passes_need_nothing_and_leave_nothing():
    world = World([{}])
    backend = world.backend()
    a = world.text()
    extend(world, backend, [a], [3])
    fb = batch(sg.ForwardMode.IDLE, [], [], [])
    backend.init_forward_metadata(fb)
    with sg.forward_context(sg.ForwardContext(attn_backend=backend), forward_batch=fb):
        assert world.model[0].attn(torch.zeros(0, HEADS * 16), None, None, fb).shape == (0, HEADS * 16)
    decode(world, backend, [a])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_pools_with_scales(dtype):
    layers = [{"k_scale": 0.5, "v_scale": 2.0}, {}, {"k_scale": torch.tensor([0.25]), "v_scale": torch.tensor(1.5)}]
    world = World(layers, 4, dtype=dtype)
    backend = world.backend()
    a, b = world.text(), world.text()
    extend(world, backend, [a, b], [7, 3])
    decode(world, backend, [a, b])


def test_scales_of_a_pool_that_is_not_fp8_are_not_applied():
    """As in SGLang, which divides by them only where it casts."""
    world = World([{"k_scale": 0.5, "v_scale": 2.0}])
    assert world.backend().setup.layers.distinct[0].k_scale is None


def test_cross_attention():
    world = World([{}, {"is_cross_attention": True}], 4)
    backend = world.backend()
    a, b = world.text(encoder=6), world.text(encoder=3)
    extend(world, backend, [a, b], [5, 2])
    decode(world, backend, [b, a])


def test_encoder_only_layers_see_both_ways():
    world = World([{"attn_type": sg.AttentionType.ENCODER_ONLY}])
    backend = world.backend()
    text = world.text()
    fb = batch(
        sg.ForwardMode.EXTEND, [text], [4], world.grow(text, 4), extend_num_tokens=4, extend_seq_lens=index([4]),
        extend_seq_lens_cpu=[4], extend_prefix_lens=index([0]), extend_prefix_lens_cpu=[0],
    )  # fmt: skip
    backend.init_forward_metadata(fb)
    world.attend(backend, fb, [Query(token, tuple(text.tokens)) for token in text.tokens])


def test_embedding_servers_write_no_cache():
    options = {"is_embedding": True, "chunked_prefill_size": -1, "disable_radix_cache": True}
    with sg.get_context().override_server_args(**options):
        world = World([{}])
        backend = world.backend()
        extend(world, backend, [world.text(), world.text()], [4, 3])
    assert world.pool.k_buffer[0][1:].isnan().all()


def test_prefill_and_decode_may_be_served_apart():
    """`--prefill-attention-backend faback --decode-attention-backend faback`, through SGLang's own hybrid backend."""
    world = World([{}, {"sliding_window_size": 3}])
    backend = sg.HybridAttnBackend(world.runner, world.backend(), world.backend())
    a = world.text()
    extend(world, backend, [a], [6])
    decode(world, backend, [a])


def test_padding_behind_the_tokens_is_not_written():
    """Piecewise graphs pad q, k and v; SGLang's slots for padding are 0."""
    world = World([{}])
    backend = world.backend()
    text = world.text()
    fb = batch(
        sg.ForwardMode.EXTEND, [text], [3], [*world.grow(text, 3), 0, 0], extend_num_tokens=3,
        extend_seq_lens=index([3]), extend_seq_lens_cpu=[3], extend_prefix_lens=index([0]), extend_prefix_lens_cpu=[0],
    )  # fmt: skip
    backend.init_forward_metadata(fb)
    world.attend(backend, fb, causal(text, 3), padding=2)
    fb._attn_output = torch.full((5, HEADS * 16), 7.0)
    world.attend(backend, fb, causal(text, 3), padding=2)
    assert not fb._attn_output[3:].any()


@pytest.mark.parametrize("page_size", [1, 4])
def test_local_attention(page_size):
    """Layers of Llama 4 that see their own chunk, next to one that sees all."""
    world = World([{"use_irope": True}, {}], page_size)
    world.runner.model_config.is_local_attention_model, world.runner.attention_chunk_size = True, 6
    world.sees = lambda attn, query, key: not attn.use_irope or query.position // 6 == key.position // 6
    backend = world.backend()
    a, b = world.text(), world.text()
    extend(world, backend, [a, b], [10, 5])
    extend(world, backend, [b, a], [3, 6])
    decode(world, backend, [a, b])


def test_prefill_aware_windows():
    """A prompt stays in sight of sliding layers; there the window counts the token itself, as in SGLang."""
    world = World([{"sliding_window_size": 4}, {}])
    world.runner.prefill_aware_swa = True
    prompts = {}

    def sees(attn, query, key):
        window, prompt = attn.sliding_window_size, prompts.get(id(query))
        if window < 0 or (key.position >= query.position - window and prompt is None):
            return True
        return prompt is not None and (key.position < prompt or key.position > query.position - window)

    world.sees = sees
    backend = world.backend()
    a, b = world.text(), world.text()
    extend(world, backend, [a, b], [9, 3])
    for _ in range(6):
        for text, prompt in ((a, 9), (b, 3)):
            slot = world.grow(text, 1)
            prompts[id(text.tokens[-1])] = prompt
            fb = batch(sg.ForwardMode.DECODE, [text], [len(text.tokens)], slot)
            backend.init_forward_metadata(fb)
            world.attend(backend, fb, causal(text, 1))
