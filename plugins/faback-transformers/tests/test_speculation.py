"""With drafts, good and bad, the tokens are those without, and no page is lost."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from drafters import Guesser, Liar, Seer
from tiny_models import MODELS, PROMPTS, repetitive

from faback import BatchError
from faback_transformers import PagedGenerator, PromptLookup, Sampling

NEW = 12
LONGEST = max(map(len, PROMPTS)) + NEW - 1


def generator(model, drafter, **options):
    page_size = options.get("page_size", 4)
    defaults = {"eos_token_ids": (), "num_pages": 400 // page_size, "page_size": 4}
    return PagedGenerator(model, drafter=drafter, **{**defaults, **options})


@pytest.fixture
def seer(expected):
    """Makes one that knows a model's answers."""

    def make(name, kind=Seer, prompts=PROMPTS, new=NEW, **options):
        return kind.of(prompts, expected(name, prompts, new), **options)

    return make


@pytest.mark.parametrize("tokens_per_step", [7, 64])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_transformers(models, expected, seer, name, page_size, tokens_per_step):
    with generator(models(name), seer(name), page_size=page_size, tokens_per_step=tokens_per_step) as served:
        completions = served.generate(PROMPTS, max_new_tokens=NEW)
        assert served.stats.acceptance_length > 1.1
        assert served.stats.pages_used == 0
    assert [c.tokens for c in completions] == expected(name, PROMPTS, NEW)
    assert [c.finished for c in completions] == ["length"] * len(PROMPTS)


@pytest.mark.parametrize("kind", [Seer, Liar, Guesser, PromptLookup])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_tokens_equal_plain_decoding(models, seer, name, kind):
    drafter = seer(name, kind) if issubclass(kind, Seer) else kind()
    prompts = [prompt * 2 for prompt in PROMPTS] if kind is PromptLookup else PROMPTS
    with generator(models(name), None) as plain:
        wanted = plain.generate(prompts, max_new_tokens=NEW)
    with generator(models(name), drafter) as served:
        assert served.generate(prompts, max_new_tokens=NEW) == wanted
        stats = served.stats
    assert stats.drafted_tokens > 0
    assert stats.pages_used == 0
    assert stats.new_tokens == plain.stats.new_tokens == NEW * len(PROMPTS)
    assert stats.prompt_tokens == plain.stats.prompt_tokens
    assert kind is not Liar or stats.accepted_tokens == 0
    assert kind is not Seer or stats.accepted_tokens > 0


