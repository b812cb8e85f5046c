"""What happens in a scenario, told in token identities: who asks, who is there, who is written, step by step."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs

from faback.testing.engine import Placement
from faback.testing.options import Options
from faback.testing.oracle import World
from faback.testing.visibility import ENCODER, Facts, Token

PADDING_ROW = 0
PADDING_SLOT = 0
EMPTY: Mapping[str, list[int]] = MappingProxyType({})


@attrs.define
class Request:
    """A request of the simulated engine.

    Attributes:
        number: its identity.
        row: its row in `req_to_token`.
        encoder: encoder tokens, which take the row's first columns.
        text: tokens of text so far, cached or about to be.
        prompt: length of the prompt, in prefill-aware scenarios once it is complete.
    """

    number: int
    row: int
    encoder: int = 0
    text: int = 0
    prompt: int | None = None


@attrs.frozen(kw_only=True)
class RowScript:
    """One row of a batch.

    Attributes:
        request: who; None for padding.
        queries: its query tokens, None for a padding token inside the row's span.
        keys: every token of the request that exists; who of them is seen is not decided here.
        facts: what the predicates need to know.
    """

    request: Request | None
    queries: tuple[Token | None, ...]
    keys: tuple[Token, ...] = ()
    facts: Facts = attrs.field(factory=Facts)


@attrs.frozen(kw_only=True)
class StepScript:
    """One forward pass.

    Attributes:
        mode: forward mode.
        rule: predicate of `faback.testing.visibility.MODES` that judges it.
        rows: in batch order, padding included.
        loose: padding tokens behind the last row.
        fields: index tensors of the batch, by field name.
        scalars: other fields of the batch.
        extras: index tensors among the batch's extras, by name.
        custom_mask: flat tree mask.
        encoder: encoder tokens that are written, in order; None where the pass brings none.
        table: live columns of the rows of `req_to_token`, by row.
        stores: new keys and values go to the cache.
    """

    mode: str
    rule: str
    rows: tuple[RowScript, ...]
    loose: int = 0
    fields: Mapping[str, list[int]]
    scalars: Mapping[str, Any] = attrs.field(factory=dict)
    extras: Mapping[str, list[int]] = EMPTY
    custom_mask: list[bool] | None = None
    encoder: tuple[Token, ...] | None = None
    table: Mapping[int, list[int]]
    stores: bool = True

    @property
    def queries(self) -> tuple[Token | None, ...]:
        """The token of every row of q."""
        return tuple(query for row in self.rows for query in row.queries) + (None,) * self.loose


class Script:
    """Builds steps over one simulated engine.

    Args:
        options: what is wanted.

    Attributes:
        world: the identities.
        place: where they lie.
        resident: tokens whose keys and values are cached before the first step.
        requests: all requests so far.
        steps: the forward passes so far.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.rng = random.Random(f"script {options.seed} {options.mode} {options.overlay} {options.page_size}")
        self.page = options.page_size
        self.world = World(options.seed)
        self.max_len = max(options.max_len, self.page + 2)
        if options.lengths is not None:
            self.max_len = max([self.max_len, *(cached + new for cached, new in options.lengths)])
        self.bs = self._batch_size()
        encoder = max([9, *(options.encoder_lengths or ())])
        columns = 2 * self.max_len + encoder + options.num_draft_tokens + options.num_steps
        branches = options.topk * (options.num_steps // self.page + 3)
        pages = (self.bs + 4) * (columns // self.page + 2 + branches) + 3
        self.place = Placement(self.page, pages, self.rng)
        self.num_rows = self.bs + 6
        self._free_rows = list(range(1, self.num_rows))
        self.rng.shuffle(self._free_rows)
        self.resident: list[Token] = []
        self.requests: list[Request] = []
        self.steps: list[StepScript] = []

    def lengths(self, *, least: int = 1, new: bool = False) -> list[tuple[int, int]]:
        """(cached, new) per request: the given ones, or drawn with a taste for edges."""
        if self.options.lengths is not None:
            return list(self.options.lengths)
        return [self._drawn_extend() if new else (self.length(least), 0) for _ in range(self.bs)]

    def length(self, least: int = 1) -> int:
        """A text length, often at an edge of a page, window or chunk."""
        chunk = self.options.chunk or 0
        edges = [1, self.page - 1, self.page, self.page + 1, 2 * self.page, chunk, chunk + 1, 2 * chunk, least]
        if self.rng.random() < 0.5:
            return max(least, min(self.rng.choice(edges), self.max_len))
        return self.rng.randint(least, max(least, self.max_len))

    def request(self, *, cached: int = 0, row: int | None = None, encoder_cached: bool = True) -> Request:
        """A new request with `cached` tokens of text in the cache already."""
        number = len(self.requests)
        if self.options.overlay != "cross":
            encoder = 0
        elif self.options.encoder_lengths is not None:
            encoder = self.options.encoder_lengths[number]
        else:
            encoder = self.rng.choice([0, 1, self.page + 1, 5, 9])
        request = Request(number, self._free_rows.pop() if row is None else row, encoder)
        self.requests.append(request)
        for index in range(encoder):
            token = self.world.add(Token(number, index, ENCODER))
            self.place.append(token)
            if encoder_cached:
                self.resident.append(token)
        self.resident += self.grow(request, cached)
        return request

    def grow(self, request: Request, count: int) -> list[Token]:
        """The next `count` tokens of a request's text, placed but not cached."""
        tokens = [Token(request.number, request.text + index) for index in range(count)]
        for token in tokens:
            self.place.append(self.world.add(token))
        request.text += count
        return tokens

    def known(self, request: Request, text: int | None = None) -> tuple[Token, ...]:
        """Encoder and text tokens of a request."""
        encoder = [Token(request.number, index, ENCODER) for index in range(request.encoder)]
        length = request.text if text is None else text
        return (*encoder, *(Token(request.number, position) for position in range(length)))

    def slots(self, tokens: Sequence[Token | None]) -> list[int]:
        """Slots of tokens, the padding slot for padding."""
        return [PADDING_SLOT if token is None else self.place.home[token] for token in tokens]

    def columns(self, request: Request, text: int) -> list[int]:
        """Live columns of a request's row: its encoder and the first `text` columns behind it."""
        return self.place.rows.get(request.number, [])[: request.encoder + text]

    def shared_fields(self, requests: Sequence[Request | None], lens: Sequence[int]) -> dict[str, list[int]]:
        """Fields that every mode has; None stands for a padded row."""
        fields = {
            "req_pool_indices": [PADDING_ROW if request is None else request.row for request in requests],
            "seq_lens": list(lens),
        }
        if self.options.overlay == "cross":
            fields["encoder_lens"] = [0 if request is None else request.encoder for request in requests]
        return fields

    def padding(self) -> list[None]:
        """The padded rows that the options want."""
        return [None] * self.options.padded_rows

    def padded_length(self) -> int:
        """What an engine may leave as a padded row's length. It must not matter: the row points to request row 0."""
        return self.rng.choice([0, 0, 1])

    def _batch_size(self) -> int:
        if self.options.lengths is not None:
            return len(self.options.lengths)
        return self.rng.randint(1, 4) if self.options.batch_size is None else self.options.batch_size

    def _drawn_extend(self) -> tuple[int, int]:
        total, page = self.length(), self.page
        cached = self.rng.choice([0, 0, page - 1, page, page + 1, total - 1, total, self.rng.randint(0, total)])
        cached = min(cached, total)
        return cached, total - cached


def decode_step(script: Script, requests: Sequence[Request]) -> None:
    """One new token per request."""
    padding = script.padding()
    queries: list[Token | None] = [script.grow(request, 1)[0] for request in requests]
    rows = [
        RowScript(
            request=request, queries=(query,), keys=script.known(request), facts=facts_of(script, request, later=True)
        )
        for request, query in zip(requests, queries, strict=True)
    ]
    rows += [RowScript(request=None, queries=(None,)) for _ in padding]
    queries += padding
    lens = [request.text for request in requests] + [script.padded_length() for _ in padding]
    fields = script.shared_fields([*requests, *padding], lens)
    fields["out_cache_loc"] = script.slots(queries)
    fields["positions"] = [0 if query is None else query.position for query in queries]
    table = {request.row: script.columns(request, request.text) for request in requests}
    script.steps.append(StepScript(mode="decode", rule="decode", rows=tuple(rows), fields=fields, table=table))


def extend_step(
    script: Script,
    news: Sequence[tuple[Request, int]],
    *,
    mode: str = "extend",
    fresh_encoder: Sequence[Request] = (),
    later: Sequence[Request] = (),
    extras: Mapping[str, list[int]] = EMPTY,
) -> None:
    """Some new tokens per request.

    Args:
        news: requests in batch order, each with its number of new tokens.
        mode: "extend", "mixed", "draft_extend" or "embedding".
        fresh_encoder: requests that bring their encoder tokens in this pass.
        later: requests whose prompt is behind them (decode rows of a mixed batch).
        extras: index tensors for `ForwardBatch.extras`, one entry per request.
    """
    padding, loose = script.padding(), script.options.padded_tokens
    prefixes = [request.text for request, _ in news]
    rows = []
    for request, count in news:
        queries = tuple(script.grow(request, count))
        facts = facts_of(script, request, later=request in later)
        rows.append(RowScript(request=request, queries=queries, keys=script.known(request), facts=facts))
    stride = None
    if script.options.strided_rows and mode == "draft_extend":
        stride = max([script.options.num_draft_tokens, *(count for _, count in news)])
    ones = stride or (script.rng.randint(0, 1) if mode == "mixed" else 0)
    if stride is not None:
        rows = [attrs.evolve(row, queries=row.queries + (None,) * (stride - len(row.queries))) for row in rows]
    rows += [RowScript(request=None, queries=(None,) * ones) for _ in padding]
    requests: list[Request | None] = [request for request, _ in news]
    fields = script.shared_fields([*requests, *padding], [r.text for r, _ in news] + [ones and 1 for _ in padding])
    flat = [query for row in rows for query in row.queries] + [None] * loose
    fields["out_cache_loc"] = script.slots(flat)
    fields["positions"] = [0 if query is None else query.position for query in flat]
    fields["extend_seq_lens"] = [count for _, count in news] + [0 if stride else ones for _ in padding]
    fields["extend_prefix_lens"] = prefixes + [0 for _ in padding]
    encoder = _encoder_writes(script, fresh_encoder, fields) if script.options.overlay == "cross" else None
    table = {request.row: script.columns(request, request.text) for request, _ in news}
    if mode == "embedding":
        for name in ("out_cache_loc", "extend_prefix_lens"):
            del fields[name]
    script.steps.append(
        StepScript(
            mode=mode,
            rule=mode,
            rows=tuple(rows),
            loose=loose,
            fields=fields,
            scalars={} if stride is None else {"token_stride": stride},
            extras={name: values + [0 for _ in padding] for name, values in extras.items()},
            encoder=encoder,
            table=table,
            stores=mode != "embedding",
        )
    )


def facts_of(script: Script, request: Request, *, later: bool = False, **more: Any) -> Facts:
    """Facts of a request; `later` queries know where its prompt ended."""
    prompt = request.prompt if later else None
    return Facts(prompt=prompt, inclusive=script.options.inclusive, **more)


def _encoder_writes(
    script: Script, requests: Sequence[Request], fields: dict[str, list[int]]
) -> tuple[Token, ...] | None:
    tokens = tuple(Token(r.number, index, ENCODER) for r in requests for index in range(r.encoder))
    if not tokens:
        return None
    fields["encoder_out_cache_loc"] = script.slots(tokens)
    return tokens
