"""Who sees what: the data that a mode builds and that a kernel obeys.

A `Segment` lists query rows, the keys each may look at, and the rule (`Visibility`) that decides which of them it
does. It holds no operation: modes and overlays make segments, lowerings rewrite them, kernels read them.

The rule. Let query j of row b stand at absolute position p, and let the row's keys be tokens t = 0 .. kv_len[b]-1,
token t at position t. The query sees token t when all of these hold:

    causal   t <= p                                    (if causal)
    window   p - left <= t <= p + right                (each bound only if given)
    chunk    t // chunk == p // chunk                  (if given)

and, whatever window and chunk say, also every committed t < keep[b] that causality allows. Without explicit
`positions` the queries of a row are its last tokens: p = kv_len[b] + tail_len[b] - q_len[b] + j. A `Tail` adds keys
behind the committed ones; its token c stands at `tail.positions` (default kv_len[b] + c) and obeys window and chunk by
that position, and its mask, where it has one, in place of causality.

A query that sees nothing yields 0 and log-sum-exp -inf.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs
import torch

from faback.core.errors import ConfigError

Tensor = torch.Tensor
INDEX_DTYPES = (torch.int32, torch.int64)

FEATURES = {
    "non_causal": "queries see keys in both directions",
    "window": "a limit on the distance to the left",
    "window_right": "a limit on the distance to the right",
    "row_window": "a window of its own for each row",
    "chunk": "local attention in fixed chunks",
    "keep": "a prefix that stays visible beyond window and chunk",
    "tail": "extra key slots after the committed ones",
    "tree": "a mask over the tail",
    "tail_only": "nothing but the tail, the committed keys being another part's",
    "positions": "explicit query positions",
    "q_len": "rows whose last queries are padding",
    "sharded": "keys that are every n-th token of the request",
    "start": "keys that begin at an offset in the request's row",
    "slot_map": "slots translated to another pool",
    "raw_kv": "keys and values of the batch itself, no cache",
    "dense_table": "keys addressed by a table of its own instead of the request rows",
    "block_table": "a table of pages in place of slots",
    "latent": "values that are the leading part of the keys",
    "softcap": "tanh cap on the scores",
    "sinks": "a logit per head in the denominator",
    "lse": "log-sum-exp returned beside the output",
    "kv_scales": "de-quantisation factors of stored keys and values",
    "deterministic": "bit-equal whatever else is in the batch and however a prompt is cut",
    "graph": "recordable in a CUDA graph",
}
"""The words in which a segment says what it needs and a kernel says what it can do; plugins may add their own."""


@attrs.frozen(eq=False)
class Visibility:
    """The rule of the module's docstring, as data. Its parts compose.

    Attributes:
        causal: a query sees no key at a later position.
        window: inclusive distances (left, right); None is unbounded.
        chunk: chunk length of local attention.
        keep: int32 or int64 [rows], tokens below it stay visible whatever window and chunk say.
        row_window: int32 or int64 [rows], left distances that take the place of `window[0]`, which then is only
            their upper bound.
    """

    causal: bool = True
    window: tuple[int | None, int | None] = (None, None)
    chunk: int | None = None
    keep: Tensor | None = None
    row_window: Tensor | None = None

    def features(self) -> frozenset[str]:
        """The `FEATURES` that this rule needs of a kernel."""
        found = {
            "non_causal": not self.causal,
            "window": self.window[0] is not None,
            "window_right": self.window[1] is not None,
            "chunk": self.chunk is not None,
            "keep": self.keep is not None,
            "row_window": self.row_window is not None,
        }
        return frozenset(name for name, present in found.items() if present)


@attrs.frozen(eq=False)
class KVView:
    """Where the keys of each row live, as a recipe and not as a table.

    Token t of row b is slot `req_to_token[req_pool_indices[b], start[b] + t]`, sent through `slot_map` if there is
    one. Kernels read this directly; a lowering writes the dense page table that others want. Request row 0 belongs to
    padding: a kernel row that points there has no keys, whatever its length says (tables made by a lowering, `dense`,
    have no such row).

    With a `page_stride` the table is a block table: it has pages in place of slots, and token i = start[b] + t is slot
    `req_to_token[req_pool_indices[b], i // page_size] * page_stride + i % page_size`.

    Attributes:
        req_to_token: int32 or int64 [request rows, tokens], slots; [request rows, pages] of a block table.
        req_pool_indices: int32 or int64 [rows], which row of `req_to_token` each kernel row reads.
        page_size: tokens per page; the slots of a page are consecutive and aligned.
        start: int32 or int64 [rows] first token, 0 if None.
        slot_map: int32 or int64 [slots], translation to the pool that the layer uses.
        dense: True where `req_to_token` was made for one segment (row b belongs to kernel row b).
        shard: (index, count) where the row holds every count-th token of the request: its token t then stands at
            position t * count + index.
        page_stride: slots from one page of a block table to the next, `page_size` where nothing lies between; None for
            a table of slots.
    """

    req_to_token: Tensor
    req_pool_indices: Tensor
    page_size: int
    start: Tensor | None = None
    slot_map: Tensor | None = None
    dense: bool = False
    shard: tuple[int, int] | None = None
    page_stride: int | None = None

    @property
    def slots_per_page(self) -> int:
        """What a slot of the layer's pool is divided by to find its page."""
        return self.page_stride if self.page_stride is not None and self.slot_map is None else self.page_size


