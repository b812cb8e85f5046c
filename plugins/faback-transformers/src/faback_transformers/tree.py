"""Drafted continuations of one request as a tree, and the path through it that the model agrees with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs


@attrs.frozen(eq=False)
class DraftTree:
    """A trie: continuations that begin alike share nodes. Parents come before their children.

    Attributes:
        tokens: of each node. Node 0, the root, is no draft: it is the last token that the request has.
        parents: of each node; -1 above the root.
        depths: steps from the root to each node.
        children: the node of a token below a node, by (node, token).
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    depths: Sequence[int]
    children: Mapping[tuple[int, int], int]

    @classmethod
    def merged(cls, root: int, continuations: Iterable[Sequence[int]], *, max_nodes: int, max_depth: int) -> DraftTree:
        """The trie of some continuations, cut to a size.

        Args:
            root: the token that they continue.
            continuations: tokens that may follow, the likeliest first: it is the last ones that do not fit.
            max_nodes: nodes at most, the root among them.
            max_depth: drafts in one path at most.
        """
        tokens, parents, depths = [root], [-1], [0]
        children: dict[tuple[int, int], int] = {}
        for continuation in continuations:
            node = 0
            for token in continuation[:max_depth]:
                below = children.get((node, token))
                if below is None:
                    if len(tokens) == max_nodes:
                        break
                    below = children[node, token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                    depths.append(depths[node] + 1)
                node = below
        return cls(tokens, parents, depths, children)

    def __len__(self) -> int:
        """Nodes, the root among them."""
        return len(self.tokens)

    def mask(self) -> list[list[bool]]:
        """Which nodes (columns) each node (row) sees: its ancestors and itself."""
        size = len(self)
        rows: list[list[bool]] = []
        for node, parent in enumerate(self.parents):
            row = rows[parent].copy() if node else [False] * size
            row[node] = True
            rows.append(row)
        return rows

    def accepted(self, choices: Sequence[int]) -> list[int]:
        """The nodes that plain decoding would have come through, from the root on.

        Args:
            choices: the token that the model puts after each node. Those of the returned nodes are the new tokens: the
                accepted drafts, and one more that no draft foresaw.
        """
        path, node = [0], self.children.get((0, choices[0]))
        while node is not None:
            path.append(node)
            node = self.children.get((node, choices[node]))
        return path
