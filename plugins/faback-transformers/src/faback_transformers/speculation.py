"""A step of speculation: a tree of drafts per request, all verified in one pass, and what of it is kept."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from faback import SpeculativeConfig
from faback.pools import MHAPool
from faback_transformers.drafting import Drafter
from faback_transformers.requests import Request
from faback_transformers.scheduler import Chunk, Scheduler
from faback_transformers.tree import DraftTree


@attrs.frozen(eq=False)
class Draft:
    """A request's part of a verify pass.

    Attributes:
        chunk: its last token and room for the drafts after it.
        tree: as many nodes as the chunk has tokens, in the order of their slots.
    """

    chunk: Chunk
    tree: DraftTree


@attrs.frozen(eq=False)
class Speculation:
    """Greedy speculation over trees: the tokens are those of plain decoding, several of them per pass.

    A step in which every request generates becomes a verify pass; prompts run in ordinary steps. Drafts take only what
    is left over: tokens of the step's budget, free pages, room in a request's row. They never preempt anybody, so where
    nothing is left a request goes on as in plain decoding.

    Attributes:
        drafter: guesses continuations.
        scheduler: who runs, and who has which slots.
        pool: the keys and values.
    """

    drafter: Drafter
    scheduler: Scheduler
    pool: MHAPool

    def drafts(self, chunks: Sequence[Chunk]) -> list[Draft]:
        """A tree for each of a step's requests; nothing where prompts run too, or nobody has a guess.

        Args:
            chunks: of `Scheduler.schedule`; `Scheduler.allocate` wants those of the drafts instead.
        """
        if not all(chunk.samples and chunk.count == 1 for chunk in chunks):
            return []
        budget = self.scheduler.tokens_per_step - len(chunks)
        pages = self.scheduler.spare_pages(chunks)
        drafts = []
        for chunk in chunks:
            most, _ = self.scheduler.widened(chunk, min(self.drafter.max_nodes - 1, budget), pages)
            tree = self._tree(chunk.request, most.count)
            wide, pages = self.scheduler.widened(chunk, len(tree) - 1, pages)
            budget -= len(tree) - 1
            drafts.append(Draft(wide, tree))
        return drafts if any(len(draft.tree) > 1 for draft in drafts) else []

    def settle(self, drafts: Sequence[Draft], choices: Sequence[int]) -> list[list[int]]:
        """Keeps the keys and values of accepted nodes, in the slots where a plain pass would have put them.

        Args:
            drafts: as they were verified.
            choices: the model's token after each node, tree after tree.

        Returns:
            The new tokens of each request, at least one.
        """
        src, dst, first = list[int](), list[int](), 0
        lengths, won = [], []
        for draft in drafts:
            own = choices[first : first + len(draft.tree)]
            first += len(own)
            path = draft.tree.accepted(own)
            slots = draft.chunk.request.slots[draft.chunk.start :]
            moved = [(slots[node], slots[place]) for place, node in enumerate(path) if node != place]
            src += [old for old, _ in moved]
            dst += [new for _, new in moved]
            lengths.append(draft.chunk.start + len(path))
            won.append([own[node] for node in path])
        if src:
            self.pool.copy_slots(src, dst)
        for draft, length in zip(drafts, lengths, strict=True):
            self.scheduler.shrink(draft.chunk.request, length)
        return won

    def _tree(self, request: Request, max_nodes: int) -> DraftTree:
        """What the drafter says, as far as there is room and tokens are still wanted."""
        last, wanted = request.tokens[-1], request.wanted - 1
        ask = max_nodes > 1 and wanted > 0
        continuations = self.drafter.draft(request.tokens, max_nodes - 1) if ask else ()
        return DraftTree.merged(last, continuations, max_nodes=max_nodes, max_depth=wanted)


def sizes(drafter: Drafter) -> SpeculativeConfig:
    """The sizes of a drafter's trees, as the backend wants to know them."""
    nodes = drafter.max_nodes
    return SpeculativeConfig(topk=2, num_steps=nodes - 1, num_draft_tokens=nodes)  # topk 1 would promise chains
