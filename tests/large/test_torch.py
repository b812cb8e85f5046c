"""Sizes beyond 32 bits on a CPU: pools of 2.4e9 elements, 70,000 rows, a million tokens. Right, or refused."""

from __future__ import annotations

import attrs
import pytest
import torch

from faback import AttentionBackend, AttentionLayer, BackendConfig, ConfigError, ForwardBatch, Pools
from faback.core.pools import MAX_SLOTS
from faback.pools import MHAPool
from graphs.test_simulated import registry

E5M2 = torch.float8_e5m2
LAYER = AttentionLayer(layer_id=0, num_q_heads=2, num_kv_heads=1, head_dim=16)
PAGE = 16


def backend(table, kv, layer, kernel="reference", context=64):
    config = BackendConfig(context_len=context, dtype=torch.float32, kernels=kernel)
    return AttentionBackend(config, Pools(req_to_token=table, kv=kv), [layer], registry=registry(config))


def pool_of(elements, layer, dtype=E5M2):
    """Memory that nobody touches costs nothing on a CPU."""
    pages = -(-elements // (PAGE * layer.num_kv_heads * layer.head_dim))
    try:
        return MHAPool(num_pages=pages, page_size=PAGE, layers=[layer], dtype=dtype)
    except RuntimeError:
        pytest.skip("no address space for a pool that nobody touches")


@pytest.mark.parametrize("kernel", ["reference", "poor"])
def test_the_last_pages_of_a_pool_of_more_than_2_to_the_31_elements(kernel):
    """A prompt, then a decode step: written and read there as on the first pages."""
    generator = torch.Generator().manual_seed(0)
    new = [tuple(torch.randn(n, heads, 16, generator=generator) for heads in (2, 1, 1)) for n in (40, 1)]
    answers = []
    for elements in (4096, 2_400_000_000):
        kv = pool_of(elements, LAYER)
        slots = kv.num_slots - 1 - torch.arange(48).view(3, PAGE).flip(1).flatten()
        table = torch.zeros(2, 64, dtype=torch.int32)
        table[1, :48] = slots
        made = backend(table, kv, LAYER, kernel)
        row = torch.tensor([1])
        prompt = {"seq_lens": row * 40, "extend_seq_lens": row * 40, "out_cache_loc": slots[:40]}
        for mode, fields, tensors in (
            ("extend", prompt, new[0]),
            ("decode", {"seq_lens": row * 41, "out_cache_loc": slots[40:41]}, new[1]),
        ):
            made.plan(ForwardBatch(forward_mode=mode, req_pool_indices=row, **fields))
            answers.append(made.forward(*tensors, LAYER))
    assert kv.buffers(LAYER)[0].numel() > 2**31
    assert torch.equal(answers[0], answers[2]) and torch.equal(answers[1], answers[3])
    assert answers[0].abs().sum() > 0


@pytest.mark.parametrize("kernel", ["reference", "late reference"])
def test_seventy_thousand_rows(kernel):
    """Each has one or two keys, so that the answer can be written down."""
    count = 70_000
    kv = MHAPool(num_pages=1001, layers=[LAYER], dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    for buffer in kv.buffers(LAYER):
        buffer.copy_(torch.randn(buffer.shape, generator=generator))
    table = torch.randint(1, 1001, (count + 1, 2), generator=generator, dtype=torch.int32)
    lens = torch.randint(1, 3, (count,), generator=generator)
    rows = torch.arange(1, count + 1)
    made = backend(table, kv, LAYER, kernel, context=2)
    q = torch.randn(count, 2, 16, generator=generator)
    batch = ForwardBatch(
        forward_mode="decode", req_pool_indices=rows, seq_lens=lens, out_cache_loc=table[rows, lens - 1].long()
    )
    made.plan(batch) if kernel == "reference" else made.capture(batch)
    found = made.forward(q, None, None, LAYER, save_kv_cache=False)
    k, v = (buffer[table[1:].long(), 0] for buffer in kv.buffers(LAYER))  # [rows, 2, 16]
    scores = torch.einsum("rhd,rkd->rhk", q, k) * LAYER.scale
    scores = scores.masked_fill((torch.arange(2) >= lens[:, None])[:, None], -torch.inf)
    torch.testing.assert_close(found, torch.einsum("rhk,rkd->rhd", scores.softmax(-1), v), atol=1e-5, rtol=0)


MILLION = 1_000_003


@pytest.fixture(scope="module")
def million():
    """A pool whose request row has a million tokens, in pages of any order."""
    kv = MHAPool(num_pages=-(-MILLION // PAGE) + 1, page_size=PAGE, layers=LAYERS, dtype=torch.float32)
    generator = torch.Generator().manual_seed(2)
    for layer in LAYERS:
        for buffer in kv.buffers(layer):
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
    pages = torch.randperm(kv.num_pages - 1, generator=generator) + 1
    slots = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()
    return kv, torch.stack([torch.zeros_like(slots), slots])


LAYERS = (
    attrs.evolve(LAYER, layer_id=0),
    attrs.evolve(LAYER, layer_id=1, window=3000),
    attrs.evolve(LAYER, layer_id=2, chunk=8192),
)


@pytest.mark.parametrize("kernel", ["reference", "poor"])
@pytest.mark.parametrize("layer", LAYERS, ids=["full", "window", "chunk"])
def test_a_million_tokens(million, layer, kernel):
    """The last three tokens of a text, as a chunk of their own."""
    kv, table = million
    config = BackendConfig(context_len=table.shape[1], dtype=torch.float32, kernels=kernel)
    made = AttentionBackend(config, Pools(req_to_token=table, kv=kv), LAYERS, registry=registry(config))
    row = torch.tensor([1])
    new = table[1, MILLION - 3 : MILLION]
    batch = ForwardBatch(
        forward_mode="extend", req_pool_indices=row, seq_lens=row * MILLION, extend_seq_lens=row * 3, out_cache_loc=new
    )
    made.plan(batch)
    q = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(3))
    found = made.forward(q, None, None, layer, save_kv_cache=False)
    for i, p in enumerate(range(MILLION - 3, MILLION)):
        low = 0 if layer.window is None else p - layer.window
        low = low if layer.chunk is None else p // layer.chunk * layer.chunk
        k, v = (buffer[table[1, low : p + 1], 0].double() for buffer in kv.buffers(layer))
        weights = (q[i].double() @ k.T * layer.scale).softmax(-1)
        torch.testing.assert_close(found[i].double(), weights @ v, atol=1e-5, rtol=0)


class Endless:
    """A pool of an engine with more slots than 32 bits can name."""

    page_size = 1

    def __init__(self, num_slots, shown):
        self.num_slots = shown
        self._memory = torch.zeros(1, 1, 1, dtype=torch.float32).expand(num_slots, 1, 16)

    def buffers(self, layer):
        return self._memory, self._memory

    def dtype(self, kind):
        return torch.float32

    def slot_map(self, group):
        return None


def test_slots_that_32_bits_cannot_name_are_refused():
    table = torch.zeros(2, 64, dtype=torch.int64)
    with pytest.raises(ConfigError, match=f"num_slots: wanted at most {MAX_SLOTS}, got {MAX_SLOTS + 1}"):
        backend(table, Endless(8, MAX_SLOTS + 1), LAYER)
    with pytest.raises(ConfigError, match=f"layer 0: wanted at most {MAX_SLOTS} slots, got {MAX_SLOTS + 1}"):
        backend(table, Endless(MAX_SLOTS + 1, 64), LAYER)
    backend(table, Endless(MAX_SLOTS, MAX_SLOTS), LAYER)


@pytest.mark.parametrize("tokens", [(1 << 30) + 1, 1 << 31, 1 << 40])
def test_texts_whose_positions_32_bits_cannot_add_are_refused(tokens):
    with pytest.raises(ConfigError, match="context_len: wanted an integer from 1 to 1073741824"):
        BackendConfig(context_len=tokens)
