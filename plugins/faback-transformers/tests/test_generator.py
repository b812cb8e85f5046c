"""The generator's tokens are those of Transformers, whatever the batching, and its pages come back."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from tiny_models import MODELS, PROMPTS

from faback import BatchError
from faback_transformers import PACKED, PagedGenerator, Sampling

NEW = 12


def generator(model, **options):
    page_size = options.get("page_size", 4)
    return PagedGenerator(model, **{"eos_token_ids": (), "num_pages": 400 // page_size, "page_size": 4, **options})


@pytest.mark.parametrize("tokens_per_step", [1, 7, 64])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_transformers(models, expected, name, tokens_per_step):
    wanted = expected(name, PROMPTS, NEW)
    with generator(models(name), tokens_per_step=tokens_per_step) as served:
        completions = served.generate(PROMPTS, max_new_tokens=NEW)
    assert [c.tokens for c in completions] == wanted
    assert [c.finished for c in completions] == ["length"] * len(PROMPTS)
    assert len({token for tokens in wanted for token in tokens}) > 10, "the test's model repeats itself"


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_page_sizes(models, expected, name, page_size):
    with generator(models(name), page_size=page_size, tokens_per_step=7) as served:
        completions = served.generate(PROMPTS, max_new_tokens=NEW)
        assert served.stats.pages_used == 0
        assert 0 < served.stats.pages_peak <= served.stats.pages_total
    assert [c.tokens for c in completions] == expected(name, PROMPTS, NEW)


def test_one_request(models, expected):
    with generator(models("llama"), max_requests=1) as served:
        (completion,) = served.generate(PROMPTS[:1], max_new_tokens=NEW)
    assert [completion.tokens] == expected("llama", PROMPTS[:1], NEW)


def test_requests_wait_for_a_row(models, expected):
    with generator(models("llama"), max_requests=2) as served:
        completions = served.generate(PROMPTS, max_new_tokens=NEW)
    assert [c.tokens for c in completions] == expected("llama", PROMPTS, NEW)


@pytest.mark.parametrize("num_pages", [13, 14, 17, 20])
def test_exhausted_pool_loses_nothing(models, expected, num_pages):
    """13 pages of 4 hold the longest request alone (40 + 12 - 1 tokens) and nothing beside it."""
    with generator(models("llama"), num_pages=num_pages, tokens_per_step=32) as served:
        completions = served.generate(PROMPTS, max_new_tokens=NEW)
        assert served.stats.pages_used == 0
        assert served.stats.pages_peak <= num_pages
    assert [c.tokens for c in completions] == expected("llama", PROMPTS, NEW)


def test_preempted_requests_resume(models, expected):
    prompts = [PROMPTS[0], PROMPTS[2], (4, 5), (6,)]
    with generator(models("llama"), num_pages=12, page_size=2) as served:
        completions = served.generate(prompts, max_new_tokens=20)
        assert served.stats.preemptions > 0
        assert served.stats.pages_used == 0
    assert [c.tokens for c in completions] == expected("llama", prompts, 20)


def test_preempted_sampling_draws_the_same_tokens(models):
    def drawn(num_pages):
        with generator(models("llama"), num_pages=num_pages, page_size=2) as served:
            sampling = Sampling(temperature=1.0, seed=7)
            return [c.tokens for c in served.generate([(1, 2), (3,), (4,)], max_new_tokens=16, sampling=sampling)]

    assert drawn(10) == drawn(100)


def test_what_can_never_fit_is_refused(models):
    with generator(models("llama"), num_pages=4) as served:
        served.submit([1] * 9, max_new_tokens=8)
        with pytest.raises(BatchError, match="context_len|num_pages"):
            served.submit([1] * 9, max_new_tokens=9)
        with pytest.raises(BatchError, match="prompt"):
            served.submit([], max_new_tokens=1)
        with pytest.raises(BatchError, match="tokenizer"):
            served.submit("text", max_new_tokens=1)
    with (
        generator(models("llama"), num_pages=4, context_len=1000) as served,
        pytest.raises(BatchError, match="num_pages"),
    ):
        served.submit([1] * 9, max_new_tokens=9)


def test_stops_at_eos(models, expected):
    (plain,) = expected("llama", PROMPTS[1:2], NEW)
    eos = plain[4]
    wanted = expected("llama", PROMPTS, NEW, eos=(eos,))
    with generator(models("llama"), eos_token_ids=(eos,)) as served:
        completions = served.generate(PROMPTS, max_new_tokens=NEW)
        assert served.stats.pages_used == 0
    assert [c.tokens for c in completions] == wanted
    ended = completions[1]
    assert (ended.finished, ended.tokens[-1]) == ("eos", eos)
    assert len(ended.tokens) < NEW


def test_events_come_in_order(models, expected):
    with generator(models("llama"), tokens_per_step=7) as served:
        ids = [served.submit(prompt, max_new_tokens=NEW) for prompt in PROMPTS]
        seen = defaultdict(list)
        for event in served.stream():
            assert not seen[event.request_id] or seen[event.request_id][-1].finished is None
            seen[event.request_id].append(event)
        for request_id, wanted in zip(ids, expected("llama", PROMPTS, NEW), strict=True):
            assert tuple(event.token for event in seen[request_id]) == wanted
            assert seen[request_id][-1].finished == "length"
            assert served.collect(request_id).tokens == wanted


def test_requests_join_while_others_run(models, expected):
    with generator(models("llama"), tokens_per_step=7) as served:
        first = served.submit(PROMPTS[1], max_new_tokens=NEW)
        joined = []
        for event in served.stream():
            if event.request_id == first and len(joined) < 2:
                joined.append(served.submit(PROMPTS[len(joined)], max_new_tokens=NEW))
        tokens = [served.collect(request_id).tokens for request_id in joined]
    assert tokens == expected("llama", PROMPTS[:2], NEW)


def test_cancel_frees_pages_and_leaves_the_others_alone(models, expected):
    with generator(models("llama")) as served:
        ids = [served.submit(prompt, max_new_tokens=NEW) for prompt in PROMPTS]
        for step, event in enumerate(served.stream()):
            if step == 11:
                before = served.stats.pages_used
                assert served.cancel(ids[1])
                assert served.stats.pages_used <= before - 10
            if event.request_id == ids[1] and event.finished:
                assert (event.finished, event.token) == ("cancelled", None)
        assert not served.cancel(ids[1])
        assert served.stats.pages_used == 0
        completions = [served.collect(request_id) for request_id in ids]
    wanted = expected("llama", PROMPTS, NEW)
    cancelled = completions.pop(1)
    assert cancelled.finished == "cancelled"
    assert cancelled.tokens == wanted.pop(1)[: len(cancelled.tokens)]
    assert [c.tokens for c in completions] == wanted


def test_cancel_while_waiting_or_between_chunks(models):
    with generator(models("llama"), max_requests=1, tokens_per_step=7) as served:
        long, waiting = served.submit(PROMPTS[1], max_new_tokens=2), served.submit(PROMPTS[0], max_new_tokens=2)
        served.step()
        assert served.stats.pages_used > 0
        assert served.cancel(long)
        assert served.cancel(waiting)
        assert served.stats.pages_used == 0
        assert [(e.request_id, e.finished) for e in served.stream()] == [(long, "cancelled"), (waiting, "cancelled")]
        with pytest.raises(BatchError, match="request_id"):
            served.cancel(99)


def test_collect_wants_a_finished_request(models):
    with generator(models("llama")) as served:
        request = served.submit([1], max_new_tokens=1)
        with pytest.raises(BatchError, match="finished"):
            served.collect(request)


def test_temperature_depends_on_the_request_alone(models):
    sampling = Sampling(temperature=0.8, seed=3)
    with generator(models("llama")) as served:
        (alone,) = served.generate(PROMPTS[:1], max_new_tokens=NEW, sampling=sampling)
        together = served.generate(PROMPTS, max_new_tokens=NEW, sampling=sampling)
        (greedy,) = served.generate(PROMPTS[:1], max_new_tokens=NEW)
    assert together[0].tokens == alone.tokens != greedy.tokens
    with pytest.raises(BatchError, match="temperature"):
        Sampling(temperature=-1.0)


def test_statistics_and_explanation(models):
    with generator(models("llama"), tokens_per_step=64) as served:
        with pytest.raises(BatchError, match="explain"):
            served.explain()
        served.generate(PROMPTS, max_new_tokens=NEW)
        stats = served.reset_stats()
        assert stats.prompt_tokens == sum(map(len, PROMPTS))
        assert stats.new_tokens == NEW * len(PROMPTS)
        assert stats.layer_calls == 3 * stats.steps
        assert stats.seconds > stats.attention_seconds > 0
        assert stats.as_dict()["tokens_per_second"] > 0
        assert served.stats.steps == 0
        why = served.explain()
    assert "decode" in str(why)
    assert why.kernel


def test_progress_bar(models, expected):
    pytest.importorskip("rich")
    with generator(models("llama")) as served:
        completions = served.generate(PROMPTS, max_new_tokens=NEW, progress=True)
    assert [c.tokens for c in completions] == expected("llama", PROMPTS, NEW)


def test_the_model_is_given_back(models):
    model = models("llama")
    model.set_attn_implementation("sdpa")
    with generator(model):
        assert model.config._attn_implementation == PACKED
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(models, expected):
    wanted = expected("llama", PROMPTS, NEW)
    model = models("llama").to("cuda")
    try:
        with generator(model, tokens_per_step=7) as served:
            completions = served.generate(PROMPTS, max_new_tokens=NEW)
    finally:
        model.to("cpu")
    assert [c.tokens for c in completions] == wanted