@attrs.frozen(eq=False)
class Tail:
    """Key slots behind the committed ones: draft tokens.

    Attributes:
        size: upper bound of a row's tail length, on the host.
        lens: int32 or int64 [rows] tail lengths; a padded row has 0.
        slots: [rows, size], or [tokens, size] if `per_query`, int32 or int64; None where the tail simply continues
            the row's KVView at token kv_len.
        per_query: each query has a tail of its own (draft branches).
        mask: bool [tokens, size]: query sees tail token, in place of causality; None is causal by position.
        positions: int32 [tokens] absolute positions, tail token c of row b at cu_seqlens_q[b] + c (the tail's tokens
            are the row's queries); None is kv_len + c.
        bits: int32 [tokens, ceil(size / 32)]: the mask once more, column c as bit c % 32 of word c // 32, for kernels
            that would rather read words; None where nobody packed it.
    """

    size: int
    lens: Tensor
    slots: Tensor | None = None
    per_query: bool = False
    mask: Tensor | None = None
    positions: Tensor | None = None
    bits: Tensor | None = None


@attrs.frozen(eq=False)
class KVWrite:
    """Where the new keys and values of a layer go.

    Attributes:
        slots: int32 or int64 [tokens], None for nowhere. Slot 0 belongs to padding and may receive anything; negative
            slots are padding, too.
        slot_map: translation to the layer's pool, as in `KVView`.
    """

    slots: Tensor | None = None
    slot_map: Tensor | None = None


class Exchange(Protocol):
    """What ranks that share a batch tell each other, once per layer."""

    @property
    def needs_lse(self) -> bool:
        """Whether `collect` wants the log-sum-exp."""
        ...

    def spread(self, tensor: Tensor) -> Tensor:
        """New keys, or values, of this rank [tokens, heads, dim] -> those that `KVWrite` describes."""
        ...

    def collect(self, out: Tensor, lse: Tensor | None, sinks: Tensor | None) -> None:
        """Makes this rank's out [tokens, heads, dim] and lse [tokens, heads] whole, in place.

        Where `needs_lse`, the sinks [heads] are not in `out` yet and enter here.
        """
        ...


