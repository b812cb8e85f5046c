"""The example engine: its tokens are those of a dense model, whatever is shared, cut, drafted or recorded."""

from __future__ import annotations

import random

import pytest
import torch
from drafts import tree
from engine import NODES, Engine
from small_model import Model

from faback.builtins import BUILTINS

NEW = 14


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    made = Model()
    for weight in made.parameters():
        weight.data.mul_(2)  # or a random model repeats its last token
    return made


@torch.inference_mode()
def dense(model, prompt, new):
    """Greedy tokens with all keys in one tensor and no cache."""
    tokens = list(prompt)
    for _ in range(new):
        places = torch.arange(len(tokens))

        def attend(layer, q, k, v, places=places):
            window = model.attention[layer].window
            seen = places <= places[:, None]
            if window is not None:
                seen &= places >= places[:, None] - window
            parts = (x.transpose(0, 1) for x in (q, k, v))
            out = torch.nn.functional.scaled_dot_product_attention(*parts, attn_mask=seen, enable_gqa=True)
            return out.transpose(0, 1)

        tokens.append(int(model(attend, torch.tensor(tokens), places)[-1].argmax()))
    return tokens


def texts(count, seed=0):
    """Some begin alike, some repeat themselves."""
    pick = random.Random(seed)
    beginning = [pick.randrange(97) for _ in range(21)]
    found = []
    for n in range(count):
        own = [pick.randrange(97) for _ in range(pick.randint(1, 30))]
        found.append((beginning + own, own, own * 3)[n % 3])
    return found


def serve(engine, prompts, new=NEW):
    requests = [engine.submit(prompt, new) for prompt in prompts]
    while engine.step():
        engine.allocator.check()
        engine.rows.check()
    assert engine.rows.available == engine.rows.num_requests
    return [request.tokens for request in requests]


@pytest.mark.parametrize("speculate", [False, True], ids=["plain", "speculative"])
@pytest.mark.parametrize("options", [{}, {"page_size": 1}, {"chunk": 5, "max_requests": 3}, {"page_size": 16}], ids=str)
def test_tokens_are_those_of_a_dense_model(model, options, speculate):
    prompts = texts(9)
    wanted = [dense(model, prompt, NEW) for prompt in prompts]
    assert serve(Engine(model, num_pages=512, speculate=speculate, **options), prompts) == wanted
    assert len({token for tokens in wanted for token in tokens[-NEW:]}) > 20, "the test's model repeats itself"


@pytest.mark.parametrize("speculate", [False, True], ids=["plain", "speculative"])
def test_where_room_is_short_texts_wait_and_pages_come_back(model, speculate):
    engine, prompts = Engine(model, num_pages=30, speculate=speculate), texts(8, seed=3)
    for _ in range(3):
        assert serve(engine, prompts) == [dense(model, prompt, NEW) for prompt in prompts]
    assert engine.allocator.used_pages == len(engine.prefixes._known)


def test_known_beginnings_are_not_run_again(model):
    engine, prompt = Engine(model, num_pages=512), list(range(40))
    first = serve(engine, [prompt])
    assert engine.reused == 0
    assert serve(engine, [prompt, [*prompt, 7]]) == [*first, dense(model, [*prompt, 7], NEW)]
    assert engine.reused == 36 + 40  # whole pages of 4; the last token is always run


def test_speculation_saves_passes(model):
    prompts = [[5, 6, 7, 8] * 8, [1, 2] * 10]
    plain, drafting = Engine(model), Engine(model, speculate=True)
    assert serve(plain, prompts, 30) == serve(drafting, prompts, 30)
    assert drafting.passes["target_verify"] < plain.passes["decode"]


def test_recorded_passes_give_the_same_tokens(model, monkeypatch):
    """On a CPU the plans are captured and brought up to date; nothing is recorded."""
    monkeypatch.setattr("faback.core.backend.BUILTINS", (*BUILTINS, "faback.testing.poor"))
    prompts = texts(6)
    wanted = [dense(model, prompt, NEW) for prompt in prompts]
    for speculate in (False, True):
        engine = Engine(model, num_pages=512, speculate=speculate, graphs=True, kernels="poor")
        assert serve(engine, prompts) == wanted
        assert engine.passes["graphs"] == engine.passes["decode"] + engine.passes["target_verify"] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("speculate", [False, True], ids=["plain", "speculative"])
def test_recorded_on_a_gpu(model, speculate):
    prompts = texts(6)
    there = Model().cuda()
    there.load_state_dict(model.state_dict())
    engine = Engine(there, num_pages=512, page_size=16, speculate=speculate, graphs=True)
    assert serve(engine, prompts) == [dense(model, prompt, NEW) for prompt in prompts]
    assert engine.passes["graphs"] > 0


def test_a_tree_of_what_came_before():
    drafted = tree([1, 2, 3, 9, 1, 2, 4, 1, 2], NODES)
    assert drafted.tokens[:7] == [2, 4, 1, 2, 3, 9, 1]
    assert drafted.parents == [-1, 0, 1, 2, 0, 4, 5, -1]
    assert drafted.depths == [0, 1, 2, 3, 1, 2, 3, 0]
    assert drafted.mask()[3].tolist() == [True, True, True, True, False, False, False, False]
    assert drafted.accepted([3, 0, 0, 0, 9, 5, 0, 0]) == [0, 4, 5]
    assert tree([1, 2, 3], NODES).tokens == [3] + [0] * 7
