"""decode, extend, mixed and idle: every request by its own lengths, whatever lies around it."""

import itertools
import math

import pytest
import torch

from faback import ForwardBatch, Pools

LENS, NEW = [9, 1, 4, 12, 5], [3, 1, 4, 1, 0]


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("mode", ["decode", "extend", "mixed"])
def test_equals_the_dense_answer(world, layer, mode, page_size):
    new = [1] * 5 if mode == "decode" else NEW
    made = world([layer(0), layer(1, window=2)], LENS, new, page_size=page_size)
    for each in made.layers:
        made.check(each, made.run(each, mode))


def test_a_cell_that_equals_dense_attention_tells_its_features_apart(world, layer):
    made = world([layer(0), layer(1, window=2), layer(2, softcap=1.0), layer(3, scale=1.0)], LENS, NEW)
    for each in made.layers[1:]:
        other = {"window": None, "softcap": 0.0, "scale": 8**-0.5}
        plain = layer(each.layer_id, **other)
        assert (made.expected(each)[0] - made.expected(plain)[0]).abs().max() > 0.01


def test_mixed_rows_in_every_order(world, layer):
    rows = [(20, 5), (7, 1), (64, 1), (3, 3), (10, 0)]
    for seed, order in enumerate(itertools.permutations(rows)):
        lens, new = zip(*order, strict=True)
        made = world([layer(num_q_heads=2)], lens, new, page_size=4, seed=seed)
        made.check(made.layers[0], made.run(made.layers[0], "mixed"))


def test_a_request_does_not_depend_on_its_neighbours(world, layer):
    made = world([layer()], LENS, NEW, page_size=4)
    together = made.run(made.layers[0])
    batch, (k, v), token = made.batch(), made.fresh(made.layers[0]), 0
    for i, new in enumerate(NEW):
        span = slice(token, token + new)
        alone = ForwardBatch(
            forward_mode="extend",
            req_pool_indices=batch.req_pool_indices[i : i + 1],
            seq_lens=batch.seq_lens[i : i + 1],
            extend_seq_lens=batch.extend_seq_lens[i : i + 1],
            out_cache_loc=batch.out_cache_loc[span],
        )
        made.backend.plan(alone)
        out = made.backend.forward(made.q[0][span], k[span], v[span], made.layers[0])
        torch.testing.assert_close(out, together[span], atol=1e-6, rtol=0)
        token += new


@pytest.mark.parametrize("split", [1, 5, 8])
def test_prefill_in_two_chunks_equals_one(world, layer, split):
    whole = world([layer(window=3)], [9], [9], page_size=4)
    wanted = whole.run(whole.layers[0])
    k, v = whole.fresh(whole.layers[0])
    for cache in whole.pool.buffers(whole.layers[0]):
        cache.fill_(math.nan)
    found = []
    for low, high in ((0, split), (split, 9)):
        batch = whole.batch(
            seq_lens=torch.tensor([high]),
            extend_seq_lens=torch.tensor([high - low]),
            out_cache_loc=whole.slots[0][low:high],
        )
        whole.backend.plan(batch)
        found.append(whole.backend.forward(whole.q[0][low:high], k[low:high], v[low:high], whole.layers[0]))
    torch.testing.assert_close(torch.cat(found), wanted, atol=1e-6, rtol=0)


def test_a_later_token_does_not_move_an_earlier_row(world, layer):
    made = world([layer()], [9, 6], [5, 6])
    before = made.run(made.layers[0])
    made.k[0][0][8] += 3
    made.v[0][0][8] -= 3
    after = made.run(made.layers[0])
    assert torch.equal(before[:4], after[:4]) and torch.equal(before[5:], after[5:])
    assert not torch.equal(before[4], after[4])