@attrs.frozen(eq=False)
class Segment:
    """One attention problem: rows of queries against rows of keys under one rule.

    Attributes:
        rows: number of rows (sequences as the kernel sees them), on the host.
        tokens: number of query tokens, padding past the last row included, on the host.
        cu_seqlens_q: int32 [rows + 1], where each row's queries lie in q.
        max_seqlen_q: upper bound of a row's queries, on the host.
        kv_len: int32 or int64 [rows], committed keys of each row.
        max_kv_len: upper bound of `kv_len`, on the host.
        kv: where the keys live; None for keys that come with the call.
        cu_seqlens_k: int32 [rows + 1], where each row's keys lie in k where `kv` is None; None for `cu_seqlens_q`.
        q_len: int32 or int64 [rows], live queries at the head of each row's span; None for all of it.
        visibility: the rule.
        tail: extra keys, or None.
        positions: int32 or int64 [tokens] absolute query positions; None for the last tokens of the row.
        write: where the new keys and values go before anything is read.
        committed: False where the committed keys are left to another part and only the tail is seen; `kv_len` then
            still says where the tail begins.
        exchange: what is exchanged with other ranks before and after, or None.
        absolute: False where the keys of a row may begin in the middle of a request, so that positions tell distances
            alone.
    """

    rows: int
    tokens: int
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    kv_len: Tensor
    max_kv_len: int
    kv: KVView | None
    visibility: Visibility = Visibility()
    tail: Tail | None = None
    positions: Tensor | None = None
    write: KVWrite = KVWrite()
    cu_seqlens_k: Tensor | None = None
    q_len: Tensor | None = None
    committed: bool = True
    exchange: Exchange | None = None
    absolute: bool = True

    @property
    def reach(self) -> int:
        """Upper bound of the keys that one row's queries look at, on the host."""
        keys = self.max_kv_len + (0 if self.tail is None else self.tail.size)
        rule = self.visibility
        if rule.keep is not None or not rule.causal:
            return keys
        bounds = (bound + self.max_seqlen_q for bound in (rule.window[0], rule.chunk) if bound is not None)
        return min((keys, *bounds))

    def features(self) -> frozenset[str]:
        """The `FEATURES` that this segment needs of a kernel."""
        view = self.kv
        found = {
            "tail": self.tail is not None,
            "tree": self.tail is not None and self.tail.mask is not None,
            "tail_only": not self.committed,
            "positions": self.positions is not None,
            "raw_kv": view is None,
            "q_len": self.q_len is not None,
            "sharded": view is not None and view.shard is not None,
            "start": view is not None and view.start is not None,
            "slot_map": view is not None and view.slot_map is not None,
            "dense_table": view is not None and view.dense,
            "block_table": view is not None and view.page_stride is not None,
        }
        return self.visibility.features() | {name for name, present in found.items() if present}

    def check(self, contributor: str) -> Segment:
        """Returns the segment itself, or raises a `ConfigError` that names the contributor of a malformed one."""
        wrong = next(iter(self._faults()), None)
        if wrong is not None:
            field, wanted, got = wrong
            raise ConfigError(f"segment.{field} from {contributor}", wanted=wanted, got=got)
        return self

    def _faults(self) -> Sequence[tuple[str, object, object]]:
        tail, view, keep = self.tail, self.kv, self.visibility.keep
        vectors: list[tuple[str, Tensor | None, int, tuple[torch.dtype, ...]]] = [
            ("cu_seqlens_q", self.cu_seqlens_q, self.rows + 1, (torch.int32,)),
            ("kv_len", self.kv_len, self.rows, INDEX_DTYPES),
            ("tail.lens", None if tail is None else tail.lens, self.rows, INDEX_DTYPES),
            ("kv.req_pool_indices", None if view is None else view.req_pool_indices, self.rows, INDEX_DTYPES),
            ("kv.start", None if view is None else view.start, self.rows, INDEX_DTYPES),
            ("visibility.keep", keep, self.rows, INDEX_DTYPES),
            ("visibility.row_window", self.visibility.row_window, self.rows, INDEX_DTYPES),
            ("cu_seqlens_k", self.cu_seqlens_k, self.rows + 1, (torch.int32,)),
            ("q_len", self.q_len, self.rows, INDEX_DTYPES),
        ]
        found = [
            (name, f"{' or '.join(map(str, dtypes))} [{length}]", f"{tensor.dtype} {list(tensor.shape)}")
            for name, tensor, length, dtypes in vectors
            if tensor is not None and (tensor.dtype not in dtypes or tuple(tensor.shape) != (length,))
        ]
        tokens, rows, size = self.tokens, self.rows, 0 if tail is None else tail.size
        per_query = tail is not None and tail.per_query
        tables: list[tuple[str, Tensor | None, tuple[int, ...] | None, tuple[torch.dtype, ...]]] = [
            ("positions", self.positions, (tokens,), INDEX_DTYPES),
            ("tail.slots", None if tail is None else tail.slots, (tokens if per_query else rows, size), INDEX_DTYPES),
            ("tail.mask", None if tail is None else tail.mask, (tokens, size), (torch.bool,)),
            ("tail.positions", None if tail is None else tail.positions, (tokens,), INDEX_DTYPES),
            ("tail.bits", None if tail is None else tail.bits, (tokens, -(-size // 32)), (torch.int32,)),
            ("kv.slot_map", None if view is None else view.slot_map, None, INDEX_DTYPES),
        ]
        found += [
            (
                name,
                f"{' or '.join(map(str, dtypes))} {list(shape or ['slots'])}",
                f"{tensor.dtype} {list(tensor.shape)}",
            )
            for name, tensor, shape, dtypes in tables
            if tensor is not None and (tensor.dtype not in dtypes or shape not in (None, tuple(tensor.shape)))
        ]
        return found + self._contradictions()

    def _contradictions(self) -> list[tuple[str, object, object]]:
        """Parts that are well made and do not go together."""
        rule, tail, view = self.visibility, self.tail, self.kv
        left, right = rule.window
        sides = [(left, "left"), (right, "right")]
        found: list[tuple[str, object, object]] = [
            ("visibility.window", f"a distance to the {side} of 0 or more", bound)
            for bound, side in sides
            if bound is not None and bound < 0
        ]
        if rule.chunk is not None and rule.chunk < 1:
            found.append(("visibility.chunk", "1 or more", rule.chunk))
        if rule.row_window is not None and left is None:
            found.append(("visibility.window", "a distance to the left that bounds those of `row_window`", left))
        if tail is None and not self.committed:
            found.append(("tail", "keys, as the committed ones are left to another part", tail))
        if tail is not None and tail.slots is None and view is None:
            found.append(("tail.slots", "slots, as there is no KVView that the tail could continue", None))
        if view is not None and view.shard is not None and not 0 <= view.shard[0] < view.shard[1]:
            found.append(("kv.shard", "(index, count) with 0 <= index < count", view.shard))
        if view is not None and view.page_stride is not None and view.page_stride < view.page_size:
            found.append(("kv.page_stride", f"None, or {view.page_size} or more, as a page has", view.page_stride))
        return found
