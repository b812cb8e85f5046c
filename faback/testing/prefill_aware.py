"""Stories about layers that remember where the prompt ended: prompts first, then the mode under test."""

from __future__ import annotations

from faback.testing.script import EMPTY, Request, Script, decode_step, extend_step
from faback.testing.speculative import draft_step, verify_step


def prefill_aware(script: Script) -> None:
    """Prompts, one of them in two chunks; some decoding; a row that changes hands; then the mode under test.

    A complete prompt is one whose last chunk was extended. While it is being extended, windows are plain.
    """
    requests = [script.request() for _ in range(script.bs)]
    prompts = _prompts(script)
    early = [script.rng.randint(1, prompt) if index == 0 else prompt for index, prompt in enumerate(prompts)]
    _prompt(script, list(zip(requests, early, strict=True)))
    if early[:1] != prompts[:1]:
        _prompt(script, [(requests[0], prompts[0] - early[0])])
    if script.options.mode == "extend":
        return
    for _ in range(script.rng.randint(1, 3)):
        decode_step(script, requests)
    if requests:
        requests[-1] = _successor(script, requests[-1])
    _under_test(script, requests)


def _prompts(script: Script) -> list[int]:
    """Lengths of the prompts, short enough to leave room for what follows."""
    return [max(1, cached + new) for cached, new in script.lengths()]


def _prompt(script: Script, news: list[tuple[Request, int]]) -> None:
    extend_step(script, news)
    for request, _ in news:
        request.prompt = request.text


def _successor(script: Script, finished: Request) -> Request:
    """Another request takes over a finished one's row, and decodes once."""
    successor = script.request(row=finished.row)
    _prompt(script, [(successor, script.rng.randint(1, 3))])
    decode_step(script, [successor])
    return successor


def _under_test(script: Script, requests: list[Request]) -> None:
    mode, rng = script.options.mode, script.rng
    if mode == "draft_decode":
        draft_step(script, requests)
    elif mode == "target_verify":
        verify_step(script, requests)
    elif mode == "draft_extend":
        extend_step(script, [(r, rng.randint(0, 4)) for r in requests], mode="draft_extend", later=requests)
    elif mode == "mixed":
        _mixed(script, requests)
    else:
        decode_step(script, requests)


def _mixed(script: Script, requests: list[Request]) -> None:
    """Decode rows, a new prompt and the last chunk of one, then decoding again: no decode row counts as a prompt.

    The last chunk is a single token only where the batch says how long prompts are, since nothing else tells it from
    a decode row.
    """
    rng, told = script.rng, script.rng.random() < 0.5
    newcomer, resumed = script.request(), script.request()
    _prompt(script, [(resumed, rng.randint(1, 6))])
    news = [(request, 1) for request in requests]
    news += [(newcomer, rng.randint(2, 5)), (resumed, rng.randint(1 if told else 2, 4))]
    rng.shuffle(news)
    prompts = [request.prompt or 0 if request in requests else request.text + count for request, count in news]
    extend_step(script, news, mode="mixed", later=requests, extras={"prompt_lens": prompts} if told else EMPTY)
    for request in (newcomer, resumed):
        request.prompt = request.text
    decode_step(script, [*requests, newcomer, resumed])