@pytest.mark.parametrize("fill", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("table_fill", [-1, 1 << 30, 0, 2])
@pytest.mark.parametrize("mode", ["decode", "extend"])
def test_what_no_request_owns_never_matters(world, layer, mode, fill, table_fill):
    lens, new = [1, 3, 127, 129], [1, 1, 1, 1] if mode == "decode" else [1, 2, 1, 129]
    layers = [layer(0), layer(1, window=5)]
    clean = world(layers, lens, new, page_size=4, fill=0.0, table_fill=0)
    dirty = world(layers, lens, new, page_size=4, fill=fill, table_fill=table_fill)
    for each in layers:
        assert torch.equal(clean.run(each, mode), dirty.run(each, mode))


def test_nan_outside_the_window_never_matters(world, layer):
    made = world([layer(window=2)], [9, 5], [1, 2], page_size=1)
    wanted = made.run(made.layers[0])
    for cache in made.pool.buffers(made.layers[0]):
        cache[made.slots[0][:6]] = math.nan
        cache[made.slots[1][:1]] = math.nan
    assert torch.equal(made.run(made.layers[0]), wanted)


def test_nan_rows_of_q_behind_the_last_token(world, layer):
    made = world([layer()], [5, 3], [2, 3])
    wanted = made.run(made.layers[0])
    padded = torch.cat([made.q[0], torch.full((3, 4, 8), math.nan)])
    made.backend.plan(made.batch(num_tokens=8))
    out = made.backend.forward(padded, *made.fresh(made.layers[0]), made.layers[0])
    assert torch.equal(out[:5], wanted)
    assert out[5:].eq(0).all()


@pytest.mark.parametrize("mode", ["extend", "mixed"])
def test_empty_queries_and_empty_keys(world, layer, mode):
    made = world([layer()], [9, 5, 0, 7], [0, 5, 0, 1], page_size=4)
    made.check(made.layers[0], made.run(made.layers[0], mode))


def test_more_queries_than_keys(world, layer):
    made = world([layer()], [3], [3])
    wanted, lse = made.run(made.layers[0], return_lse=True)
    batch = made.batch(extend_seq_lens=torch.tensor([5]), out_cache_loc=torch.zeros(5, dtype=torch.long))
    made.backend.plan(batch)
    q = torch.cat([torch.randn(2, 4, 8), made.q[0]])
    out, more = made.backend.forward(q, None, None, made.layers[0], return_lse=True)
    assert out[:2].eq(0).all() and more[:2].eq(-math.inf).all()
    torch.testing.assert_close(out[2:], wanted, atol=1e-6, rtol=0)
    torch.testing.assert_close(more[2:], lse, atol=1e-6, rtol=0)


def test_padded_rows_are_zero_and_write_nothing_live(world, layer):
    made = world([layer()], [9, 5], [1, 1], page_size=4)
    wanted = made.run(made.layers[0], "decode")
    kept = [cache.clone() for cache in made.pool.buffers(made.layers[0])]
    batch = made.batch("decode")

    def padded(tensor, value):
        return torch.cat([tensor, torch.full((3,), value)])

    made.backend.plan(
        ForwardBatch(
            forward_mode="decode",
            req_pool_indices=padded(batch.req_pool_indices, 0),
            seq_lens=padded(batch.seq_lens, 1),
            out_cache_loc=padded(batch.out_cache_loc, 0),
        )
    )
    rows = torch.full((3, 2, 8), math.nan)
    k, v = (torch.cat([t, rows]) for t in made.fresh(made.layers[0]))
    out = torch.full((5, 4, 8), math.nan)
    made.backend.forward(torch.cat([made.q[0], torch.full((3, 4, 8), math.nan)]), k, v, made.layers[0], out=out)
    assert torch.equal(out[:2], wanted)
    assert out[2:].eq(0).all()
    for cache, old in zip(made.pool.buffers(made.layers[0]), kept, strict=True):
        assert torch.equal(cache[1:].nan_to_num(9), old[1:].nan_to_num(9))


@pytest.mark.parametrize("mode", ["decode", "extend", "mixed", "idle"])
def test_no_requests_then_some(world, layer, mode):
    made = world([layer(0), layer(1, window=2)], [9, 5], [1, 1])
    nobody = torch.zeros(0, dtype=torch.int32)
    lens = {"extend_seq_lens": nobody} if mode in ("extend", "mixed") else {}
    none = {"out_cache_loc": nobody} if mode != "idle" else {}
    batch = ForwardBatch(forward_mode=mode, req_pool_indices=nobody, seq_lens=nobody, **lens, **none)
    for each in made.layers:
        made.backend.plan(batch)
        out = made.backend.forward(torch.zeros(0, 4, 8), torch.zeros(0, 2, 8), torch.zeros(0, 2, 8), each)
        assert out.shape == (0, 4, 8)
        made.check(each, made.run(each, "decode"))


def test_idle_with_padding_is_zero_and_writes_nothing(world, layer):
    made = world([layer()], [9, 5], [1, 1])
    made.run(made.layers[0], "decode")
    before = [cache.clone() for cache in made.pool.buffers(made.layers[0])]
    made.backend.plan(made.batch("idle"))
    k = torch.full((2, 2, 8), 7.0)
    out, lse = made.backend.forward(torch.ones(2, 4, 8), k, k, made.layers[0], return_lse=True)
    assert out.eq(0).all() and lse.eq(-math.inf).all()
    for cache, old in zip(made.pool.buffers(made.layers[0]), before, strict=True):
        assert torch.equal(cache.nan_to_num(9), old.nan_to_num(9))
    made.check(made.layers[0], made.run(made.layers[0], "decode"))


@pytest.mark.parametrize("ratio", [3, 5, 6, 7, 9, 16, 71])
def test_head_ratios(world, layer, ratio):
    made = world([layer(num_q_heads=2 * ratio)], [9, 6, 2], [1, 3, 2])
    made.check(made.layers[0], made.run(made.layers[0]))


@pytest.mark.parametrize(
    ("dim", "v_dim"),
    [(d, d) for d in (40, 64, 80, 96, 112, 128, 160, 192, 256, 512)] + [(192, 128), (576, 512), (64, 256)],
)
def test_head_dims(world, layer, dim, v_dim):
    made = world([layer(num_q_heads=2, num_kv_heads=1, head_dim=dim, v_head_dim=v_dim)], [9, 3], [2, 1], page_size=4)
    out = made.run(made.layers[0])
    assert out.shape == (3, 2, v_dim)
    made.check(made.layers[0], out)


def test_interleaved_keys_and_values(world, layer):
    made = world([layer()], [9, 6], [2, 6], interleaved=True)
    k, _ = made.pool.buffers(made.layers[0])
    assert k.stride(0) == 2 * 2 * 8 and not k.is_contiguous()
    wanted = world([layer()], [9, 6], [2, 6]).run(made.layers[0])
    assert torch.equal(made.run(made.layers[0]), wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit(world, layer, dtype):
    made = world([layer(sinks=True)], LENS, NEW, dtype=dtype, page_size=4)
    sinks = torch.tensor([1.0, 2.0, -3.0, 0.0])
    out = made.run(made.layers[0], sinks=sinks)
    assert out.dtype == dtype
    wanted = made.expected(made.layers[0], sinks)[0]
    rounding = (wanted.to(dtype).double() - wanted).abs().max()
    assert (out.double() - wanted).abs().max() <= 2 * rounding


def test_two_softcaps_in_one_plan(world, layer):
    made = world([layer(0, softcap=30.0, scale=25.0), layer(1, scale=25.0)], [9, 6], [2, 1])
    made.q[1], made.k[1], made.v[1] = made.q[0], made.k[0], made.v[0]
    made.cache_prefixes()
    outs = []
    made.backend.plan(made.batch())
    for each in made.layers:
        outs.append(made.backend.forward(made.q[0], *made.fresh(each), each))
        made.check(each, outs[-1])
    assert (outs[0] - outs[1]).abs().max() > 0.01


def _fp8(world, layer, mode, k_scale, v_scale, dtype=torch.float8_e4m3fn):
    new = {"decode": [1, 1, 1], "extend": [3, 5, 1], "mixed": [1, 4, 0]}[mode]
    each = layer(k_scale=k_scale, v_scale=v_scale)
    made = world([each], [9, 5, 3], new, page_size=4, kv_dtype=dtype)
    return made, each, made.run(each, mode)


@pytest.mark.parametrize("mode", ["decode", "extend", "mixed"])
@pytest.mark.parametrize(
    ("k_scale", "v_scale"),
    [(0.25, 2.0), (torch.tensor([0.25, 1.0]), torch.tensor([2.0, 0.5]))],
    ids=["layer", "head"],
)
def test_fp8_scales(world, layer, mode, k_scale, v_scale):
    made, each, out = _fp8(world, layer, mode, k_scale, v_scale)
    for tokens, scale in ((made.k, k_scale), (made.v, v_scale)):
        scale = scale.view(-1, 1) if isinstance(scale, torch.Tensor) else scale
        tokens[0] = [(t / scale).to(torch.float8_e4m3fn).float() * scale for t in tokens[0]]
    made.check(each, out)


def test_fp8_scales_of_stored_values_count_on_reading(world, layer):
    made, _, out = _fp8(world, layer, "decode", 0.25, 2.0)
    others = [layer(k_scale=k, v_scale=v) for k, v in ((2.0, 0.25), (0.25, 0.25), (2.0, 2.0))]
    for other in others:
        swapped = made.backend.forward(made.q[0], None, None, other)
        assert (swapped - out).abs().max() > 0.05


def test_slots_beyond_32_bits(world, layer):
    made = world([layer()], [5, 3], [2, 1])
    wanted = made.run(made.layers[0])
    stride = 1 << 27
    try:
        storage = torch.empty(stride * 20 + 64, dtype=torch.float8_e5m2)
    except RuntimeError:
        pytest.skip("no address space for 2.5 GiB that nobody touches")
    small = made.pool.buffers(made.layers[0])[0].shape[0]
    assert stride * (small - 1) > 1 << 31
    k, v = (storage.as_strided((small, 2, 8), (stride, 8, 1), offset) for offset in (0, 16))
    huge = world([layer()], [5, 3], [2, 1], kv_dtype=torch.float8_e5m2)
    plain = huge.run(huge.layers[0])
    assert not torch.equal(plain, wanted)
    huge.pool._kv[0] = (k, v)
    assert Pools(req_to_token=huge.pools.req_to_token, kv=huge.pool)
    huge.cache_prefixes()
    assert torch.equal(huge.run(huge.layers[0]), plain)


def test_deterministic_whatever_else_is_in_the_batch(world, layer):
    made = world([layer(head_dim=64)], [1500, 1700, 1800, 1850, 3, 40], [1] * 6, deterministic=True, page_size=16)
    together = made.run(made.layers[0], "decode")
    batch, (k, v) = made.batch("decode"), made.fresh(made.layers[0])
    for i in range(6):
        one = slice(i, i + 1)
        made.backend.plan(
            ForwardBatch(
                forward_mode="decode",
                req_pool_indices=batch.req_pool_indices[one],
                seq_lens=batch.seq_lens[one],
                out_cache_loc=batch.out_cache_loc[one],
            )
        )
        assert torch.equal(made.backend.forward(made.q[0][one], k[one], v[one], made.layers[0]), together[one])
