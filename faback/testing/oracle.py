"""The judge: dense attention in float64 over token identities. It never sees a slot, a page or a table."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from faback.core.layer import LayerKind
from faback.testing.visibility import Facts, Token, sees

Tensor = torch.Tensor


def oracle_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Attention by definition.

    score = scale * q.k, softcapped, then masked. A sink is one more logit in the denominator of the output; the
    log-sum-exp leaves it out. A query that sees nothing gets 0 and -inf.

    Args:
        q: [queries, heads, dim], any float dtype.
        keys: [keys, kv_heads, dim], kv_heads divides heads.
        values: [keys, kv_heads, v_dim].
        visible: bool [queries, keys].
        scale: factor on the scores.
        softcap: cap * tanh(score / cap) where it is not 0.
        sinks: [heads].
        dtype: what every intermediate result is rounded to. float64 judges; the dtype under test measures what plain
            torch would get wrong.

    Returns:
        out [queries, heads, v_dim] and natural-log LSE [queries, heads], float64.
    """
    queries, heads, _ = q.shape
    group = heads // keys.shape[1]
    expanded_k = keys.to(dtype).repeat_interleave(group, dim=1)
    expanded_v = values.to(dtype).repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->qhk", q.to(dtype), expanded_k) * scale
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~visible[:, None, :], -torch.inf)
    if keys.shape[0] == 0:
        return (
            torch.zeros(queries, heads, values.shape[2], dtype=torch.float64),
            torch.full((queries, heads), -torch.inf, dtype=torch.float64),
        )
    lse = torch.logsumexp(scores, dim=-1)
    total = lse if sinks is None else torch.logaddexp(lse, sinks.to(dtype).expand_as(lse))
    empty = ~visible.any(dim=1)
    weights = torch.exp(scores - total.unsqueeze(-1)).masked_fill(empty[:, None, None], 0.0)
    out = torch.einsum("qhk,khd->qhd", weights, expanded_v)
    return out.double(), lse.double()


def visibility_matrix(
    queries: Sequence[Token | None], keys: Sequence[Token], layer: LayerKind, facts: Facts, rule: str
) -> Tensor:
    """bool [queries, keys]; a query that is None (padding) sees nothing."""
    table = [[query is not None and sees(query, key, layer, facts, rule) for key in keys] for query in queries]
    return torch.tensor(table, dtype=torch.bool).view(len(queries), len(keys))


class World:
    """Token identities, each with keys and values of its own in every layer.

    Args:
        seed: decides all vectors.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._index: dict[Token, int] = {}

    def add(self, token: Token) -> Token:
        """Makes a token exist; the same identity exists once."""
        self._index.setdefault(token, len(self._index))
        return token

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, token: Token) -> bool:
        return token in self._index

    def index(self, tokens: Sequence[Token]) -> Tensor:
        """int64 [tokens]: rows of the tokens in what `vectors` returns."""
        return torch.tensor([self._index[token] for token in tokens], dtype=torch.int64)

    def vectors(self, layer_id: int, kv_heads: int, dim: int, v_dim: int, latent: bool) -> tuple[Tensor, Tensor]:
        """k [world, kv_heads, dim] and v [world, kv_heads, v_dim], float64; latent v is the leading part of k."""
        generator = torch.Generator().manual_seed((self._seed * 1009 + layer_id) % 2**31)
        k = torch.randn(len(self), kv_heads, dim, generator=generator, dtype=torch.float64)
        v = torch.randn(len(self), kv_heads, v_dim, generator=generator, dtype=torch.float64)
        return k, (k[..., :v_dim].clone() if latent else v)
