"""Whom a backend really looks at, found out from outside: a key is seen by those whose output its value changes.

Nothing of the plan is read, so kernels, lowerings and modes are judged alike. Everything that belongs to nobody is
cleared first, for one poisoned key would hide all others.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import attrs
import torch

from faback.core.layer import AttentionLayer
from faback.core.pools import Pools
from faback.testing.checks import Backend, MakeBackend
from faback.testing.engine import SimulatedPool
from faback.testing.layers import as_bits
from faback.testing.pictures import MISSING, NO_KEY, UNSEEN, WRONG, Block, Mark, Panel, describe
from faback.testing.scenario import LayerCall, Scenario, Step
from faback.testing.script import StepScript
from faback.testing.stories import told
from faback.testing.visibility import DRAFT, ENCODER, TEXT, Token

Tensor = torch.Tensor

VALUE = 64.0
"""What a value is replaced by: far from all others, and within every storage dtype."""
NOBODY = Token(-1, 0, "nobody")
"""Stands for all slots that belong to no token."""
RIGHT, TOO_FEW, TOO_MANY = range(3)
MARKS = (
    Mark("seen, as it must be", "#"),
    Mark("not seen, but must be", "-", MISSING),
    Mark("seen, but must not be", "+", WRONG),
)


@attrs.frozen(eq=False)
class Observation:
    """Who saw what in one layer of one pass, and who must.

    Attributes:
        layer: which.
        queries: the token of each row of q, None for padding.
        rows: first and last row of q (exclusive) of each row of the batch.
        known: the keys of each row of the batch that one would expect it to choose from.
        expected, actual: the tokens that each row of q must see, and those that it sees.
    """

    layer: AttentionLayer
    queries: tuple[Token | None, ...]
    rows: tuple[tuple[int, int], ...]
    known: tuple[tuple[Token, ...], ...]
    expected: tuple[frozenset[Token], ...]
    actual: tuple[frozenset[Token], ...]

    @property
    def right(self) -> bool:
        """Everybody sees whom they must."""
        return self.expected == self.actual

    def complaints(self) -> list[str]:
        """One line per query that sees too much or too little."""
        found = []
        for row, query in enumerate(self.queries):
            more, less = self.actual[row] - self.expected[row], self.expected[row] - self.actual[row]
            if more or less:
                who = f"row {row} of q, {'padding' if query is None else query},"
                saw = [f"sees {len(more)} too many: {_named(more)}"] if more else []
                saw += [f"does not see {len(less)} that it must: {_named(less)}"] if less else []
                found.append(f"{who} {' and '.join(saw)}")
        return found

    def panel(self) -> Panel:
        """A picture: expected against actual, key by key."""
        blocks = [self._block(number, *span) for number, span in enumerate(self.rows) if span[0] < span[1]]
        return Panel(title=describe([self.layer]), marks=MARKS, blocks=tuple(blocks))

    def _block(self, number: int, start: int, end: int) -> Block:
        seen = frozenset[Token]().union(*self.expected[start:end], *self.actual[start:end])
        owner = next((query.request for query in self.queries[start:end] if query is not None), None)
        kinds = (ENCODER,) if self.layer.cross else (TEXT, DRAFT)
        keys = [token for token in self.known[number] if token in seen or token.kind in kinds]
        keys += sorted(seen - set(keys), key=lambda token: (token.request, token.kind, token.position, token.branch))
        cells = torch.full((end - start, len(keys)), NO_KEY, dtype=torch.int64)
        for row in range(start, end):
            for column, key in enumerate(keys):
                must, does = key in self.expected[row], key in self.actual[row]
                cells[row - start, column] = (
                    RIGHT if must and does else TOO_FEW if must else TOO_MANY if does else UNSEEN
                )
        drafts = [column for column, key in enumerate(keys) if key.kind == DRAFT]
        return Block(
            title="padding" if owner is None else f"request {owner}",
            queries=tuple("padding" if query is None else _label(query) for query in self.queries[start:end]),
            keys=tuple(_label(key) if key.request == owner else f"r{key.request} {_label(key)}" for key in keys),
            cells=cells,
            tail=drafts[0] if drafts else None,
        )


def observe(
    scenario: Scenario,
    make_backend: MakeBackend,
    *,
    step: int,
    layer_id: int,
    device: torch.device | str = "cpu",
) -> Observation:
    """Runs a scenario up to one layer of one pass, and there changes one key after another.

    Args:
        scenario: as `Scenario.make` makes it, perhaps judged by another rule; it is not changed.
        make_backend: builds the backend under test.
        step, layer_id: where to look.
        device: where it runs.

    Raises:
        ValueError: the passes are not those that the scenario's options tell.
        Exception: whatever the backend raises.
    """
    script = told(scenario.options)
    if [s.queries for s in script.steps] != [s.queries for s in scenario.steps]:
        raise ValueError(f"{scenario} has other passes than its options tell of")
    there = scenario.to(device)
    pools = there.pools()
    backend = make_backend(there.config, pools, there.layers)
    for number, now in enumerate(there.steps[: step + 1]):
        now.enter(pools)
        backend.plan(now.batch)
        for call in now.calls:
            backend.forward(call.q, call.k, call.v, call.layer, sinks=call.sinks)
            if number == step and call.layer.layer_id == layer_id:
                break
    told_step = script.steps[step]
    homes: dict[Token, list[int]] = {token: [slot] for token, slot in script.place.home.items()}
    for token, slot in script.place.copies:
        homes[token].append(slot)
    probe = _Probe(backend, pools, call, told_step, now, homes)
    return Observation(
        layer=call.layer,
        queries=now.queries,
        rows=_spans(told_step),
        known=tuple(row.keys if told_step.stores else _live(row.queries) for row in told_step.rows),
        expected=tuple(frozenset(keys) for keys in call.keys),
        actual=probe.seen(),
    )


class _Probe:
    """Changes the values of one layer, token by token, and looks whose output changes."""

    def __init__(
        self,
        backend: Backend,
        pools: Pools,
        call: LayerCall,
        script: StepScript,
        step: Step,
        homes: dict[Token, list[int]],
    ) -> None:
        assert isinstance(pools.kv, SimulatedPool)
        self._backend, self._call = backend, call
        self._fresh: dict[Token, list[int]] = {}
        for row, token in enumerate((script.encoder or ()) if call.layer.cross else script.queries):
            if token is not None:
                self._fresh.setdefault(token, []).append(row)
        self._slots: dict[Token, list[int]] = {}
        self._storage: Tensor | None = None
        if call.layer.cached:
            k, self._storage = pools.kv.buffers(call.layer)
            slot_map = step.slot_maps.get(call.layer.kv_group)
            for token, slots in homes.items():
                own = slots if slot_map is None else slot_map[slots].tolist()
                self._slots[token] = [slot for slot in own if slot]
            owned = {slot for slots in self._slots.values() for slot in slots}
            self._slots[NOBODY] = [slot for slot in range(k.shape[0]) if slot not in owned]
            for buffer in (k, self._storage):
                as_bits(buffer)[self._slots[NOBODY]] = 0

    def seen(self) -> tuple[frozenset[Token], ...]:
        """Per row of q, the tokens whose values it depends on."""
        found: list[set[Token]] = [set() for _ in range(self._call.q.shape[0])]
        before = self._output()
        for token in dict.fromkeys([*self._slots, *self._fresh]):
            changed = torch.zeros(len(found), dtype=torch.bool)
            # Where values are keys as well, one of the two signs makes a key more important.
            for value in (VALUE, -VALUE) if self._call.layer.latent else (VALUE,):
                changed |= (self._with(token, value) != before).flatten(1).any(1)
            for row in changed.nonzero().flatten().tolist():
                found[row].add(token)
        return tuple(frozenset(tokens) for tokens in found)

    def _with(self, token: Token, value: float) -> Tensor:
        """The output where a token has another value."""
        v = self._call.v
        rows = self._fresh.get(token, [])
        if v is not None and rows:
            v = v.clone()
            v[rows] = value
        slots, storage = self._slots.get(token, []), self._storage
        if storage is None:
            return self._output(v)
        kept = as_bits(storage)[slots].clone()
        as_bits(storage)[slots] = as_bits(torch.full(kept.shape, value, device=kept.device).to(storage.dtype))
        try:
            return self._output(v)
        finally:
            as_bits(storage)[slots] = kept

    def _output(self, v: Tensor | None = None) -> Tensor:
        call = self._call
        k, v = call.k, call.v if v is None else v
        if call.layer.latent and v is not None and k is not None and v is not call.v:
            k = torch.cat([v, k[..., call.layer.v_head_dim :]], dim=-1)
        out = self._backend.forward(k=k, v=v, q=call.q, layer=call.layer, sinks=call.sinks, save_kv_cache=False)
        return as_bits(out).clone().cpu()


def _spans(step: StepScript) -> tuple[tuple[int, int], ...]:
    ends = [0]
    for row in step.rows:
        ends.append(ends[-1] + len(row.queries))
    return tuple(pairwise(ends))


def _live(tokens: Iterable[Token | None]) -> tuple[Token, ...]:
    return tuple(token for token in tokens if token is not None)


def _label(token: Token) -> str:
    """A position, and what else tells a token from its neighbours."""
    if token.kind == DRAFT:
        return f"{token.position} draft {token.branch}.{token.step}"
    return {TEXT: str(token.position), ENCODER: f"encoder {token.position}"}.get(token.kind, token.kind)


def _named(tokens: Iterable[Token]) -> str:
    names = sorted(tokens, key=lambda token: (token.request, token.kind, token.position, token.branch, token.step))
    shown = ["slots of nobody" if token is NOBODY else str(token) for token in names[:8]]
    return ", ".join(shown) + (", ..." if len(names) > len(shown) else "")
