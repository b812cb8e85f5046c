"""With `deterministic=True`, at the sizes of real models: a token's answer is one bit pattern, however it is served."""

from __future__ import annotations

import random

import attrs
import pytest
import torch

from determinism.texts import Texts
from faback import AttentionLayer
from gpu.marks import on_gpu
from gpu.recording import Recording
from gpu.test_matrix import on_triton

pytestmark = on_gpu

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
GQA = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}
MLA = {"num_q_heads": 16, "num_kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "latent": True}
LENGTHS = [10_000, 4097, 4096, 1, 77, 2500, *(random.Random(1).randint(1, 1500) for _ in range(34))]
"""Some have several splits of 4096 keys, most have one."""

MODELS = {
    "full": Texts(LENGTHS, [AttentionLayer(layer_id=0, **GQA)], BF16, page_size=16, device="cuda"),
    "window": Texts(LENGTHS, [AttentionLayer(layer_id=0, window=1000, **GQA)], BF16, page_size=16, device="cuda"),
    "chunk": Texts(LENGTHS, [AttentionLayer(layer_id=0, chunk=2048, softcap=30.0, **GQA)], BF16, device="cuda"),
    "e4m3": Texts(LENGTHS, [AttentionLayer(layer_id=0, **GQA)], BF16, E4M3, page_size=16, device="cuda"),
    "mla": Texts(LENGTHS, [AttentionLayer(layer_id=0, **MLA)], BF16, page_size=64, device="cuda"),
}


@pytest.fixture(params=MODELS)
def texts(request):
    """Their tensors are large: none outlives its test."""
    yield MODELS[request.param]
    MODELS[request.param]._tensors.clear()
    torch.cuda.empty_cache()


def recorded(config, pools, layers):
    return Recording(on_triton(config, pools, layers))


def test_every_way_gives_the_same_bits(texts):
    whole = texts.run(on_triton, texts.whole())
    ways = {
        "in chunks": texts.chunked([2048, 1000, 17]),
        "together": texts.together(seed=2, longest=3000),
        "together, mixed": texts.together(seed=3, mode="mixed", longest=3000),
        "prompts, then decode": texts.decoded([max(1, n - 20) for n in texts.lens], seed=4),
    }
    found = {name: texts.same(whole, texts.run(on_triton, way, seed=7)) for name, way in ways.items()}
    assert found == {name: [] for name in ways}


def test_graphs_give_the_same_bits(texts):
    """Batches of a few sizes, so that each is recorded once and replayed on other lengths."""
    few = attrs.evolve(texts, lens=[5000, 300, 41, 2000])
    prompts = [n - 8 for n in few.lens]
    rows = [(text, n, n + 1) for text, n in enumerate(prompts)]
    passes = [("extend", [(text, 0, n)]) for text, n in enumerate(prompts)]
    passes += [("decode", [(text, n + step, n + step + 1) for text, n, _ in rows]) for step in range(8)]
    wanted = few.run(on_triton, few.whole())
    assert few.same(wanted, few.run(recorded, passes, seed=9)) == []


def test_it_is_the_same_every_time(texts):
    few = attrs.evolve(texts, lens=texts.lens[:6])
    first = few.run(on_triton, few.together(seed=5, longest=5000))
    for _ in range(3):
        assert few.same(first, few.run(on_triton, few.together(seed=5, longest=5000))) == []
