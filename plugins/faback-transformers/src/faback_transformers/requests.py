"""A request, from submission to its last token."""

from __future__ import annotations

from typing import Literal

import attrs
import torch

from faback import BatchError

Finish = Literal["eos", "length", "cancelled"]


@attrs.frozen(kw_only=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: 0 takes the likeliest token; above it, logits are divided by it and a token is drawn.
        seed: of a request's own random numbers; what else is in the batch does not matter.
    """

    temperature: float = attrs.field(default=0.0)
    seed: int = 0

    @temperature.validator
    def _check(self, attribute: object, value: float) -> None:
        if not value >= 0:
            raise BatchError("sampling.temperature", wanted="0 (greedy) or above", got=value)


@attrs.frozen(kw_only=True)
class Event:
    """One step of one request's answer.

    Attributes:
        request_id: which request.
        token: the new token, None where none came (cancelled).
        text: the text that the token completed; "" inside a character, for special tokens, and without a tokenizer.
        finished: why this is the last event of the request, None if it is not.
    """

    request_id: int
    token: int | None
    text: str
    finished: Finish | None


@attrs.frozen(kw_only=True)
class Completion:
    """A finished request.

    Attributes:
        request_id: which request.
        prompt: its tokens.
        tokens: the generated ones, an end token included.
        text: of the generated tokens, "" without a tokenizer.
        finished: why it ended.
    """

    request_id: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    finished: Finish


@attrs.define(eq=False, kw_only=True)
class Request:
    """A request while it is served.

    Attributes:
        request_id: its name.
        tokens: prompt and output so far.
        prompt_len: tokens of the prompt.
        max_new_tokens: tokens to generate at most.
        eos: tokens that end it.
        sampling: how tokens are chosen.
        row: its row in the request table, None while it waits.
        slots: slot of each cached token.
        pieces: text of the output so far.
        finished: why it ended, None while it lives.
        random: its random numbers, made when first needed.
    """

    request_id: int
    tokens: list[int]
    prompt_len: int
    max_new_tokens: int
    eos: frozenset[int]
    sampling: Sampling
    row: int | None = None
    slots: list[int] = attrs.field(factory=list)
    pieces: list[str] = attrs.field(factory=list)
    finished: Finish | None = None
    random: torch.Generator | None = None

    @property
    def pending(self) -> int:
        """Tokens that have no keys and values yet; the next token is sampled after the last of them."""
        return len(self.tokens) - len(self.slots)

    @property
    def limit(self) -> int:
        """Most tokens whose keys and values will ever be held: the last sampled one needs none."""
        return self.prompt_len + self.max_new_tokens - 1

    @property
    def wanted(self) -> int:
        """Tokens still to be generated at most."""
        return self.prompt_len + self.max_new_tokens - len(self.tokens)

    def append(self, token: int) -> None:
        """Takes the next token and notices the end."""
        self.tokens.append(token)
        if token in self.eos:
            self.finished = "eos"
        elif self.wanted == 0:
            self.finished = "length"

    def completion(self) -> Completion:
        """The finished request."""
        assert self.finished is not None
        return Completion(
            request_id=self.request_id,
            prompt=tuple(self.tokens[: self.prompt_len]),
            tokens=tuple(self.tokens[self.prompt_len :]),
            text="".join(self.pieces),
            finished=self.finished,
        )
