"""Who sees what, by definition: one request, its keys in the order of its text, float64 and plain loops.

Nothing here knows a slot, a table or a batch, and nothing of the package uses it: the tests judge the package by it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from faback_block_sparse.options import Options

Tensor = torch.Tensor


def bound(query: Tensor, keys: Tensor) -> float:
    """A number that q.k exceeds for none of the keys: the sum over dimensions of the larger of q * min and q * max.

    Args:
        query: [dim].
        keys: [n, dim], at least one.
    """
    least, greatest = keys.double().amin(0), keys.double().amax(0)
    return float(torch.maximum(query.double() * least, query.double() * greatest).sum())


def block_scores(
    keys: Sequence[Tensor], queries: Sequence[Tensor], known: int, *, block: int, page: int, scale: float
) -> list[float]:
    """The score of each block of which there are summaries.

    In every layer and head a block has the highest bound of its pages, times the scale of scores. Of that head's
    attention it has the share exp(bound) / sum of exp(bound) over all these blocks, and its score is the logarithm of
    its shares summed over heads and layers.

    Args:
        keys: per layer [tokens, num_kv_heads, dim].
        queries: per layer [num_q_heads, dim].
        known: tokens that have summaries.
        block, page: tokens of each.
        scale: factor on q.k.
    """
    starts = range(0, known, block)
    shares: list[list[float]] = [[] for _ in starts]
    for layer_keys, layer_queries in zip(keys, queries, strict=True):
        group = layer_queries.shape[0] // layer_keys.shape[1]
        for head, query in enumerate(layer_queries):
            mine = layer_keys[:known, head // group]
            bounds = [
                max(bound(query, mine[at : at + page]) for at in range(start, min(start + block, known), page)) * scale
                for start in starts
            ]
            total = _log_sum_exp(bounds)
            for found, one in zip(shares, bounds, strict=True):
                found.append(one - total)
    return [_log_sum_exp(found) for found in shares]


def seen_blocks(own: int, known: int, scores: Sequence[float], options: Options) -> set[int]:
    """The blocks that queries of block `own` see, as far as causality allows.

    Args:
        own: number of the block in which the queries stand.
        known: tokens of the request that have summaries.
        scores: of each block that has a summary.
        options: the sizes.
    """
    seen = {0} | set(range(max(0, own - options.local_blocks + 1), own + 1))
    if options.recent == "all":
        seen |= set(range(known // options.block_size, own + 1))
    others = [number for number in range(own) if number not in seen and number < len(scores)]
    return seen | set(sorted(others, key=lambda number: (-scores[number], number))[: options.top_k])


def visible(
    keys: Sequence[Tensor],
    queries: Sequence[Tensor],
    *,
    new: int,
    known: int,
    options: Options,
    page: int,
    scale: float,
) -> Tensor:
    """bool [new, tokens]: what each of a request's last `new` tokens sees.

    Args:
        keys: per layer [tokens, num_kv_heads, dim], those of the last `new` tokens included (they are not looked at).
        queries: per layer [num_q_heads, dim], the query summaries.
        new: tokens of the pass.
        known: tokens that have summaries, at most those before the new ones.
        options: the sizes.
        page: tokens per page.
        scale: factor on q.k.
    """
    tokens, size = keys[0].shape[0], options.block_size
    scores = block_scores(keys, queries, known, block=size, page=page, scale=scale)
    out = torch.zeros(new, tokens, dtype=torch.bool)
    for index, position in enumerate(range(tokens - new, tokens)):
        seen = seen_blocks(position // size, known, scores, options)
        for key in range(position + 1):
            out[index, key] = key // size in seen
    return out


def _log_sum_exp(values: Sequence[float]) -> float:
    if not values:
        return -math.inf
    highest = max(values)
    return highest + math.log(sum(math.exp(value - highest) for value in values))
