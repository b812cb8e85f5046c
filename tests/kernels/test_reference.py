"""The reference kernel against the rule, one query and one key at a time in float64.

The loop below is written from the definition of `Visibility` alone and shares no code with the kernel.
"""

import math
import random

import attrs
import pytest
import torch

from faback import LayerKind
from faback.core.kernel import KernelRequest
from faback.core.segment import KVView, Segment, Tail, Visibility
from faback.kernels import reference_layout
from faback.kernels.reference import Reference, attend

SLOTS = 400


def naive(segment, layer, q, k, v, sinks=None):
    """out and lse in float64."""
    rule, tail, view = segment.visibility, segment.tail, segment.kv
    out = torch.zeros(q.shape[0], layer.num_q_heads, layer.v_head_dim, dtype=torch.float64)
    lse = torch.full(out.shape[:2], -math.inf, dtype=torch.float64)
    offsets = segment.cu_seqlens_q.tolist()
    for row in range(segment.rows):
        queries = offsets[row + 1] - offsets[row]
        if segment.q_len is not None:
            queries = int(segment.q_len[row])
        length = int(segment.kv_len[row])
        count = 0 if tail is None else int(tail.lens[row])
        for j in range(queries):
            token = offsets[row] + j
            p = length + count - queries + j if segment.positions is None else int(segment.positions[token])
            seen = []
            left, right = rule.window
            if rule.row_window is not None:
                left = int(rule.row_window[row])
            index, step = (0, 1) if view is None or view.shard is None else view.shard
            for t in range(length):
                at = t * step + index
                near = (left is None or at >= p - left) and (right is None or at <= p + right)
                near = near and (rule.chunk is None or at // rule.chunk == p // rule.chunk)
                kept = rule.keep is not None and at < int(rule.keep[row])
                if (near or kept) and (at <= p or not rule.causal):
                    if view is None:
                        starts = segment.cu_seqlens_q if segment.cu_seqlens_k is None else segment.cu_seqlens_k
                        slot = int(starts[row]) + t
                    else:
                        start = 0 if view.start is None else int(view.start[row])
                        slot = int(view.req_to_token[int(view.req_pool_indices[row]), start + t])
                        slot = slot if view.slot_map is None else int(view.slot_map[slot])
                    seen.append(slot)
            for c in range(count):
                t = length + c if tail.positions is None else int(tail.positions[offsets[row] + c])
                near = (left is None or t >= p - left) and (right is None or t <= p + right)
                near = near and (rule.chunk is None or t // rule.chunk == p // rule.chunk)
                allowed = t <= p or not rule.causal if tail.mask is None else bool(tail.mask[token, c])
                if near and allowed:
                    if tail.slots is None:
                        start = 0 if view.start is None else int(view.start[row])
                        slot = int(view.req_to_token[int(view.req_pool_indices[row]), start + length + c])
                    else:
                        slot = int(tail.slots[token if tail.per_query else row, c])
                    seen.append(slot if view.slot_map is None else int(view.slot_map[slot]))
            for head in range(layer.num_q_heads if seen else 0):
                group = head // layer.group_size
                scores = k[seen, group].double() @ q[token, head].double() * layer.scale
                if layer.softcap:
                    scores = layer.softcap * torch.tanh(scores / layer.softcap)
                lse[token, head] = bottom = scores.logsumexp(0)
                if sinks is not None:
                    bottom = torch.logaddexp(bottom, sinks[head].double())
                out[token, head] = (scores - bottom).exp() @ v[seen, group].double()
    return out, lse


def plain_request(layer):
    return KernelRequest(
        forward_mode="test",
        device="cpu",
        arch=0,
        q_dtype=torch.float32,
        kv_dtype=torch.float32,
        num_q_heads=layer.num_q_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        v_head_dim=layer.v_head_dim,
        page_size=1,
        features=frozenset(),
    )


def run(segment, layer, q, k, v, sinks=None, compute=torch.float64):
    kernel = Reference(compute)
    out = torch.full((q.shape[0], layer.num_q_heads, layer.v_head_dim), math.nan, dtype=q.dtype)
    lse = torch.full(out.shape[:2], math.nan)
    kernel.run(kernel.prepare(segment, layer, plain_request(layer), None), q, k, v, out, lse=lse, sinks=sinks)
    return out, lse


def same(segment, layer, seed=0, sinks=None):
    generator = torch.Generator().manual_seed(seed)
    keys = SLOTS if segment.kv is not None else segment.tokens + 200
    q = torch.randn(segment.tokens, layer.num_q_heads, layer.head_dim, generator=generator).double()
    k = torch.randn(keys, layer.num_kv_heads, layer.head_dim, generator=generator).double()
    v = torch.randn(keys, layer.num_kv_heads, layer.v_head_dim, generator=generator).double()
    out, lse = run(segment, layer, q, k, v, sinks)
    wanted, wanted_lse = naive(segment, layer, q, k, v, sinks)
    torch.testing.assert_close(out, wanted, atol=1e-10, rtol=0)
    torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-5, rtol=0)


def kind(**fields):
    return LayerKind(**{"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 4, **fields})


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def some_segment(seed, **forced):
    """A random segment: any mix of the features that the rule allows."""
    pick = random.Random(seed)
    chance = {name: pick.random() < 0.4 for name in ("causal_off", "left", "right", "chunk", "keep", "tail", "start")}
    chance |= {name: pick.random() < 0.3 for name in ("slot_map", "raw", "positions", "q_len", "tree", "branches")}
    chance |= {name: pick.random() < 0.2 for name in ("row_window", "shard")}
    chance |= forced
    rows = pick.randint(1, 5)
    queries = [pick.choice([0, 1, 2, 5, 9]) for _ in range(rows)]
    kv_len = [pick.choice([0, 1, 3, 8, 21]) for _ in range(rows)]
    offsets = [sum(queries[:i]) for i in range(rows + 1)]
    tokens = offsets[-1] + pick.randint(0, 2)
    mask_rows = torch.Generator().manual_seed(seed)
    view = tail = positions = None
    if not chance["raw"]:
        table = torch.randint(1, SLOTS, (rows + 2, 60), generator=mask_rows, dtype=torch.int32)
        order = pick.sample(range(1, rows + 2), rows)
        view = KVView(
            table,
            int32(order),
            1,
            start=int32([pick.randint(0, 9) for _ in range(rows)]) if chance["start"] else None,
            slot_map=torch.randperm(SLOTS, generator=mask_rows) if chance["slot_map"] else None,
            shard=pick.choice([(0, 2), (1, 2), (2, 3)]) if chance["shard"] and not chance["tail"] else None,
        )
    if chance["tail"] and view is not None:
        lens = [min(n, pick.randint(0, 4)) for n in queries]
        branches = chance["branches"] and not chance["tree"]
        size = max([1, *lens]) + 1
        shape = (tokens if branches else rows, size)
        tail = Tail(
            size,
            int32(lens),
            slots=None if pick.random() < 0.3 and not branches else torch.randint(1, SLOTS, shape, generator=mask_rows),
            per_query=branches,
            mask=torch.rand(tokens, size, generator=mask_rows) < 0.5 if chance["tree"] else None,
            positions=torch.randint(0, 25, (tokens,), generator=mask_rows).int() if pick.random() < 0.5 else None,
        )
        if branches:  # a branch's query stands at the end of its own tail
            tail = attrs.evolve(tail, positions=None)
            ends = [kv_len[r] + lens[r] - 1 for r in range(rows) for _ in range(queries[r])]
            positions = int32([*ends, *[0] * (tokens - len(ends))])
    if (chance["positions"] or (view is not None and view.shard)) and positions is None:
        positions = torch.randint(0, 25, (tokens,), generator=mask_rows).int()
    cu_seqlens_k = int32([sum(kv_len[:i]) for i in range(rows + 1)])
    segment = Segment(
        rows=rows,
        tokens=tokens,
        cu_seqlens_q=int32(offsets),
        max_seqlen_q=max(queries),
        kv_len=torch.tensor(kv_len),
        max_kv_len=max(kv_len),
        kv=view,
        visibility=Visibility(
            causal=not chance["causal_off"],
            window=(pick.randint(0, 6) if chance["left"] else None, pick.randint(0, 6) if chance["right"] else None),
            chunk=pick.choice([1, 3, 4, 7]) if chance["chunk"] else None,
            keep=int32([pick.randint(0, 12) for _ in range(rows)]) if chance["keep"] else None,
            row_window=int32([pick.randint(0, 6) for _ in range(rows)])
            if chance["left"] and chance["row_window"]
            else None,
        ),
        tail=tail,
        positions=positions,
        cu_seqlens_k=cu_seqlens_k if view is None else None,
        q_len=int32([pick.randint(0, n) for n in queries]) if chance["q_len"] and tail is None else None,
    )
    return segment.check("the test")


@pytest.mark.parametrize("seed", range(250))
def test_random_segments(seed):
    pick = random.Random(seed + 1000)
    layer = kind(
        num_q_heads=pick.choice([1, 2, 6]),
        v_head_dim=pick.choice([3, 4]),
        softcap=pick.choice([0.0, 2.0]),
        scale=pick.choice([0.5, 1.7]),
        sinks=pick.random() < 0.3,
    )
    sinks = torch.linspace(-2, 3, layer.num_q_heads) if layer.sinks else None
    segment = some_segment(seed)
    rule = segment.visibility
    if not rule.causal and rule.keep is not None and (rule.window[1] is not None or rule.chunk is not None):
        segment = attrs.evolve(segment, visibility=attrs.evolve(rule, keep=None))
    same(segment, layer, seed, sinks)


@pytest.mark.parametrize("other", [{"window": (2, 1)}, {"chunk": 4}], ids=["window", "chunk"])
def test_a_kept_prefix_beyond_the_right_end_without_causality(other):
    view = KVView(torch.arange(1, 61).view(1, 60).expand(2, -1).int(), int32([1]), 1)
    rule = Visibility(causal=False, keep=int32([12]), **other)
    segment = Segment(
        rows=1,
        tokens=1,
        cu_seqlens_q=int32([0, 1]),
        max_seqlen_q=1,
        kv_len=int32([20]),
        max_kv_len=20,
        kv=view,
        visibility=rule,
        positions=int32([3]),
    )
    same(segment, kind())


def test_branches_see_all_of_their_own_tail_and_nobody_elses():
    table = torch.arange(1, 61).view(1, 60).expand(2, -1).int()
    slots = torch.tensor([[100, 101], [200, 201], [300, 301]])
    segment = Segment(
        rows=1,
        tokens=3,
        cu_seqlens_q=int32([0, 3]),
        max_seqlen_q=3,
        kv_len=int32([5]),
        max_kv_len=5,
        kv=KVView(table, int32([1]), 1),
        tail=Tail(2, int32([2]), slots=slots, per_query=True),
        positions=int32([6, 6, 6]),
    )
    same(segment, kind())
    q, k = torch.zeros(3, 2, 4), torch.zeros(SLOTS, 1, 4)
    v = torch.zeros(SLOTS, 1, 4)
    v[slots.flatten(), 0, 0] = torch.tensor([1.0, 2, 10, 20, 100, 200])
    out, _ = run(segment, kind(), q, k, v)
    torch.testing.assert_close(out[:, 0, 0] * 7, torch.tensor([3.0, 30, 300]))


@pytest.mark.parametrize("queries", [127, 128, 129, 300])
@pytest.mark.parametrize("rule", [{}, {"window": (40, None)}, {"chunk": 50}], ids=["full", "window", "chunk"])
def test_blocks_of_queries(queries, rule):
    length = queries + 37
    table = torch.randperm(SLOTS - 1)[None, :length] + 1
    segment = Segment(
        rows=1,
        tokens=queries,
        cu_seqlens_q=int32([0, queries]),
        max_seqlen_q=queries,
        kv_len=int32([length]),
        max_kv_len=length,
        kv=KVView(table.expand(2, -1).int(), int32([1]), 1),
        visibility=Visibility(**rule),
    )
    q, k, v = (torch.randn(n, h, 4).double() for n, h in ((queries, 1), (SLOTS, 1), (SLOTS, 1)))
    out, lse = run(segment, kind(num_q_heads=1), q, k, v)
    p, t = torch.arange(37, length)[:, None], torch.arange(length)
    seen = t <= p
    if "window" in rule:
        seen &= t >= p - 40
    if "chunk" in rule:
        seen &= t // 50 == p // 50
    scores = (q[:, 0] @ k[table[0], 0].T / 2).masked_fill(~seen, -math.inf)
    torch.testing.assert_close(out[:, 0], scores.softmax(1) @ v[table[0], 0], atol=1e-10, rtol=0)
    torch.testing.assert_close(lse[:, 0].double(), scores.logsumexp(1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("seed", range(0, 60, 3))
def test_masks_made_again_equal_kept_ones(monkeypatch, seed):
    segment, layer = some_segment(seed), kind()
    generator = torch.Generator().manual_seed(seed)
    keys = SLOTS if segment.kv is not None else segment.tokens + 200
    q, k, v = (torch.randn(n, h, 4, generator=generator) for n, h in ((segment.tokens, 2), (keys, 1), (keys, 1)))
    kept = run(segment, layer, q, k, v)
    monkeypatch.setattr(reference_layout, "CACHED_MASK", 0)
    batches = list(reference_layout.Layout(segment).batches(2))
    assert all(batch.mask is None and batch.remake is not None for batch in batches)
    again = run(segment, layer, q, k, v)
    assert torch.equal(kept[0], again[0])
    assert torch.equal(kept[1], again[1])


def test_small_batches_equal_large_ones(monkeypatch):
    segment = some_segment(4, raw=False)
    same(segment, kind(), 4)
    monkeypatch.setattr(reference_layout, "BATCH_SCORES", 1)
    monkeypatch.setattr(reference_layout, "QUERY_BLOCK", 2)
    same(segment, kind(), 4)


def test_rows_of_padding_have_no_keys():
    table = torch.full((2, 8), 1 << 30, dtype=torch.int32)
    table[1, :3] = int32([5, 6, 7])
    segment = Segment(
        rows=3,
        tokens=3,
        cu_seqlens_q=int32([0, 1, 2, 3]),
        max_seqlen_q=1,
        kv_len=int32([1, 3, 4]),
        max_kv_len=4,
        kv=KVView(table, int32([0, 1, 0]), 1),
    )
    out, lse = run(segment, kind(), torch.randn(3, 2, 4), torch.randn(SLOTS, 1, 4), torch.randn(SLOTS, 1, 4))
    assert out[[0, 2]].eq(0).all() and lse[[0, 2]].eq(-math.inf).all()
    assert out[1].ne(0).all() and lse[1].isfinite().all()


@pytest.mark.parametrize("sink", [101.0, 300.0])
def test_a_tall_sink_leaves_the_lse_alone(sink):
    q, k = torch.zeros(1, 1, 1, 4), torch.zeros(1, 5, 1, 4)
    _, lse = attend(q, k, k, None, scale=1.0, sinks=torch.tensor([sink]))
    torch.testing.assert_close(lse, torch.full((1, 1, 1), math.log(5)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("sinks", [None, torch.tensor([3.0, -math.inf])])
def test_no_key_gives_zero_and_minus_infinity(sinks):
    q, k = torch.randn(1, 2, 2, 4), torch.randn(1, 3, 2, 4)
    out, lse = attend(q, k, k, torch.zeros(1, 2, 3, dtype=torch.bool), scale=1.0, sinks=sinks)
    assert out.eq(0).all()
    assert lse.eq(-math.inf).all()


def test_scores_far_beyond_exp():
    q, k = torch.full((1, 1, 1, 4), 1e3), torch.full((1, 2, 1, 4), 1e3)
    k[0, 1] = -1e3
    out, lse = attend(q, k, k, None, scale=1.0)
    assert out.eq(1e3).all() and lse.item() == pytest.approx(4e6)
