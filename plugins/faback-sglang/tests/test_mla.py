"""Latent pools: absorbed attention in every mode, and prefill over keys expanded from latents, in SGLang's two ways."""

import pytest
import torch

sg = pytest.importorskip("sglang_here", exc_type=ImportError, reason="SGLang's modules are not importable here")

from rounds import STEPS, drafting, steps, verification  # noqa: E402
from world import HEADS, World, batch, causal, decode, extend, index  # noqa: E402

from faback_sglang.multi_step import FabackMultiStepBackend  # noqa: E402

LATENT, ROPE = 16, 8
ABSORBED = {"num_kv_heads": 1, "head_dim": LATENT + ROPE, "v_head_dim": LATENT, "scaling": 0.2}
WIDE, NARROW = 12, 10


@pytest.fixture
def world(served):
    return World([ABSORBED, ABSORBED], 4, mla=(LATENT, ROPE))


def test_a_life(world):
    backend = world.backend()
    a, b = world.text(), world.text()
    extend(world, backend, [a, b], [6, 3])
    extend(world, backend, [b, a], [2, 4])
    decode(world, backend, [a, b])


def test_rounds_of_speculation(topk):
    world = World([ABSORBED], 4, mla=(LATENT, ROPE))
    backend, texts = world.backend(), [world.text(), world.text()]
    extend(world, backend, texts, [6, 3])
    drafts = FabackMultiStepBackend(world.runner, topk, STEPS)
    fb, branches = drafting(world, texts, topk)
    drafts.init_forward_metadata(fb)
    steps(world, drafts, fb, branches, topk)
    fb, queries = verification(world, texts, topk)
    backend.init_forward_metadata(fb)
    world.attend(backend, fb, queries)


def test_queries_and_keys_in_two_parts(world):
    """SGLang brings the rotated parts apart where it can; the result is that of the fused ones."""
    backend, text = world.backend(), world.text()
    extend(world, backend, [text], [5])
    fb = batch(sg.ForwardMode.DECODE, [text], [6], world.grow(text, 1))
    backend.init_forward_metadata(fb)
    attn, q, k = world.model[0].attn, world.randn(1, HEADS, LATENT + ROPE), world.randn(1, 1, LATENT + ROPE)
    with sg.forward_context(sg.ForwardContext(attn_backend=backend), forward_batch=fb):
        latent, rotated = k[..., :LATENT].contiguous(), k[..., LATENT:].contiguous()
        apart = attn(q[..., :LATENT].flatten(1), latent, latent, fb, q_rope=q[..., LATENT:], k_rope=rotated)
        stored = world.pool.get_key_buffer(0)[text.slots[5]].clone()
        whole = attn(q.flatten(1), None, None, fb)
    torch.testing.assert_close(stored, k[0])
    torch.testing.assert_close(apart, whole)


def expanding(parts):
    """A world whose model also has layers over expanded keys, and a batch of two texts' last chunks.

    Args:
        parts: prefix and new tokens of each text.
    """
    world = World([ABSORBED], 4, mla=(LATENT, ROPE))
    attn = sg.RadixAttention(
        num_heads=HEADS, head_dim=WIDE, scaling=0.3, num_kv_heads=HEADS, layer_id=0, v_head_dim=NARROW
    )
    world.model.append(torch.nn.ModuleList([attn]))
    texts = [world.text(prefix) for prefix, _ in parts]
    news = [new for _, new in parts]
    slots = [slot for text, new in zip(texts, news, strict=True) for slot in world.grow(text, new)]
    prefix = [count for count, _ in parts]
    fb = batch(
        sg.ForwardMode.EXTEND, texts, [len(t.tokens) for t in texts], slots, extend_num_tokens=sum(news),
        extend_seq_lens=index(news), extend_seq_lens_cpu=news, extend_prefix_lens=index(prefix),
        extend_prefix_lens_cpu=prefix,
    )  # fmt: skip
    backend = world.backend()
    backend.init_forward_metadata(fb)
    for text in texts:
        for token in text.tokens:
            token.kv["k"], token.kv["v"] = world.randn(HEADS, WIDE), world.randn(HEADS, NARROW)
    return world, backend, attn, fb, texts


def stacked(tokens, name):
    return torch.stack([token.kv[name] for token in tokens])


def plain(q, queries, scale=0.3):
    """[tokens, heads, dim] and log-sum-exp over what each query sees."""
    outs, lses = [], []
    for row, query in zip(q.double(), queries, strict=True):
        scores = scale * torch.einsum("hd,khd->hk", row, stacked(query.seen, "k").double())
        outs.append(torch.einsum("hk,khd->hd", scores.softmax(1), stacked(query.seen, "v").double()))
        lses.append(scores.logsumexp(1))
    return torch.stack(outs).float(), torch.stack(lses).float()


PARTS = [(7, 3), (2, 4), (0, 5)]


def called(backend, attn, fb, q, k, v):
    with sg.forward_context(sg.ForwardContext(attn_backend=backend), forward_batch=fb):
        return attn(q.flatten(1), k, v, fb, save_kv_cache=False)


@pytest.mark.usefixtures("served")
def test_one_shot_prefill():
    world, backend, attn, fb, texts = expanding(PARTS)
    queries = [query for text, (_, new) in zip(texts, PARTS, strict=True) for query in causal(text, new)]
    every = [token for text in texts for token in text.tokens]
    q = world.randn(len(queries), HEADS, WIDE)
    fb.mha_one_shot, fb.attn_attend_prefix_cache, fb.mha_return_lse = True, False, False
    out = called(backend, attn, fb, q, stacked(every, "k"), stacked(every, "v"))
    torch.testing.assert_close(out, plain(q, queries)[0], atol=2e-5, rtol=1e-4)


@pytest.mark.usefixtures("served")
def test_prefill_in_chunks_of_the_prefix():
    """New tokens first, then the prefix in chunks of 4 tokens, merged as the model does."""
    world, backend, attn, fb, texts = expanding(PARTS)
    pairs = list(zip(texts, PARTS, strict=True))
    queries = [query for text, (_, new) in pairs for query in causal(text, new)]
    q = world.randn(len(queries), HEADS, WIDE)
    fb.mha_one_shot, fb.attn_attend_prefix_cache, fb.mha_return_lse = False, False, True
    new = [token for text, (_, count) in pairs for token in text.tokens[-count:]]
    found = [called(backend, attn, fb, q, stacked(new, "k"), stacked(new, "v"))]
    starts = index([[0] * 3, [4] * 3])
    lens = (fb.extend_prefix_lens - starts).clamp(0, 4)
    fb.prefix_chunk_starts, fb.prefix_chunk_seq_lens = starts.int(), lens.int()
    fb.attn_attend_prefix_cache = True
    for chunk in range(2):
        fb.set_prefix_chunk_idx(chunk)
        inside = [t for text, (n, _) in pairs for t in text.tokens[4 * chunk : min(n, 4 * chunk + 4)]]
        found.append(called(backend, attn, fb, q, stacked(inside, "k"), stacked(inside, "v")))
    whole = torch.stack([lse for _, lse in found]).logsumexp(0)
    merged = sum(out * (lse - whole).exp()[..., None] for out, lse in found)
    out, lse = plain(q, queries)
    torch.testing.assert_close(merged, out, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(whole, lse, atol=2e-5, rtol=1e-4)


@pytest.mark.usefixtures("served")
def test_models_choose_between_absorbed_and_expanded_as_with_flash_attention():
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
        handle_attention_fa3,
    )

    expanding(PARTS)
    assert AttentionBackendRegistry.get_handler("faback") is handle_attention_fa3
