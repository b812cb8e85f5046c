"""With `deterministic=True`, in Triton's interpreter: tests/determinism, with splits of a few tiles."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from determinism.texts import Texts
from faback import AttentionLayer
from faback.kernels.triton import provider
from kernels.triton.interpreter import needs_interpreter
from kernels.triton.running import on_triton

needs_interpreter()

SHAPE = {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 16}
LAYERS = (
    AttentionLayer(layer_id=0, **SHAPE),
    AttentionLayer(layer_id=1, window=60, **SHAPE),
    AttentionLayer(layer_id=2, chunk=48, softcap=5.0, **SHAPE),
)
TEXTS = Texts([200, 9, 90], LAYERS, page_size=16)
WAYS = {
    "in chunks": TEXTS.chunked([85, 1, 47]),
    "together": TEXTS.together(seed=2, longest=90),
    "together, mixed": TEXTS.together(seed=3, mode="mixed", longest=90),
    "prompts, then decode": TEXTS.decoded([197, 8, 87], seed=4),
}


@pytest.fixture(autouse=True)
def short_splits(monkeypatch):
    """Of two tiles, so that texts of a few hundred tokens have several."""
    monkeypatch.setattr(provider, "FIXED_SPLIT_TILES", 2)


@pytest.fixture(autouse=True)
def rows_by_themselves(monkeypatch):
    """Matrix products as matrix units make them: the sum of a row does not depend on its place, as it does in BLAS."""
    from triton.runtime import interpreter

    def product(self, a, b, d, input_precision, max_num_imprecise_acc):
        found = np.einsum("mk,kn->mn", a.data, b.data, dtype=d.data.dtype)
        return interpreter.TensorHandle(found + d.data, d.dtype.scalar)

    monkeypatch.setattr(type(interpreter.interpreter_builder), "create_dot", product)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_same_bits(way):
    whole = TEXTS.run(on_triton, TEXTS.whole())
    assert TEXTS.same(whole, TEXTS.run(on_triton, WAYS[way], seed=7)) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit(dtype):
    texts = Texts([200, 70], LAYERS[:2], dtype=dtype, page_size=16)
    whole = texts.run(on_triton, texts.whole())
    assert texts.same(whole, texts.run(on_triton, texts.chunked([90, 13]))) == []
