"""The next token of each request, from its logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from faback_transformers.requests import Request


def sample(logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
    """Chooses a token per request. Waits for the device.

    Args:
        logits: [requests, vocabulary].
        requests: how each chooses; their random numbers move on.
    """
    tokens: list[int] = logits.argmax(-1).tolist()
    for index, request in enumerate(requests):
        temperature = request.sampling.temperature
        if temperature > 0:
            if request.random is None:
                request.random = torch.Generator().manual_seed(request.sampling.seed)
            weights = (logits[index].float().cpu() / temperature).softmax(-1)
            tokens[index] = int(torch.multinomial(weights, 1, generator=request.random))
    return tokens
