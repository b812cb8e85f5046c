"""tests/large for real: 70,000 rows, a million tokens, and pools of more than 2^31 elements, through a backend.

Pools under the bare kernel: tests/gpu/test_kernels.py.
"""

from __future__ import annotations

import attrs
import pytest
import torch

from faback import AttentionLayer, BackendConfig, ForwardBatch, Pools
from faback.pools import MHAPool
from gpu.marks import on_gpu
from gpu.recording import Recording
from gpu.test_kernels import BF16, E4M3, GQA, KERNEL, texts
from gpu.test_matrix import on_triton
from kernels.triton.segments import make_case

pytestmark = on_gpu

SHAPE = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}
LAYERS = (
    AttentionLayer(layer_id=0, **SHAPE),
    AttentionLayer(layer_id=1, window=4000, **SHAPE),
    AttentionLayer(layer_id=2, chunk=8192, **SHAPE),
)
PAGE = 16


@pytest.fixture(autouse=True)
def returned_memory():
    """Pools here are large: none outlives its test."""
    yield
    torch.cuda.empty_cache()


def filled(kv, layers, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    for layer in layers:
        for buffer in kv.buffers(layer):
            for part in buffer.split(1 << 18):
                part.copy_(torch.randn(part.shape, device="cuda", generator=generator))
    return kv


def expected(kv, layer, slots, q, p):
    """float32 answer of the query at p, [heads, dim], over its slots."""
    low = 0 if layer.window is None else max(0, p - layer.window)
    low = low if layer.chunk is None else p // layer.chunk * layer.chunk
    seen, (keys, values) = slots[low : p + 1], kv.buffers(layer)
    grouped = q.float().view(layer.num_kv_heads, layer.group_size, -1)
    weights = (torch.einsum("hgd,khd->hgk", grouped, keys[seen].float()) * layer.scale).softmax(-1)
    return torch.einsum("hgk,khd->hgd", weights, values[seen].float()).flatten(0, 1)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", [on_triton, lambda *given: Recording(on_triton(*given))], ids=["eager", "graph"])
def test_a_million_tokens(kind, deterministic):
    """The last tokens of a long text, planned and replayed; the cache alone has more than 2^30 elements."""
    length = 1_000_003
    kv = MHAPool(num_pages=-(-length // PAGE) + 1, page_size=PAGE, layers=LAYERS, dtype=BF16, device="cuda")
    filled(kv, LAYERS)
    pages = torch.randperm(kv.num_pages - 1, device="cuda") + 1
    slots = (pages[:, None] * PAGE + torch.arange(PAGE, device="cuda")).flatten()[:length]
    table = torch.zeros(2, length, dtype=torch.int32, device="cuda")
    table[1] = slots
    config = BackendConfig(context_len=length, dtype=BF16, deterministic=deterministic)
    backend = kind(config, Pools(req_to_token=table, kv=kv), LAYERS)
    row = torch.tensor([1], device="cuda")
    for mode, new in (("decode", 1), ("extend", 3)):
        more = {} if mode == "decode" else {"extend_seq_lens": row * new}
        out = slots[length - new :]
        batch = ForwardBatch(forward_mode=mode, req_pool_indices=row, seq_lens=row * length, out_cache_loc=out, **more)
        backend.plan(batch)
        q = torch.randn(new, 32, 128, dtype=BF16, device="cuda")
        for layer in LAYERS:
            found = backend.forward(q, None, None, layer, save_kv_cache=False)
            for i, p in enumerate(range(length - new, length)):
                torch.testing.assert_close(found[i].float(), expected(kv, layer, slots, q[i], p), atol=1e-2, rtol=0)


def test_a_long_prompt_whole():
    """130,000 queries in one pass: more tiles than anything else here, looked at in places."""
    length = 130_000
    kv = MHAPool(num_pages=-(-length // PAGE) + 1, page_size=PAGE, layers=LAYERS[:1], dtype=BF16, device="cuda")
    slots = torch.arange(PAGE, PAGE + length, device="cuda")
    table = torch.zeros(2, length, dtype=torch.int32, device="cuda")
    table[1] = slots
    backend = on_triton(BackendConfig(context_len=length, dtype=BF16), Pools(req_to_token=table, kv=kv), LAYERS[:1])
    row = torch.tensor([1], device="cuda")
    batch = ForwardBatch(
        forward_mode="extend",
        req_pool_indices=row,
        seq_lens=row * length,
        extend_seq_lens=row * length,
        out_cache_loc=slots,
    )
    backend.plan(batch)
    q, k, v = (torch.randn(length, heads, 128, dtype=BF16, device="cuda") for heads in (32, 8, 8))
    found = backend.forward(q, k, v, LAYERS[0])
    assert not found.isnan().any()
    for p in (0, 1, 63, 64, 4095, 4096, 65_535, 65_536, 99_999, length - 1):
        torch.testing.assert_close(found[p].float(), expected(kv, LAYERS[0], slots, q[p], p), atol=1e-2, rtol=0)


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=["bf16", "e4m3"])
def test_the_last_pages_of_a_pool_of_more_than_2_to_the_31_elements(dtype):
    """Written and read there as on the first pages, bit by bit."""
    layer, answers = LAYERS[0], []
    new = [tuple(torch.randn(n, heads, 128, dtype=BF16, device="cuda") for heads in (32, 8, 8)) for n in (700, 1)]
    for elements in (1 << 20, 2_400_000_000):
        pages = -(-elements // (PAGE * 8 * 128)) + 60
        kv = MHAPool(num_pages=pages, page_size=PAGE, layers=[layer], dtype=dtype, device="cuda")
        slots = torch.arange(kv.num_slots - 50 * PAGE, kv.num_slots, device="cuda")
        table = torch.zeros(2, len(slots), dtype=torch.int32, device="cuda")
        table[1] = slots
        backend = on_triton(BackendConfig(context_len=800, dtype=BF16), Pools(req_to_token=table, kv=kv), [layer])
        row = torch.tensor([1], device="cuda")
        prompt = {"seq_lens": row * 700, "extend_seq_lens": row * 700, "out_cache_loc": slots[:700]}
        for mode, fields, tensors in (
            ("extend", prompt, new[0]),
            ("decode", {"seq_lens": row * 701, "out_cache_loc": slots[700:701]}, new[1]),
        ):
            backend.plan(ForwardBatch(forward_mode=mode, req_pool_indices=row, **fields))
            answers.append(backend.forward(*tensors, layer))
    assert kv.buffers(layer)[0].numel() > 2**31
    assert torch.equal(answers[0], answers[2]) and torch.equal(answers[1], answers[3])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("features", [{"sinks", "padded_rows"}, {"window", "slot_map"}], ids=["plain", "window"])
def test_rows_in_several_launches(features, deterministic):
    make_case(
        1, rows=texts(9000, 200), page=16, window=50, features=features, device="cuda", **{**GQA, "heads": (8, 2)}
    ).check(KERNEL, deterministic=deterministic)


@pytest.mark.parametrize("kind", [on_triton, lambda *given: Recording(on_triton(*given))], ids=["eager", "graph"])
def test_seventy_thousand_rows(kind):
    """Each has one or two keys, so that the answer can be written down."""
    count, layer = 70_000, AttentionLayer(layer_id=0, num_q_heads=4, num_kv_heads=2, head_dim=64)
    kv = filled(MHAPool(num_pages=1001, layers=[layer], dtype=BF16, device="cuda"), [layer])
    table = torch.randint(1, 1001, (count + 1, 2), dtype=torch.int32, device="cuda")
    lens = torch.randint(1, 3, (count,), device="cuda")
    rows = torch.arange(1, count + 1, device="cuda")
    backend = kind(BackendConfig(context_len=2, dtype=BF16), Pools(req_to_token=table, kv=kv), [layer])
    backend.plan(
        ForwardBatch(
            forward_mode="decode", req_pool_indices=rows, seq_lens=lens, out_cache_loc=table[rows, lens - 1].long()
        )
    )
    q = torch.randn(count, 4, 64, dtype=BF16, device="cuda")
    found = backend.forward(q, None, None, layer, save_kv_cache=False)
    k, v = (b[table[1:].long()].float().repeat_interleave(2, 2) for b in kv.buffers(layer))  # [rows, 2, heads, 64]
    scores = torch.einsum("rhd,rkhd->rhk", q.float(), k) * layer.scale
    scores = scores.masked_fill((torch.arange(2, device="cuda") >= lens[:, None])[:, None], -torch.inf)
    wanted = torch.einsum("rhk,rkhd->rhd", scores.softmax(-1), v)
    torch.testing.assert_close(found.float(), wanted, atol=2e-2, rtol=0)


@pytest.mark.parametrize("what", ["k", "v"])
def test_heads_that_lie_more_than_2_to_the_31_elements_apart(what):
    """Pools by head: slots of one head follow one another."""
    case = make_case(3, rows=texts(9, 500), page=16, kv_dtype=E4M3, features={"scales"}, device="cuda", **GQA)
    wanted = case.run(KERNEL)[0]
    cache = getattr(case, what)
    slots, heads, dim = cache.shape
    stride = (1 << 29) + 16
    memory = torch.zeros((heads - 1) * stride + slots * dim, dtype=torch.uint8, device="cuda")
    far = memory.as_strided(cache.shape, (dim, stride, 1))
    far.copy_(cache.view(torch.uint8))
    assert stride * (heads - 1) > 2**31
    assert torch.equal(attrs.evolve(case, **{what: far.view(E4M3)}).run(KERNEL)[0], wanted)
