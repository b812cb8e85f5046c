"""Passes of speculation: drafting step by step, and verification of chains and trees."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from faback.testing.script import PADDING_SLOT, Request, RowScript, Script, StepScript, facts_of
from faback.testing.visibility import DRAFT, Token

Tree = tuple[tuple[bool, ...], ...]


def draft_step(script: Script, requests: Sequence[Request]) -> None:
    """One step of drafting behind the committed text; the steps before it are cached already."""
    options, padding = script.options, script.padding()
    drawn = script.rng.randrange(options.num_steps)
    step = drawn if options.draft_step is None else options.draft_step
    rows, columns, table = [], [], {}
    for request in requests:
        branches = _branches(script, request)
        script.resident += [token for branch in branches for token in branch[:step]]
        rows.append(
            RowScript(
                request=request,
                queries=tuple(branch[step] for branch in branches),
                keys=(*script.known(request), *(token for branch in branches for token in branch[: step + 1])),
                facts=facts_of(script, request, later=True, committed=request.text),
            )
        )
        columns += [slot for branch in branches for slot in script.slots(branch)]
        live = request.text + (step + 1 if options.topk == 1 else 0)
        table[request.row] = script.columns(request, live)
    rows += [RowScript(request=None, queries=(None,) * options.topk) for _ in padding]
    columns += [PADDING_SLOT] * len(padding) * options.topk * options.num_steps
    queries = [query for row in rows for query in row.queries]
    lens = [request.text for request in requests] + [script.padded_length() for _ in padding]
    fields = script.shared_fields([*requests, *padding], lens)
    fields["out_cache_loc"] = columns
    fields["positions"] = [0 if query is None else query.position for query in queries]
    scalars = {"draft_step": step, "num_tokens": len(queries)}
    rule = "draft_chain" if options.topk == 1 else "draft_branches"
    script.steps.append(
        StepScript(mode="draft_decode", rule=rule, rows=tuple(rows), fields=fields, scalars=scalars, table=table)
    )


def _branches(script: Script, request: Request) -> list[list[Token]]:
    """Drafted tokens [topk][num_steps] of a request, placed: behind its row, or in pages of their own per branch."""
    options = script.options
    branches = [
        [script.world.add(_drafted(request, branch, step)) for step in range(options.num_steps)]
        for branch in range(options.topk)
    ]
    if options.topk == 1:
        for token in branches[0]:
            script.place.append(token)
        return branches
    known = script.known(request)
    partial = len(known) % options.page_size
    for branch in branches:
        script.place.branch(list(known[len(known) - partial :]), branch)
    return branches


def _drafted(request: Request, branch: int, step: int) -> Token:
    return Token(request.number, request.text + step, DRAFT, branch=branch, step=step)


def verify_step(script: Script, requests: Sequence[Request]) -> None:
    """All drafted tokens at once: a chain, a ragged chain, or a tree whose mask the batch brings."""
    options, padding = script.options, script.padding()
    size, chain = options.num_draft_tokens, options.topk == 1
    loose = options.padded_tokens if options.ragged else 0
    counts = [script.rng.randint(0, size) if options.ragged else size for _ in [*requests, *padding]]
    rows, table = [], {}
    for request, count in zip(requests, counts, strict=False):
        tree = () if chain else random_tree(count, script.rng)
        nodes = [script.world.add(_node(request, node, tree)) for node in range(count)]
        for token in nodes:
            script.place.append(token)
        facts = facts_of(script, request, later=True, committed=request.text, tree=tree)
        keys = (*script.known(request), *nodes)
        rows.append(RowScript(request=request, queries=tuple(nodes), keys=keys, facts=facts))
        table[request.row] = script.columns(request, request.text + count)
    rows += [RowScript(request=None, queries=(None,) * count) for count in counts[len(requests) :]]
    lens = [request.text for request in requests] + [script.padded_length() for _ in padding]
    queries = [query for row in rows for query in row.queries] + [None] * loose
    fields = script.shared_fields([*requests, *padding], lens)
    fields["out_cache_loc"] = script.slots(queries)
    fields["positions"] = [0 if query is None else query.position for query in queries]
    if options.ragged:
        fields["verify_lens"] = counts
    more: dict[str, Any] = {} if chain else {"custom_mask": flat_mask(rows, lens, script.rng)}
    script.steps.append(
        StepScript(
            mode="target_verify",
            rule="verify_chain" if chain else "verify_tree",
            rows=tuple(rows),
            loose=loose,
            fields=fields,
            table=table,
            **more,
        )
    )


def _node(request: Request, node: int, tree: Tree) -> Token:
    """A node stands at L plus the number of its visible ancestors; in a chain, at L plus its number."""
    above = sum(seen for other, seen in enumerate(tree[node]) if other != node) if tree else node
    return Token(request.number, request.text + above, DRAFT, branch=node, step=above)


def random_tree(size: int, rng: random.Random) -> Tree:
    """[size][size] bool: every node sees itself and its ancestors.

    Parents come before their children in half of the trees only, so that nobody may assume the lower triangle.
    """
    parents: list[int | None] = [None if node == 0 else rng.randrange(node) for node in range(size)]
    names = list(range(size))
    if rng.random() < 0.5:
        rng.shuffle(names)
    seen = [[False] * size for _ in range(size)]
    for node in range(size):
        above: int | None = node
        while above is not None:
            seen[names[node]][names[above]] = True
            above = parents[above]
    return tuple(tuple(line) for line in seen)


def flat_mask(rows: Sequence[RowScript], lens: Sequence[int], rng: random.Random) -> list[bool]:
    """Per row a [nodes, L + nodes] block, rows one after another; padded rows hold noise."""
    flat: list[bool] = []
    for row, length in zip(rows, lens, strict=True):
        count = len(row.queries)
        for node in range(count):
            if row.request is None:
                flat += [rng.random() < 0.5 for _ in range(length + count)]
            else:
                flat += [True] * length + list(row.facts.tree[node])
    return flat
