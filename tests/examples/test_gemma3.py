"""The Gemma 3 example: its comparison with random weights, and the script with real ones."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("faback_transformers")
import gemma3
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

WINDOW = 8  # tokens, the query itself among them
PROMPTS = [list(range(3, 3 + length)) for length in (1, 5, 8, 9, 29)]


def tiny(window):
    config = Gemma3TextConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=window,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        max_position_embeddings=128,
        initializer_range=0.5,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=1,
        tie_word_embeddings=False,  # or it says the same again and again
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Gemma3ForCausalLM(config).eval()


def test_prompts_around_and_beyond_the_window(capsys):
    options = {"page_size": 3, "tokens_per_step": 7}  # neither divides the window
    ours, theirs = gemma3.compare(tiny(WINDOW), PROMPTS, eos=1, max_new_tokens=14, **options)
    assert ours == theirs
    shown = capsys.readouterr().out
    assert "2 layers of 4 query heads: a token sees itself and 7 tokens before" in shown
    assert "1 layers of 4 query heads: a token sees all tokens" in shown
    wider, _ = gemma3.compare(tiny(64), PROMPTS, eos=1, max_new_tokens=14)
    assert wider[-1] != ours[-1]  # the window decides what is said


def test_a_difference_is_an_error(monkeypatch, capsys):
    class Words:
        eos_token_id = 1

        def __call__(self, text):
            return {"input_ids": [3 + ord(letter) % 50 for letter in text]}

        def decode(self, tokens):
            return str(tokens)

    monkeypatch.setattr(gemma3, "load", lambda folder: (tiny(WINDOW), Words()))
    assert gemma3.main(["a text", "b", "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out.count("tokens equal") == 2
    monkeypatch.setattr(gemma3, "compare", lambda model, prompts, **options: ([[5], [6]], [[5], [7]]))
    assert gemma3.main(["a text", "b"]) == 1
    assert "DIFFER" in capsys.readouterr().out


def test_a_long_prompt_is_longer_than_asked_for():
    def words(text):
        return {"input_ids": text.split()}

    assert 100 < len(gemma3.long_prompt(words, 100).split()) < 160


def test_what_is_not_installed_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(gemma3, "NEEDED", ("no-such-distribution",))
    with pytest.raises(SystemExit, match=r"no-such-distribution.*pip install"):
        gemma3.load(tmp_path)


@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.skipif("FABACK_SLOW" not in os.environ, reason="takes minutes and 2.6 GiB: set FABACK_SLOW=1 to run it")
@pytest.mark.skipif(gemma3.absent(), reason=f"not installed: {gemma3.absent()}")
def test_real_weights_beyond_the_window(capsys):
    assert gemma3.main([]) == 0
    shown = capsys.readouterr().out
    assert shown.count("tokens equal") == 3
    assert "yellow and blue" in shown and "carpenter" in shown
