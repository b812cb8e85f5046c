"""Continuous batching of Transformers itself, where it lets other packages attend: its tokens are those of sdpa."""

from __future__ import annotations

import gc

import pytest
import torch
from tiny_models import PROMPTS
from transformers import AttentionInterface, ContinuousBatchingConfig, GenerationConfig

from faback import FabackError
from faback_transformers import continuous_batching
from faback_transformers.continuous import PAGED, ContinuousAttention, offered

NEW = 12
OFFERED = pytest.mark.skipif(not offered(), reason="this version of Transformers takes nobody else's attention there")
NAMES = ("llama", "seven_to_one", "gemma3", "gemma2", "gpt_oss")


class Watched(ContinuousAttention):
    """Counts layers that were read in place, and keeps the servers of a cache."""

    def __init__(self):
        super().__init__()
        self.calls = self.in_place = self.plans = 0
        self.pages = set()

    def _server(self, *args):
        server = super()._server(*args)
        self.calls += 1
        if not hasattr(server.backend, "watched"):
            server.backend.watched, plan = True, server.backend.plan

            def planned(batch):
                self.plans += 1
                self.in_place += batch.extras["pages"] is not None
                return plan(batch)

            server.backend.plan = planned
        return server


@pytest.fixture
def watched():
    """What serves "paged|faback" during a test."""
    attention = Watched()
    AttentionInterface.register(PAGED, attention)
    yield attention
    AttentionInterface.register(PAGED, ContinuousAttention())


def batched(model, prompts, **sizes):
    """Tokens of each prompt, in order."""
    config = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=32, **{"block_size": 4, **sizes})
    generation = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    asked = {"generation_config": generation, "continuous_batching_config": config}
    with continuous_batching(model):
        done = model.generate_batch([list(prompt) for prompt in prompts], **asked)
    assert len(done) == len(prompts)
    assert not [x.error for x in done.values() if x.error]
    found = {tuple(x.prompt_ids): tuple(x.generated_tokens) for x in done.values()}
    return [found[tuple(prompt)] for prompt in prompts]


@OFFERED
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_equal_transformers(models, expected, watched, name, block_size):
    """Prompts longer than a step's 32 tokens come in chunks; decode steps run beside them."""
    wanted = expected(name, PROMPTS, NEW)
    assert batched(models(name), PROMPTS, block_size=block_size) == wanted
    assert watched.in_place > 0, "full-attention layers are read in place"
    kinds = 1 if name in ("llama", "seven_to_one") else 2
    assert watched.plans == kinds * watched.calls / len(models(name).model.layers), (
        "one plan per pass and kind of layer"
    )


@OFFERED
def test_blocks_that_are_shared(models, expected):
    """Prompts that begin alike share blocks."""
    prompts = [PROMPTS[1], (*PROMPTS[1][:32], 3, 4, 5), PROMPTS[1][:35]]
    assert batched(models("llama"), prompts) == expected("llama", prompts, NEW)


@OFFERED
def test_nothing_outlives_the_cache(models, watched):
    model = models("llama")
    model.set_attn_implementation("sdpa")
    batched(model, PROMPTS[:2])
    gc.collect()
    assert len(watched._servers) == 0
    assert model.config._attn_implementation == "sdpa"


@OFFERED
def test_outside_it_says_what_to_do(models):
    with (
        torch.inference_mode(),
        continuous_batching(models("llama")) as model,
        pytest.raises(FabackError, match="generate_batch.*faback"),
    ):
        model(input_ids=torch.tensor([[1, 2]]))


@pytest.mark.skipif(offered(), reason="this version of Transformers takes other packages' attention")
def test_where_it_is_refused_the_way_out_is_named(models):
    model = models("llama")
    model.set_attn_implementation("sdpa")
    with pytest.raises(FabackError, match=r"wanted transformers 5\.17.*PagedGenerator"), continuous_batching(model):
        pass
    assert model.config._attn_implementation == "sdpa"


@OFFERED
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu(models, expected, name):
    wanted = expected(name, PROMPTS, NEW)
    model = models(name).to("cuda")
    try:
        found = batched(model, PROMPTS, block_size=16)
    finally:
        model.to("cpu")
    assert found == wanted
