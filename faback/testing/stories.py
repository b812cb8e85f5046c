"""One story per forward mode: which passes a scenario of that mode consists of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from faback.testing.options import Options
from faback.testing.prefill_aware import prefill_aware
from faback.testing.script import RowScript, Script, StepScript, decode_step, extend_step
from faback.testing.speculative import draft_step, verify_step


def decode(script: Script) -> None:
    """Requests of many lengths, each with one new token."""
    decode_step(script, [script.request(cached=cached) for cached, _ in _cached(script)])


def extend(script: Script) -> None:
    """No prefix, some prefix, all prefix."""
    _extend(script, script.lengths(new=True), "extend")


def mixed(script: Script) -> None:
    """Decode rows, short prompts, last one-token chunks and fully cached rows among extends, in any order."""
    lengths = script.lengths(new=True)
    if script.options.lengths is None:
        lengths = [script.rng.choice([pair, (sum(pair) - 1, 1), (0, 3), (sum(pair), 0)]) for pair in lengths]
    _extend(script, lengths, "mixed")


def draft_extend(script: Script) -> None:
    """The accepted tokens of each request, some none."""
    limit = script.options.num_draft_tokens
    lengths = script.lengths(least=1)
    if script.options.lengths is None:
        lengths = [(cached, script.rng.randint(0, limit)) for cached, _ in lengths]
    _extend(script, lengths, "draft_extend")


def draft_decode(script: Script) -> None:
    """One step of drafting behind texts of many lengths."""
    draft_step(script, [script.request(cached=cached) for cached, _ in script.lengths()])


def target_verify(script: Script) -> None:
    """Drafted tokens behind texts of many lengths, no text among them."""
    draw = script.options.lengths is None
    lengths = [0 if draw and script.rng.random() < 0.15 else cached for cached, _ in script.lengths()]
    verify_step(script, [script.request(cached=cached) for cached in lengths])


def embedding(script: Script) -> None:
    """Whole texts, of which nothing is kept."""
    _extend(script, [(0, sum(pair)) for pair in script.lengths(new=True)], "embedding")


def idle(script: Script) -> None:
    """Work, then nothing, then work again on the same backend."""
    requests = [script.request(cached=cached) for cached, _ in _cached(script)]
    decode_step(script, requests)
    padding = script.padding()
    fields = script.shared_fields(padding, [0 for _ in padding])
    fields["out_cache_loc"] = [0 for _ in padding]
    rows = tuple(RowScript(request=None, queries=(None,)) for _ in padding)
    script.steps.append(StepScript(mode="idle", rule="extend", rows=rows, fields=fields, table={}))
    extend_step(script, [(request, script.rng.randint(0, 3)) for request in requests])


def _cached(script: Script) -> list[tuple[int, int]]:
    """Lengths of decode requests: the new token is not among the cached ones."""
    if script.options.lengths is not None:
        return script.lengths()
    return [(length - 1, 1) for length, _ in script.lengths()]


def _extend(script: Script, lengths: list[tuple[int, int]], mode: str) -> None:
    news = []
    for cached, new in lengths:
        news.append((script.request(cached=cached, encoder_cached=cached > 0), new))
    fresh = [request for request, _ in news if request.text == 0]
    extend_step(script, news, mode=mode, fresh_encoder=fresh)


STORIES: Mapping[str, Callable[[Script], None]] = MappingProxyType(
    {
        "decode": decode,
        "extend": extend,
        "mixed": mixed,
        "idle": idle,
        "draft_decode": draft_decode,
        "target_verify": target_verify,
        "draft_extend": draft_extend,
        "embedding": embedding,
    }
)


def told(options: Options) -> Script:
    """The script of a scenario."""
    script = Script(options)
    if options.overlay == "prefill_aware":
        prefill_aware(script)
    else:
        STORIES[options.mode](script)
    return script