@pytest.mark.parametrize("depth", [1, 4, 20])
def test_every_true_draft_saves_a_step(models, expected, seer, depth):
    """One request, no lies: each verify pass gives depth + 1 tokens, and the last what is left."""
    drafter = seer("llama", depth=depth, lies=0)
    with generator(models("llama"), drafter) as served:
        (completion,) = served.generate(PROMPTS[:1], max_new_tokens=NEW)
        stats = served.stats
    assert [completion.tokens] == expected("llama", PROMPTS[:1], NEW)
    passes = -(-(NEW - 1) // (depth + 1))  # the prompt's pass gives the first token
    assert (stats.steps, stats.new_tokens) == (1 + passes, NEW)
    plain = stats.steps - 1 - stats.verify_steps  # where one token is left, there is nothing to draft
    assert plain == ((NEW - 1) % (depth + 1) == 1)
    assert stats.accepted_tokens == NEW - 1 - passes
    assert stats.acceptance_length == pytest.approx(1 + stats.accepted_tokens / stats.verify_steps)


def test_look_up_pays_where_a_model_repeats_itself():
    model = repetitive()
    with generator(model, None) as plain:
        wanted = plain.generate([(1, 2, 3), (4, 5)], max_new_tokens=40)
    with generator(model, PromptLookup(branches=2, length=6)) as served:
        assert served.generate([(1, 2, 3), (4, 5)], max_new_tokens=40) == wanted
        assert served.stats.acceptance_length > 3
        assert served.stats.steps < plain.stats.steps / 3
    assert all(len(set(c.tokens[-20:])) <= 4 for c in wanted), "the test's model does not repeat itself"


@pytest.mark.parametrize("num_pages", [13, 14, 17, 20])
def test_exhausted_pool_loses_nothing(models, expected, seer, num_pages):
    """13 pages of 4 hold the longest request alone: drafts have what is left of its pages, and never more."""
    with generator(models("llama"), seer("llama"), num_pages=num_pages, tokens_per_step=32) as served:
        completions = served.generate(PROMPTS, max_new_tokens=NEW)
        assert served.stats.verify_steps > 0
        assert served.stats.pages_used == 0
        assert served.stats.pages_peak <= num_pages
    assert [c.tokens for c in completions] == expected("llama", PROMPTS, NEW)


@pytest.mark.parametrize("num_pages", [12, 13, 15])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_preempted_requests_resume(models, expected, seer, name, num_pages):
    prompts = [PROMPTS[0], PROMPTS[2], (4, 5), (6,)]
    drafter = seer(name, prompts=prompts, new=20)
    with generator(models(name), drafter, num_pages=num_pages, page_size=2) as served:
        completions = served.generate(prompts, max_new_tokens=20)
        assert served.stats.preemptions > 0
        assert served.stats.accepted_tokens > 0
        assert served.stats.pages_used == 0
    assert [c.tokens for c in completions] == expected(name, prompts, 20)


def test_drafts_preempt_nobody(models, seer):
    """12 pages of 4 hold three requests of 4 pages, so that plain decoding preempts none."""
    prompts = [(1, 2, 3), (3,), (4, 5)]
    with generator(models("llama"), seer("llama", prompts=prompts, depth=8), num_pages=12) as served:
        served.generate(prompts, max_new_tokens=NEW)
        assert served.stats.preemptions == 0 < served.stats.accepted_tokens


@pytest.mark.parametrize("spare", [0, 1, 5])
def test_the_end_of_the_context(models, expected, seer, spare):
    drafter = seer("gemma3", depth=9)
    with generator(models("gemma3"), drafter, context_len=LONGEST + spare, num_pages=100) as served:
        completions = served.generate(PROMPTS, max_new_tokens=NEW)
        assert served.stats.accepted_tokens > 0
    assert [c.tokens for c in completions] == expected("gemma3", PROMPTS, NEW)


@pytest.mark.parametrize("tokens_per_step", [1, 3, 6, 30])
def test_passes_are_no_larger_than_asked(models, expected, seer, tokens_per_step):
    with generator(models("llama"), seer("llama"), tokens_per_step=tokens_per_step) as served:
        ids = [served.submit(prompt, max_new_tokens=NEW) for prompt in PROMPTS]
        largest = 0
        for _ in served.stream():
            largest = max(largest, served.last_batch.input_ids.shape[1])
        completions = [served.collect(request_id) for request_id in ids]
    assert largest <= tokens_per_step
    assert [c.tokens for c in completions] == expected("llama", PROMPTS, NEW)


def test_stops_at_eos_inside_an_accepted_path(models, expected, seer):
    (plain,) = expected("llama", PROMPTS[1:2], NEW)
    eos = plain[4]
    with generator(models("llama"), seer("llama", depth=8, lies=1), eos_token_ids=(eos,)) as served:
        completions = served.generate(PROMPTS, max_new_tokens=NEW)
        assert served.stats.pages_used == 0
        assert served.stats.new_tokens == sum(len(c.tokens) for c in completions)
    assert [c.tokens for c in completions] == expected("llama", PROMPTS, NEW, eos=(eos,))
    assert (completions[1].finished, completions[1].tokens) == ("eos", plain[:5])


def test_events_come_one_per_token(models, expected, seer):
    with generator(models("llama"), seer("llama"), tokens_per_step=20) as served:
        ids = [served.submit(prompt, max_new_tokens=NEW) for prompt in PROMPTS]
        seen = defaultdict(list)
        for event in served.stream():
            seen[event.request_id].append(event)
    for request_id, wanted in zip(ids, expected("llama", PROMPTS, NEW), strict=True):
        assert tuple(event.token for event in seen[request_id]) == wanted
        assert [event.finished for event in seen[request_id]] == [None] * (NEW - 1) + ["length"]


def test_requests_join_while_others_are_verified(models, expected, seer):
    with generator(models("llama"), seer("llama"), tokens_per_step=20) as served:
        first = served.submit(PROMPTS[1], max_new_tokens=NEW)
        joined = []
        for event in served.stream():
            if event.request_id == first and served.stats.verify_steps and len(joined) < 2:
                joined.append(served.submit(PROMPTS[len(joined)], max_new_tokens=NEW))
        tokens = [served.collect(request_id).tokens for request_id in joined]
    assert tokens == expected("llama", PROMPTS[:2], NEW)


@pytest.mark.parametrize("after", [1, 8, 11, 20])
def test_cancel_frees_pages_and_leaves_the_others_alone(models, expected, seer, after):
    with generator(models("llama"), seer("llama")) as served:
        ids = [served.submit(prompt, max_new_tokens=NEW) for prompt in PROMPTS]
        last = {}
        for step, event in enumerate(served.stream()):
            if step == after:
                before = served.stats.pages_used
                assert served.cancel(ids[1])
                assert served.stats.pages_used <= before - 10
            last[event.request_id] = event
        assert (last[ids[1]].finished, last[ids[1]].token) == ("cancelled", None)
        assert served.stats.pages_used == 0
        completions = [served.collect(request_id) for request_id in ids]
    wanted = expected("llama", PROMPTS, NEW)
    cancelled = completions.pop(1)
    assert cancelled.tokens == wanted.pop(1)[: len(cancelled.tokens)]
    assert [c.tokens for c in completions] == wanted


def test_only_greedy_requests_are_taken(models):
    with generator(models("llama"), PromptLookup()) as served:
        with pytest.raises(BatchError, match="greedily: make the generator without a drafter"):
            served.submit((1, 2), max_new_tokens=2, sampling=Sampling(temperature=0.5))
        served.submit((1, 2), max_new_tokens=2, sampling=Sampling())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(models, expected, seer):
    drafter = seer("gemma3")
    model = models("gemma3").to("cuda")
    try:
        with generator(model, drafter, tokens_per_step=30) as served:
            completions = served.generate(PROMPTS, max_new_tokens=NEW)
            assert served.stats.accepted_tokens > 0
    finally:
        model.to("cpu")
    assert [c.tokens for c in completions] == expected("gemma3", PROMPTS, NEW)
