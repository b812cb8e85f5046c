"""The same prompts through faback, all at once, and through Transformers' own `sdpa` generation, one at a time.

With a drafter, faback serves them twice: with speculation and without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import attrs
import torch

from faback import AttentionLayer
from faback.core.explain import Explanation
from faback_transformers.attention import NAME, PACKED
from faback_transformers.drafting import Drafter
from faback_transformers.generator import PagedGenerator
from faback_transformers.overhead import Overhead, host_overhead
from faback_transformers.requests import Completion, Event
from faback_transformers.stats import Stats
from faback_transformers.weights import LoadedModel


@attrs.frozen(kw_only=True)
class PromptResult:
    """One prompt.

    Attributes:
        prompt_tokens: its length.
        new_tokens: tokens that faback generated.
        finished: why it ended.
        text: what was generated.
        equal: the tokens are those of `sdpa`.
        first_difference: index of the first token that is not, None where all are.
    """

    prompt_tokens: int
    new_tokens: int
    finished: str
    text: str
    equal: bool
    first_difference: int | None


@attrs.frozen(kw_only=True)
class Gain:
    """What speculation was good for.

    Attributes:
        acceptance_length: mean tokens that a request gained by a verify pass.
        speed_up: time of plain decoding by faback over time with speculation, prefill included in both.
        plain_tokens_per_second: faback without speculation, prefill included.
        plain_steps: its forward passes.
        equal: every token is that of plain decoding.
    """

    acceptance_length: float
    speed_up: float
    plain_tokens_per_second: float
    plain_steps: int
    equal: bool


@attrs.frozen(kw_only=True)
class Comparison:
    """All prompts.

    Attributes:
        model: its name.
        device: where it ran.
        dtype: of weights and cache.
        kernel: what faback chose for decoding.
        reasons: why the other kernels were not chosen.
        explanation: faback's own account of the last batch.
        prompts: one result each.
        faback_tokens_per_second: all prompts together, their prefill included.
        sdpa_tokens_per_second: one prompt after another, their prefill included.
        stats: the generator's counters.
        overhead: host time of the facade.
        speculation: against plain decoding by faback; None where nothing was drafted ahead.
    """

    model: str
    device: str
    dtype: str
    kernel: str
    reasons: tuple[str, ...]
    explanation: str
    prompts: tuple[PromptResult, ...]
    faback_tokens_per_second: float
    sdpa_tokens_per_second: float
    stats: Stats
    overhead: Overhead
    speculation: Gain | None = None

    @property
    def equal(self) -> bool:
        """Every token of every prompt is that of `sdpa`, and that of plain decoding where both were run."""
        return all(result.equal for result in self.prompts) and (self.speculation is None or self.speculation.equal)

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {**attrs.asdict(self), "equal": self.equal, "stats": self.stats.as_dict()}


@attrs.frozen(kw_only=True)
class _Run:
    """One run of all prompts through faback."""

    completions: list[Completion]
    stats: Stats
    why: Explanation
    layers: Mapping[int, AttentionLayer]


def compare(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    on_event: Callable[[Event], None] = lambda event: None,
    on_note: Callable[[str], None] = lambda note: None,
    drafter: Drafter | None = None,
    **options: Any,
) -> Comparison:
    """Serves prompts all ways.

    Args:
        loaded: the model.
        prompts: token lists.
        max_new_tokens: of each.
        on_event: told every event as it comes; request ids count from 0 in the order of the prompts.
        on_note: told what is compared with, once `on_event` hears no more.
        drafter: speculates, and has plain decoding by faback compared too.
        options: of `PagedGenerator`.
    """
    run = _served(loaded, prompts, max_new_tokens, on_event, drafter=drafter, **options)
    gain = None
    if drafter is not None:
        on_note("comparing with plain decoding by faback")
        gain = _gain(run, _served(loaded, prompts, max_new_tokens, lambda event: None, **options))
    references, seconds = _references(loaded, prompts, max_new_tokens, on_note)
    dtype, why = loaded.model.dtype, run.why
    return Comparison(
        model=loaded.name,
        device=str(loaded.model.device),
        dtype=str(dtype).removeprefix("torch."),
        kernel=why.kernel,
        reasons=(*map(str, why.rejections), *(f"{name}: {reason}" for name, reason in why.absent.items())),
        explanation=str(why),
        prompts=tuple(_judged(ours, theirs) for ours, theirs in zip(run.completions, references, strict=True)),
        faback_tokens_per_second=run.stats.tokens_per_second,
        sdpa_tokens_per_second=sum(map(len, references)) / seconds,
        stats=run.stats,
        overhead=host_overhead(run.layers, requests=len(prompts), dtype=dtype, device=loaded.model.device),
        speculation=gain,
    )


def reference(loaded: LoadedModel, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """Greedy tokens of `model.generate`, with whatever attention implementation the model has."""
    inputs = torch.tensor([list(prompt)], device=loaded.model.device)
    tokens = loaded.model.generate(  # type: ignore[operator]
        inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(loaded.eos_token_ids) or None,
        pad_token_id=0,
    )
    return list(tokens[0, inputs.shape[1] :].tolist())


def _served(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    on_event: Callable[[Event], None],
    **options: Any,
) -> _Run:
    """All prompts through faback, after a short request that warms it up."""
    with PagedGenerator(
        loaded.model, eos_token_ids=loaded.eos_token_ids, tokenizer=loaded.tokenizer, **options
    ) as generator:
        generator.generate(prompts[:1], max_new_tokens=2)
        generator.reset_stats()
        ids = [generator.submit(prompt, max_new_tokens=max_new_tokens) for prompt in prompts]
        for event in generator.stream():
            on_event(attrs.evolve(event, request_id=event.request_id - ids[0]))
        completions = [generator.collect(request_id) for request_id in ids]
        why = generator.explain()
        return _Run(completions=completions, stats=generator.reset_stats(), why=why, layers=generator.layers)


def _gain(run: _Run, plain: _Run) -> Gain:
    return Gain(
        acceptance_length=run.stats.acceptance_length,
        speed_up=plain.stats.seconds / run.stats.seconds,
        plain_tokens_per_second=plain.stats.tokens_per_second,
        plain_steps=plain.stats.steps,
        equal=[c.tokens for c in run.completions] == [c.tokens for c in plain.completions],
    )


def _references(
    loaded: LoadedModel, prompts: Sequence[Sequence[int]], max_new_tokens: int, on_note: Callable[[str], None]
) -> tuple[list[list[int]], float]:
    """Tokens of every prompt by `sdpa`, and the seconds that took."""
    before = loaded.model.config._attn_implementation
    assert before not in (NAME, PACKED)
    loaded.model.set_attn_implementation("sdpa")
    reference(loaded, prompts[0], 2)
    seconds, found = 0.0, []
    for index, prompt in enumerate(prompts):
        on_note(f"comparing with sdpa, prompt {index + 1} of {len(prompts)}")
        start = perf_counter()
        found.append(reference(loaded, prompt, max_new_tokens))
        seconds += perf_counter() - start
    loaded.model.set_attn_implementation(before)
    return found, seconds


def _judged(ours: Completion, theirs: list[int]) -> PromptResult:
    tokens = list(ours.tokens)
    differing = [index for index, pair in enumerate(zip(tokens, theirs, strict=False)) if pair[0] != pair[1]]
    first = differing[0] if differing else None if len(tokens) == len(theirs) else min(len(tokens), len(theirs))
    return PromptResult(
        prompt_tokens=len(ours.prompt),
        new_tokens=len(tokens),
        finished=ours.finished,
        text=ours.text,
        equal=tokens == theirs,
        first_difference=first,
    )
