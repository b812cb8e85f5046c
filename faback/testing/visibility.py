"""Who sees whom, by token identity: the prose of every mode and overlay as small predicates.

Nothing here knows a slot, a page, a table or a length bound. A predicate gets two tokens and says whether the first
may attend to the second; there is one per mode, and one per overlay that narrows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import attrs

from faback.core.layer import LayerKind

TEXT, DRAFT, ENCODER = "text", "draft", "encoder"


@attrs.frozen(cache_hash=True)
class Token:
    """The identity of one token of one request.

    Attributes:
        request: number of the request in its scenario.
        position: absolute position in the request's text; for encoder tokens the index among them.
        kind: "text", "draft" or "encoder".
        branch: the branch of a drafted token; for a node of a verified tree its number.
        step: draft step of a drafted token.
    """

    request: int
    position: int
    kind: str = TEXT
    branch: int = 0
    step: int = 0

    def __str__(self) -> str:
        more = f" (branch or node {self.branch}, step {self.step})" if self.kind == DRAFT else ""
        return f"request {self.request} {self.kind} token {self.position}{more}"


@attrs.frozen(kw_only=True)
class Facts:
    """What is true of a request in one forward pass.

    Attributes:
        committed: length of its committed text, where tokens are drafted behind it.
        prompt: length of its prompt once that is complete, None before, or where the model is not prefill-aware.
        inclusive: the prefill-aware window counts W tokens besides the query and not with it.
        tree: `[nodes][nodes]`, node q sees node k, where a tree is verified.
    """

    committed: int = 0
    prompt: int | None = None
    inclusive: bool = False
    tree: tuple[tuple[bool, ...], ...] = ()


Predicate = Callable[[Token, Token, Facts], bool]


def sees_decode(query: Token, key: Token, facts: Facts) -> bool:
    """The query at L-1 sees [0, L-1]."""
    return key.kind == TEXT and 0 <= key.position <= query.position


def sees_extend(query: Token, key: Token, facts: Facts) -> bool:
    """The queries are the last tokens of the request; causal."""
    return key.kind == TEXT and key.position <= query.position


def sees_draft_chain(query: Token, key: Token, facts: Facts) -> bool:
    """Step s stands at L+s and sees [0, L+s]: the committed text and every drafted token so far."""
    if key.kind == TEXT:
        return key.position < facts.committed
    return key.step <= query.step


def sees_draft_branches(query: Token, key: Token, facts: Facts) -> bool:
    """The committed text and its own branch's steps 0 .. s; never another branch."""
    if key.kind == TEXT:
        return key.position < facts.committed
    return key.branch == query.branch and key.step <= query.step


def sees_verify_chain(query: Token, key: Token, facts: Facts) -> bool:
    """Drafted token j stands at L+j and sees [0, L+j]."""
    if key.kind == TEXT:
        return key.position < facts.committed
    return key.position <= query.position


def sees_verify_tree(query: Token, key: Token, facts: Facts) -> bool:
    """The committed text, and node c where the tree says so, in both directions of the diagonal."""
    if key.kind == TEXT:
        return key.position < facts.committed
    return facts.tree[query.branch][key.branch]


MODES: Mapping[str, Predicate] = MappingProxyType(
    {
        "decode": sees_decode,
        "extend": sees_extend,
        "mixed": sees_extend,
        "draft_extend": sees_extend,
        "embedding": sees_extend,
        "draft_chain": sees_draft_chain,
        "draft_branches": sees_draft_branches,
        "verify_chain": sees_verify_chain,
        "verify_tree": sees_verify_tree,
    }
)
"""Name of a rule -> predicate for causal self-attention layers without window or chunk."""


def in_window(query: Token, key: Token, layer: LayerKind, facts: Facts) -> bool:
    """Token p sees [p-W, p], a bidirectional layer [p-W, p+W].

    Prefill-aware, once the prompt is complete: [0, prompt) and [max(prompt, p+1-W), p].
    """
    if layer.window is None:
        return True
    if not layer.causal:
        return abs(query.position - key.position) <= layer.window
    if facts.prompt is None:
        return query.position - layer.window <= key.position
    first = query.position - layer.window + (0 if facts.inclusive else 1)
    return key.position < facts.prompt or key.position >= max(facts.prompt, first)


def in_chunk(query: Token, key: Token, layer: LayerKind) -> bool:
    """Local attention: p sees [C * (p // C), p]."""
    return layer.chunk is None or key.position // layer.chunk == query.position // layer.chunk


def sees(query: Token, key: Token, layer: LayerKind, facts: Facts, rule: str) -> bool:
    """Whether a query token sees a key token in a layer.

    Args:
        query: who looks.
        key: who is looked at.
        layer: its window, chunk and direction count, nothing else.
        facts: of the query's request.
        rule: a key of `MODES`.
    """
    if key.request != query.request:
        return False
    if layer.cross:
        return key.kind == ENCODER
    if key.kind == ENCODER:
        return False
    if layer.causal and not MODES[rule](query, key, facts):
        return False
    return in_window(query, key, layer, facts) and in_chunk(query, key, layer)
