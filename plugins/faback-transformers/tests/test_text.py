"""Text of a token stream."""

from __future__ import annotations

from faback_transformers.text import TextStream


class Bytes:
    """A tokenizer with one token per byte; token 0 is special."""

    def decode(self, tokens, **options):
        return bytes(token for token in tokens if token).decode(errors="replace")


def pieces(tokens):
    stream = TextStream(Bytes())
    return [stream.push(token, last=index == len(tokens) - 1) for index, token in enumerate(tokens)]


def test_a_character_waits_for_its_last_byte():
    assert pieces(list("aé€b".encode())) == ["a", "", "é", "", "", "€", "b"]


def test_special_tokens_have_no_text():
    assert pieces([97, 0]) == ["a", ""]


def test_half_a_character_comes_out_at_the_end():
    assert "".join(pieces([97, 0xE2, 0x82])) == "a\N{REPLACEMENT CHARACTER}"


def test_no_tokenizer_no_text():
    assert TextStream(None).push(1) == ""
