"""Drafts without a draft model: what followed the last tokens of a text where they came before."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

TOPK, NGRAM = 2, 2
"""Continuations that are looked up, and tokens that a look-up matches."""


@attrs.frozen(eq=False)
class Tree:
    """Drafts as a tree; node 0 is the text's last token, the last nodes may be padding that nobody follows."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]

    def mask(self) -> Tensor:
        """bool [nodes, nodes]: each node sees its ancestors and itself."""
        seen = torch.eye(len(self.tokens), dtype=torch.bool)
        for node, parent in enumerate(self.parents[1:], 1):
            seen[node] |= seen[parent]
        return seen

    def accepted(self, chosen: Sequence[int]) -> list[int]:
        """The nodes that plain decoding would have come through."""
        path = [0]
        for node, parent in enumerate(self.parents):
            if node and parent == path[-1] and self.tokens[node] == chosen[parent]:
                path.append(node)
        return path


def tree(text: Sequence[int], nodes: int) -> Tree:
    """What followed the last tokens of a text where they came before, twice over."""
    tokens, parents, depths = [text[-1]], [-1], [0]
    places = [i for i in range(len(text) - NGRAM, 0, -1) if text[i - 1 : i - 1 + NGRAM] == text[-NGRAM:]]
    for place in [p for p in places if p + NGRAM - 1 < len(text)][:TOPK]:
        parent = 0
        for token in text[place + NGRAM - 1 :][: (nodes - 1) // TOPK]:
            tokens, parents, depths = [*tokens, token], [*parents, parent], [*depths, depths[parent] + 1]
            parent = len(tokens) - 1
    padding = nodes - len(tokens)
    return Tree(tokens + [0] * padding, parents + [-1] * padding, depths + [0] * padding)
