"""From a script of identities to tensors: lays the world out in slots, poisons the rest, asks the oracle."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from faback.core.batch import MIRRORED, ForwardBatch
from faback.core.config import BackendConfig, SpeculativeConfig
from faback.core.layer import AttentionLayer
from faback.testing.engine import SimulatedPool, WindowPlacement, allocate
from faback.testing.layers import LayerStore, as_bits, make_layers, make_store, taken
from faback.testing.options import Options, impossible
from faback.testing.oracle import oracle_attention, visibility_matrix
from faback.testing.poison import TABLE_FLAVOURS, poison_, poison_entries, poisoned
from faback.testing.scenario import LayerCall, Scenario, Step
from faback.testing.script import RowScript, Script, StepScript
from faback.testing.stories import told
from faback.testing.visibility import Token

Tensor = torch.Tensor


def realised(options: Options) -> Scenario:
    """The scenario that the options describe.

    Raises:
        ValueError: they describe nothing.
    """
    reason = impossible(options)
    if reason is not None:
        raise ValueError(f"{options}: {reason}")
    return _Realiser(told(options)).scenario()


class _Realiser:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.options = script.options
        self.rng = random.Random(f"numbers {script.options.seed}")
        self.layers = make_layers(script.options, self.rng)
        self.stores = {layer.layer_id: make_store(script.world, layer, script.options) for layer in self.layers}
        self.window = self._window_placement() if script.options.hybrid else None

    def scenario(self) -> Scenario:
        index_dtype = self._index_dtype()
        map_dtype = self._index_dtype()
        tables = [self._table(step, index_dtype) for step in self.script.steps]
        maps = [self._maps(number, map_dtype) for number in range(len(self.script.steps))]
        pool = SimulatedPool(
            page_size=self.options.page_size,
            num_slots=self.script.place.num_slots,
            storage={layer.layer_id: self._storage(layer) for layer in self.layers},
            maps=maps[0],
            dtypes=dict.fromkeys(("full", "window", "none"), self.options.storage_dtype),
        )
        steps = [
            Step(
                batch=self._batch(step),
                req_to_token=table,
                slot_maps=slot_maps,
                calls=tuple(self._call(step, layer) for layer in self.layers),
                queries=step.queries,
            )
            for step, table, slot_maps in zip(self.script.steps, tables, maps, strict=True)
        ]
        return Scenario(
            options=self.options, config=self._config(), layers=tuple(self.layers), steps=tuple(steps), pool=pool
        )

    def _config(self) -> BackendConfig:
        options = self.options
        speculative = SpeculativeConfig(
            topk=options.topk, num_steps=options.num_steps, num_draft_tokens=options.num_draft_tokens
        )
        aware = {"prefill_aware_swa": {"inclusive": options.inclusive}} if options.overlay == "prefill_aware" else {}
        return BackendConfig(
            context_len=self._longest(),
            dtype=options.dtype,
            speculative=speculative if options.mode in ("draft_decode", "target_verify", "draft_extend") else None,
            options=aware,
        )

    def _longest(self) -> int:
        """The context length: exactly the longest sequence, encoder, text and drafts."""
        drafts = max(self.options.num_steps, self.options.num_draft_tokens)
        return max([1, *(max(r.encoder, r.text + drafts) for r in self.script.requests)])

    def _index_dtype(self) -> torch.dtype:
        drawn = self.rng.choice([torch.int32, torch.int64])
        return self.options.index_dtype or drawn

    def _table(self, step: StepScript, dtype: torch.dtype) -> Tensor:
        """[rows, columns] with every entry poisoned that is not live in this step."""
        rng = random.Random(f"tails {self.options.seed}")
        drawn = rng.choice(TABLE_FLAVOURS)
        flavour = self.options.tails or drawn
        encoder = max([0, *(request.encoder for request in self.script.requests)])
        columns = encoder + self._longest()
        free = self.script.place.free_slots()
        table = []
        for row in range(self.script.num_rows):
            live = step.table.get(row, [])
            others = [slot for other, slots in step.table.items() if other != row for slot in slots]
            tail = poison_entries(flavour, columns - len(live), free=free, live=others, rng=rng)
            table.append(live + tail)
        return torch.tensor(table, dtype=torch.int64).to(dtype)

    def _window_placement(self) -> WindowPlacement:
        place = self.script.place
        pages = sorted({slot // place.page_size for slot in [*place.home.values(), *(s for _, s in place.copies)]})
        return WindowPlacement(pages, place.page_size, 3, self.rng)

    def _maps(self, number: int, dtype: torch.dtype) -> dict[str, Tensor]:
        if self.window is None:
            return {}
        freed = self._freed(number) if self.options.evict else frozenset()
        entries = self.window.slot_map(self.script.place.num_slots, freed)
        return {"window": torch.tensor(entries, dtype=dtype)}

    def _freed(self, number: int) -> frozenset[int]:
        """Pages of rows that no query of this step or a later one sees in a layer of the window group."""
        place, page = self.script.place, self.options.page_size
        held = {slot // page for slots in place.rows.values() for slot in slots}
        for step in self.script.steps[number:]:
            for row in step.rows:
                wanted = set(row.queries) - {None}
                for layer in self.layers:
                    if layer.kv_group == "window":
                        seen = visibility_matrix(row.queries, row.keys, layer, row.facts, step.rule).any(0)
                        wanted |= {key for key, is_seen in zip(row.keys, seen.tolist(), strict=True) if is_seen}
                held -= {place.home[token] // page for token in wanted if token is not None}
        return frozenset(held)

    def _storage(self, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
        """Poison, and the resident tokens."""
        slots = {"full": self.script.place.num_slots, "none": 0}.get(layer.kv_group, 0)
        if layer.kv_group == "window" and self.window is not None:
            slots = self.window.num_slots
        rng = random.Random(f"storage {self.options.seed} {layer.layer_id}")
        k, v = allocate(slots, layer, self.options.storage_dtype, interleaved=rng.random() < 0.5)
        poison_(k, rng)
        if not layer.latent:
            poison_(v, rng)
        if slots:
            place, store = self.script.place, self.stores[layer.layer_id]
            pairs = [(token, place.home[token]) for token in self.script.resident] + place.copies
            _put(k, v, self._translated(layer, [slot for _, slot in pairs]), [t for t, _ in pairs], store, self.script)
        return k, v

    def _translated(self, layer: AttentionLayer, slots: Sequence[int]) -> Tensor:
        if layer.kv_group == "window" and self.window is not None:
            slots = [self.window.slot(slot) if slot else 0 for slot in slots]
        return torch.tensor(slots, dtype=torch.int64)

    def _batch(self, step: StepScript) -> ForwardBatch:
        fields: dict[str, object] = {
            name: torch.tensor(values, dtype=self._index_dtype()) for name, values in step.fields.items()
        }
        for name in MIRRORED:
            if name in step.fields and self.rng.random() < 0.5:
                fields[f"{name}_cpu"] = torch.tensor(step.fields[name], dtype=self._index_dtype())
        if step.custom_mask is not None:
            fields["custom_mask"] = torch.tensor(step.custom_mask, dtype=torch.bool)
        if step.extras:
            fields["extras"] = {n: torch.tensor(v, dtype=self._index_dtype()) for n, v in step.extras.items()}
        return ForwardBatch(forward_mode=step.mode, **fields, **step.scalars)  # type: ignore[arg-type]

    def _call(self, step: StepScript, layer: AttentionLayer) -> LayerCall:
        options, queries, store = self.options, step.queries, self.stores[layer.layer_id]
        q = self._queries(queries, layer)
        sinks = torch.randn(layer.num_q_heads, generator=self._generator()) * 3 if layer.sinks else None
        out, lse, errors, keys = _expected(step, layer, q, sinks, store, self.script, options.dtype)
        written = step.encoder if layer.cross else queries
        k, v = self._fresh(written, layer, store)
        stored = written is not None and step.stores and layer.cached
        kept = [t for t in (written if stored and written is not None else ()) if t is not None]
        rows = self.script.world.index(kept)
        return LayerCall(
            layer=layer,
            q=q,
            k=k,
            v=v,
            sinks=sinks,
            out=out,
            lse=lse,
            out_error=errors[0],
            lse_error=errors[1],
            write_slots=self._translated(layer, self.script.slots(kept)),
            stored_k=taken(store.stored[0], rows),
            stored_v=taken(store.stored[1], rows),
            keys=keys,
        )

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.rng.getrandbits(31))

    def _queries(self, queries: Sequence[Token | None], layer: AttentionLayer) -> Tensor:
        """[tokens, heads, dim], padded rows poisoned, sometimes cut out of a wider tensor."""
        shape = (len(queries), layer.num_q_heads, layer.head_dim)
        q = torch.randn(shape, generator=self._generator()).to(self.options.dtype)
        return self._cut(_with_poison(q, queries, self.rng))

    def _fresh(
        self, tokens: Sequence[Token | None] | None, layer: AttentionLayer, store: LayerStore
    ) -> tuple[Tensor | None, Tensor | None]:
        """New k and v as the model gives them; None where there are none."""
        if tokens is None:
            return None, None
        rows = self.script.world.index([token for token in tokens if token is not None])
        made = []
        for given in store.given:
            fresh = torch.empty(len(tokens), *given.shape[1:], dtype=given.dtype)
            fresh[[index for index, token in enumerate(tokens) if token is not None]] = given[rows]
            made.append(_with_poison(fresh, tokens, self.rng))
        if layer.latent:
            k = self._cut(made[0])
            return k, k[..., : layer.v_head_dim]
        return self._cut(made[0]), self._cut(made[1])

    def _cut(self, tensor: Tensor) -> Tensor:
        """The same numbers, sometimes as a slice of a fused projection whose rest is poison."""
        if self.rng.random() < 0.5:
            return tensor
        count, heads, dim = tensor.shape
        fused = poisoned((count, heads * dim + 2 * dim), tensor.dtype, self.rng)
        fused[:, dim : dim + heads * dim] = tensor.reshape(count, heads * dim)
        return fused[:, dim : dim + heads * dim].view(count, heads, dim)


def _with_poison(tensor: Tensor, tokens: Sequence[Token | None], rng: random.Random) -> Tensor:
    padded = [index for index, token in enumerate(tokens) if token is None]
    if padded:
        tensor[padded] = poisoned((len(padded), *tensor.shape[1:]), tensor.dtype, rng)
    return tensor


def _put(k: Tensor, v: Tensor, slots: Tensor, tokens: Sequence[Token], store: LayerStore, script: Script) -> None:
    """Writes stored tokens to slots, bit by bit."""
    rows = script.world.index(tokens)
    for buffer, stored in ((k, store.stored[0]), (v, store.stored[1])):
        as_bits(buffer)[slots] = as_bits(stored)[rows]


def _expected(
    step: StepScript,
    layer: AttentionLayer,
    q: Tensor,
    sinks: Tensor | None,
    store: LayerStore,
    script: Script,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, tuple[float, float], tuple[tuple[Token, ...], ...]]:
    """The oracle's out and LSE, the errors of plain torch, and whom each query sees."""
    out = torch.zeros(q.shape[0], layer.num_q_heads, layer.v_head_dim, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    errors, seen, start = [0.0, 0.0], [], 0
    raw = not step.stores or not layer.cached
    source = store.given if raw else store.true
    for row in step.rows:
        live = [index for index, query in enumerate(row.queries) if query is not None]
        at = torch.tensor([start + index for index in live], dtype=torch.int64)
        start += len(row.queries)
        keys = _candidates(row, raw)
        visible = visibility_matrix([row.queries[index] for index in live], keys, layer, row.facts, step.rule)
        seen += _listed(row, keys, visible)
        if not live:
            continue
        rows = script.world.index(keys)
        args = (q[at], source[0][rows], source[1][rows], visible)
        out[at], lse[at] = oracle_attention(*args, scale=layer.scale, softcap=layer.softcap, sinks=sinks)
        plain = oracle_attention(*args, scale=layer.scale, softcap=layer.softcap, sinks=sinks, dtype=dtype)
        errors[0] = max(errors[0], _gap(plain[0], out[at]))
        errors[1] = max(errors[1], _gap(plain[1], lse[at]))
    seen += [() for _ in range(step.loose)]
    return out, lse, (errors[0], errors[1]), tuple(seen)


def _candidates(row: RowScript, raw: bool) -> list[Token]:
    """Tokens that a row's queries could see: its request's, or only those of this pass where nothing is cached."""
    return [token for token in row.queries if token is not None] if raw else list(row.keys)


def _listed(row: RowScript, keys: Sequence[Token], visible: Tensor) -> list[tuple[Token, ...]]:
    """Per query of the row, padding included, the tokens it sees."""
    lists = iter(visible.tolist())
    return [
        () if query is None else tuple(key for key, sees in zip(keys, next(lists), strict=True) if sees)
        for query in row.queries
    ]


def _gap(plain: Tensor, exact: Tensor) -> float:
    """Largest difference where the exact value is finite."""
    finite = torch.isfinite(exact)
    return float((plain - exact)[finite].abs().max()) if bool(finite.any()) else 0.0
