"""Drafters for tests: some know the answer."""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs

VOCABULARY = 97


@attrs.frozen
class Seer:
    """Knows what requests will say, and says so among lies.

    Attributes:
        answers: prompt and answer of each request.
        depth: true tokens in the longest continuation.
        lies: other continuations, most of which begin with some true tokens. They come first.
    """

    answers: tuple[tuple[int, ...], ...]
    depth: int = 3
    lies: int = 3

    @classmethod
    def of(cls, prompts, answers, **options):
        return cls(tuple((*p, *a) for p, a in zip(prompts, answers, strict=True)), **options)

    @property
    def max_nodes(self) -> int:
        return 1 + self.depth + self.lies * (self.depth + 2)

    def draft(self, tokens: Sequence[int], limit: int) -> list[tuple[int, ...]]:
        rng = random.Random(len(tokens))
        true = self.truth(tokens)[: self.depth]
        return [*(self.lie(true, rng) for _ in range(self.lies)), true]

    def truth(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """What is left of the longest answer that begins like this."""
        known = [answer for answer in self.answers if answer[: len(tokens)] == tuple(tokens)]
        return max(known, key=len)[len(tokens) :]

    def lie(self, true: tuple[int, ...], rng: random.Random) -> tuple[int, ...]:
        kept = rng.randint(0, max(0, len(true) - 1))
        wrong = (true[kept] + rng.randrange(1, VOCABULARY)) % VOCABULARY if true else 0
        return (*true[:kept], wrong, *(rng.randrange(VOCABULARY) for _ in range(self.depth + 1 - kept)))


@attrs.frozen
class Liar(Seer):
    """Knows the answer and never begins with it."""

    def draft(self, tokens: Sequence[int], limit: int) -> list[tuple[int, ...]]:
        rng = random.Random(len(tokens))
        return [self.lie(self.truth(tokens)[:1], rng) for _ in range(self.lies)]


@attrs.frozen
class Guesser:
    """Anything, of any size, also more than there is room for."""

    max_nodes: int = 11

    def draft(self, tokens: Sequence[int], limit: int) -> list[list[int]]:
        rng = random.Random(sum(tokens))
        return [[rng.randrange(VOCABULARY) for _ in range(rng.randrange(9))] for _ in range(rng.randrange(6))]
