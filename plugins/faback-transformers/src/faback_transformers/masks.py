"""What a mask says, found out from the mask itself.

Transformers hands every layer a mask of queries x keys, or none. Most are a rule (causal, a window, a chunk, or no
limit) over one stretch of keys per row, with padding before or behind it. A kernel that knows the rule skips what
nobody sees; one that is given the mask has to look at all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

Tensor = torch.Tensor


@attrs.frozen(kw_only=True)
class Sight:
    """Who sees what in one attention of a batch. Equal where the numbers are, and the tensors the same ones.

    Attributes:
        keys: on the host, keys of a row at most.
        causal: a query sees no key behind it.
        window: inclusive distance to the left; to both sides unless causal; None is unbounded.
        chunk: chunk length, counted from a row's first key.
        start: int64 [batch], a row's first key; None for key 0.
        length: int64 [batch], how many follow; None for `keys`.
        stands: int64 [batch * queries], where each query is, counted from its row's first key; None where the queries
            of a row are its last tokens.
        seen: bool [batch * queries, keys], the mask itself, where it is no rule over a stretch of keys.
    """

    keys: int
    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    start: Tensor | None = attrs.field(default=None, eq=id)
    length: Tensor | None = attrs.field(default=None, eq=id)
    stands: Tensor | None = attrs.field(default=None, eq=id)
    seen: Tensor | None = attrs.field(default=None, eq=id)


def recognised(mask: Tensor) -> Sight:
    """The rule that a mask follows to the letter, or the mask as it is. Reads the device once.

    Args:
        mask: bool [batch, queries, keys], True where the query sees the key.
    """
    _, queries, keys = mask.shape
    query, key = torch.arange(queries, device=mask.device)[:, None], torch.arange(keys, device=mask.device)
    used = mask.any(1)
    start, last, length = _first(used), _last(used), used.sum(1)
    begin = _first(mask.any(2))  # the first query that sees anything
    ahead = _last(mask[torch.arange(mask.shape[0], device=mask.device), begin])
    place = query + (ahead - begin)[:, None, None]  # if causal, where each query is among the keys
    widest, reach = mask.sum(2).amax().clamp(min=1), (ahead - begin).amax()

    within, origin = used[:, None, :].expand_as(mask), start[:, None, None]
    causal = within & (key <= place)
    rules: dict[str, Callable[[], Tensor]] = {  # each as large as the mask, so made one after the other
        "all": lambda: within,
        "causal": lambda: causal,
        "neighbours": lambda: within & (key >= query - reach) & (key <= query + reach),
        "window": lambda: causal & (key > place - widest),
        "chunk": lambda: causal & ((key - origin) // widest == (place - origin) // widest),
    }
    facts = [
        (length == torch.where(length > 0, last + 1 - start, 0)).all(),
        *((rule() == mask).all() for rule in rules.values()),
        *(((last[:, None] == at[:, -1]) | (length == 0)[:, None]).all() for at in (place, query[None])),
    ]
    whole, *found = torch.stack([*facts, widest, reach]).tolist()
    name = next((name for name, fits in zip(rules, found, strict=False) if fits), None)
    if not whole or name is None:
        return Sight(keys=keys, seen=mask.flatten(0, 1).clone())
    *_, last_if_causal, last_if_not, width, distance = found
    stretch: dict[str, Any] = {"keys": keys, "start": start, "length": length}
    if name == "all":
        return Sight(causal=queries == 1, **stretch)  # which is the same for one query
    at, are_last = (query[None], last_if_not) if name == "neighbours" else (place, last_if_causal)
    stretch["stands"] = None if are_last else (at - origin).flatten()
    if name == "neighbours":
        return Sight(causal=False, window=distance, **stretch)
    return Sight(window=width - 1 if name == "window" else None, chunk=width if name == "chunk" else None, **stretch)


def _first(flags: Tensor) -> Tensor:
    """int64 [n]: index of the first True in bool [n, m]; 0 where there is none."""
    return flags.int().argmax(1)


def _last(flags: Tensor) -> Tensor:
    """int64 [n]: index of the last True in bool [n, m]; m - 1 where there is none."""
    return flags.shape[1] - 1 - flags.flip(1).int().argmax(1)
