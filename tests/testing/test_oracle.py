"""The oracle against loops that anyone can check by eye."""

from __future__ import annotations

import math

import pytest
import torch

from faback import AttentionLayer
from faback.testing import Facts, Token, World, oracle_attention, visibility_matrix
from faback.testing.visibility import DRAFT

WINDOWED = AttentionLayer(layer_id=0, num_q_heads=1, num_kv_heads=1, head_dim=4, window=4)


def naive(q, keys, values, visible, scale, softcap, sinks):
    """One query, one head, one key at a time."""
    heads, kv_heads = q.shape[1], keys.shape[1]
    out = torch.zeros(q.shape[0], heads, values.shape[2], dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    for i in range(q.shape[0]):
        for h in range(heads):
            kv = h // (heads // kv_heads)
            weights = {}
            for j in range(keys.shape[0]):
                if visible[i, j]:
                    score = scale * sum(a * b for a, b in zip(q[i, h].tolist(), keys[j, kv].tolist(), strict=True))
                    weights[j] = math.exp(softcap * math.tanh(score / softcap) if softcap else score)
            if not weights:
                continue
            lse[i, h] = math.log(sum(weights.values()))
            total = sum(weights.values()) + (math.exp(sinks[h]) if sinks is not None else 0.0)
            for j, weight in weights.items():
                out[i, h] += weight / total * values[j, kv]
    return out, lse


@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (6, 2), (5, 1)])
@pytest.mark.parametrize("softcap", [0.0, 0.7])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_equals_a_loop(heads, softcap, with_sinks):
    generator = torch.Generator().manual_seed(heads[0])
    q = torch.randn(3, heads[0], 4, generator=generator, dtype=torch.float64)
    keys = torch.randn(5, heads[1], 4, generator=generator, dtype=torch.float64)
    values = torch.randn(5, heads[1], 3, generator=generator, dtype=torch.float64)
    visible = torch.rand(3, 5, generator=generator) < 0.6
    visible[1] = False
    sinks = torch.randn(heads[0], generator=generator, dtype=torch.float64) if with_sinks else None
    got = oracle_attention(q, keys, values, visible, scale=0.4, softcap=softcap, sinks=sinks)
    wanted = naive(q, keys, values, visible, 0.4, softcap, sinks)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("keys", [0, 3])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_a_query_that_sees_nothing_gets_zero_and_minus_infinity(keys, with_sinks):
    sinks = torch.ones(2) if with_sinks else None
    visible = torch.zeros(1, keys, dtype=torch.bool)
    out, lse = oracle_attention(
        torch.ones(1, 2, 4), torch.ones(keys, 1, 4), torch.ones(keys, 1, 4), visible, scale=1.0, sinks=sinks
    )
    assert out.eq(0).all()
    assert lse.eq(-math.inf).all()


def test_sinks_leave_the_lse_alone_and_shrink_the_output():
    args = torch.randn(1, 1, 4), torch.randn(3, 1, 4), torch.ones(3, 1, 4), torch.ones(1, 3, dtype=torch.bool)
    out, lse = oracle_attention(*args, scale=1.0)
    with_sink, lse_with_sink = oracle_attention(*args, scale=1.0, sinks=lse[0].float())
    torch.testing.assert_close(lse, lse_with_sink)
    torch.testing.assert_close(with_sink, out / 2, rtol=0, atol=1e-6)


def listed(queries, keys, rule, facts):
    """Positions of the keys that get weight when values are one-hot by key."""
    visible = visibility_matrix(queries, keys, WINDOWED, facts, rule)
    values = torch.eye(len(keys))[:, None, :]
    out, _ = oracle_attention(torch.randn(len(queries), 1, 4), torch.randn(len(keys), 1, 4), values, visible, scale=0.5)
    return [[keys[j].position for j in row[0].nonzero().flatten().tolist()] for row in out]


def test_one_hot_values_list_the_window():
    """W = 4 and kv = 10: five keys, the query's own among them."""
    text = [Token(0, position) for position in range(10)]
    assert listed(text[9:], text, "decode", Facts()) == [[5, 6, 7, 8, 9]]
    assert listed(text[7:], text, "extend", Facts()) == [[3, 4, 5, 6, 7], [4, 5, 6, 7, 8], [5, 6, 7, 8, 9]]
    chain = [Token(0, 8 + step, DRAFT, branch=step, step=step) for step in range(2)]
    keys = [*text[:8], *chain]
    assert listed(chain, keys, "verify_chain", Facts(committed=8)) == [[4, 5, 6, 7, 8], [5, 6, 7, 8, 9]]


@pytest.mark.parametrize(("window", "count"), [(0, 1), (1, 2), (8, 9), (9, 10), (10, 10)])
def test_window_counts_its_left_neighbours(window, count):
    text = [Token(0, position) for position in range(10)]
    layer = AttentionLayer(layer_id=0, num_q_heads=1, num_kv_heads=1, head_dim=4, window=window)
    assert visibility_matrix(text[9:], text, layer, Facts(), "decode").sum() == count


def test_vectors_are_an_identity_of_their_own():
    world, again = World(3), World(3)
    for position in range(4):
        world.add(Token(0, position))
        world.add(Token(0, position))
        again.add(Token(0, position))
    assert len(world) == 4
    k, v = world.vectors(1, 2, 8, 4, latent=False)
    torch.testing.assert_close((k, v), again.vectors(1, 2, 8, 4, latent=False), rtol=0, atol=0)
    assert not torch.equal(k, world.vectors(2, 2, 8, 4, latent=False)[0])
    latent_k, latent_v = world.vectors(1, 1, 8, 6, latent=True)
    assert torch.equal(latent_k[..., :6], latent_v)
