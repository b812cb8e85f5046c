"""Guesses at what a request will say next, without another model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import attrs

from faback import ConfigError


class Drafter(Protocol):
    """Whoever guesses. What it returns never changes the tokens of a request, only how many come at once."""

    @property
    def max_nodes(self) -> int:
        """Tokens of one request in one pass at most, its last token among them; at least 2."""
        ...

    def draft(self, tokens: Sequence[int], limit: int) -> Sequence[Sequence[int]]:
        """Continuations of a request, in tokens of the model's vocabulary, the likeliest first; none is an answer too.

        They are merged into a tree of at most `limit` drafts, so those that begin alike cost little.

        Args:
            tokens: prompt and output so far. Not to be changed or kept.
            limit: drafts that there is room for, at least 1.
        """
        ...


def _at_least(least: int) -> Any:
    def check(instance: object, attribute: attrs.Attribute[int], value: object) -> None:
        if not isinstance(value, int) or value < least:
            raise ConfigError(f"PromptLookup.{attribute.name}", wanted=f"an integer, at least {least}", got=value)

    return check


@attrs.frozen(kw_only=True)
class PromptLookup:
    """A `Drafter` that expects a request to repeat itself: what followed the same words before will follow again.

    Places where the request's last tokens stood before are ranked by how many tokens agree, the latest first among
    equals. What is drafted grows with the square of that number: one token in common proves little, and a wrong draft
    costs as much as a right one.

    Attributes:
        branches: different continuations at most.
        length: tokens of a continuation at most.
        min_match: tokens that must agree.
        max_match: tokens that are compared; a place with this many gives a continuation of full length.
    """

    branches: int = attrs.field(default=2, validator=_at_least(1))
    length: int = attrs.field(default=8, validator=_at_least(1))
    min_match: int = attrs.field(default=1, validator=_at_least(1))
    max_match: int = attrs.field(default=5, validator=_at_least(1))

    def __attrs_post_init__(self) -> None:
        if self.min_match > self.max_match:
            raise ConfigError("PromptLookup.min_match", wanted=f"<= max_match, {self.max_match}", got=self.min_match)

    @property
    def max_nodes(self) -> int:
        """As many as continuations have that share nothing."""
        return 1 + self.branches * self.length

    def draft(self, tokens: Sequence[int], limit: int) -> list[tuple[int, ...]]:
        """See `Drafter`."""
        ends = [end for end in range(len(tokens) - 1, 0, -1) if tokens[end - 1] == tokens[-1]]
        matches = [(self._match(tokens, end), end) for end in ends]
        matches.sort(key=lambda match: -match[0])
        found: dict[tuple[int, ...], None] = {}
        for match, end in matches:
            if match < self.min_match or len(found) == self.branches:
                break
            found[self._continuation(tokens, end, match)] = None
        return list(found)

    def _match(self, tokens: Sequence[int], end: int) -> int:
        """Tokens before `end` that agree with the last tokens."""
        most = min(self.max_match, end)
        return next((n for n in range(most) if tokens[end - 1 - n] != tokens[-1 - n]), most)

    def _continuation(self, tokens: Sequence[int], end: int, match: int) -> tuple[int, ...]:
        """What stood from `end` on; where that is less than what is wanted, it is taken to repeat."""
        length = max(1, self.length * match**2 // self.max_match**2)
        period = len(tokens) - end
        return tuple(tokens[end + step % period] for step in range(length))
