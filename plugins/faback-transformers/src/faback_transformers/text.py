"""Text of a token stream, piece by piece."""

from __future__ import annotations

from typing import Any


class TextStream:
    """Turns one request's tokens into text as they come. A character made of several tokens waits for its last.

    Args:
        tokenizer: a Transformers tokenizer; None gives no text at all.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = 0  # tokens whose text is out
        self._context = 0  # decoding starts here: a token's text depends on its left neighbours

    def push(self, token: int, *, last: bool = False) -> str:
        """The text that this token completes.

        Args:
            token: the next token.
            last: no token follows: half a character comes out as it is.
        """
        if self._tokenizer is None:
            return ""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._context : self._shown])
        now = self._decode(self._tokens[self._context :])
        if len(now) <= len(before) or (now.endswith("\N{REPLACEMENT CHARACTER}") and not last):
            return ""
        self._context, self._shown = self._shown, len(self._tokens)
        return now[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        assert self._tokenizer is not None
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text
