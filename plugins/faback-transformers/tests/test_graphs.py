"""Recorded passes give the same tokens. On a CPU nothing is recorded, but plans are captured and brought up to date."""

from __future__ import annotations

import pytest
import torch
from tiny_models import MODELS, PROMPTS, repetitive

from faback.builtins import BUILTINS
from faback_transformers import PagedGenerator, PromptLookup

NEW = 12
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(autouse=True)
def capturable(monkeypatch):
    """A kernel that can be captured on a CPU."""
    monkeypatch.setattr("faback.core.backend.BUILTINS", (*BUILTINS, "faback.testing.poor"))


def generator(model, **options):
    options = {"num_pages": 100, "page_size": 4, "max_requests": 6, "kernels": "poor", "context_len": 96, **options}
    return PagedGenerator(model, eos_token_ids=(), graphs=True, **options)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "gpt_oss"])
def test_tokens_are_the_same(models, expected, name):
    with generator(models(name)) as served:
        completions = served.generate(PROMPTS, max_new_tokens=NEW)
        assert 0 < served.stats.graph_steps < served.stats.steps
        assert served.stats.pages_used == 0
    assert [c.tokens for c in completions] == expected(name, PROMPTS, NEW)


def test_tokens_are_the_same_with_speculation():
    model = repetitive()
    prompts = [[5, 6, 7, 5, 6, 7, 5], [9, 9, 9], [1, 2, 3, 4, 1, 2]]
    with PagedGenerator(model, eos_token_ids=(), kernels="poor", num_pages=100, page_size=4) as plain:
        wanted = [c.tokens for c in plain.generate(prompts, max_new_tokens=NEW)]
    with generator(model, drafter=PromptLookup()) as served:
        found = [c.tokens for c in served.generate(prompts, max_new_tokens=NEW)]
        stats = served.stats
    assert found == wanted
    assert stats.verify_steps > 0 and stats.accepted_tokens > 0
    assert stats.graph_steps >= stats.verify_steps


def test_more_requests_than_were_recorded_wait(models, expected):
    with generator(models("llama"), max_requests=2) as served:
        completions = served.generate(PROMPTS, max_new_tokens=NEW)
    assert [c.tokens for c in completions] == expected("llama", PROMPTS, NEW)


def test_what_they_take_is_known(models):
    with generator(models("llama")) as served:
        assert sorted(served.graphs.runners) == ["decode"]
        assert served.graphs.memory.static > 0


@ON_GPU
@pytest.mark.gpu
@pytest.mark.parametrize("drafter", [None, PromptLookup()], ids=["decode", "verify"])
def test_real_graphs(drafter):
    model = repetitive().cuda()
    prompts = [[5, 6, 7, 5, 6, 7, 5], [9, 9, 9], [1, 2, 3, 4, 1, 2]]
    sizes = {"eos_token_ids": (), "num_pages": 100, "page_size": 16, "context_len": 96, "max_requests": 4}
    with PagedGenerator(model, **sizes) as plain:
        wanted = [c.tokens for c in plain.generate(prompts, max_new_tokens=NEW)]
    with PagedGenerator(model, graphs=True, drafter=drafter, **sizes) as served:
        found = [c.tokens for c in served.generate(prompts, max_new_tokens=NEW)]
        assert served.stats.graph_steps > 0
    assert found == wanted
