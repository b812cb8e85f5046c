"""Small random models, and what Transformers' own attention generates with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tiny_models import DENSE
from transformers import PreTrainedModel


@pytest.fixture(scope="session")
def models() -> Callable[[str], PreTrainedModel]:
    """Models by name, each made once."""
    made: dict[str, PreTrainedModel] = {}

    def get(name: str) -> PreTrainedModel:
        if name not in made:
            torch.manual_seed(1)
            made[name] = DENSE[name]().eval()
        return made[name]

    return get


@pytest.fixture(scope="session")
def expected(models: Callable[[str], PreTrainedModel]) -> Callable[..., list[tuple[int, ...]]]:
    """Greedy tokens of `model.generate` for each prompt, by the attention that Transformers takes as reference."""
    known: dict[Any, tuple[int, ...]] = {}

    def get(
        name: str, prompts: Sequence[Sequence[int]], max_new_tokens: int, eos: Sequence[int] = ()
    ) -> list[tuple[int, ...]]:
        model = models(name)
        # sdpa knows neither softcap nor sinks
        model.set_attn_implementation("eager" if name in ("gemma2", "gpt_oss") else "sdpa")
        for prompt in prompts:
            key = (name, tuple(prompt), max_new_tokens, tuple(eos))
            if key not in known:
                inputs = torch.tensor([list(prompt)])
                model.generation_config.eos_token_id = None
                tokens = model.generate(
                    inputs,
                    attention_mask=torch.ones_like(inputs),
                    do_sample=False,
                    max_new_tokens=max_new_tokens,
                    eos_token_id=list(eos) or None,
                    pad_token_id=0,
                )
                known[key] = tuple(tokens[0, len(prompt) :].tolist())
        return [known[name, tuple(prompt), max_new_tokens, tuple(eos)] for prompt in prompts]

    return get
