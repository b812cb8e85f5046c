"""Random segments with keys and values, what must come out of them, and how to attend to them, lowered or not.

The answer is computed one pair of query and key at a time, from the prose of `faback.core.segment` alone.
"""

from __future__ import annotations

import math
import random

import attrs
import torch

from faback.core.config import BackendConfig
from faback.core.contracts import PlanContext
from faback.core.kernel import KernelRequest
from faback.core.layer import LayerKind
from faback.core.segment import KVView, Segment, Tail, Visibility
from faback.core.workspace import EagerWorkspace
from faback.kernels.reference import Reference
from faback.kernels.torch_ops import TorchOps

PAGES = (1, 3, 4, 16)
KIND = LayerKind(num_q_heads=4, num_kv_heads=2, head_dim=4, v_head_dim=3, sinks=True)
CONTEXT = PlanContext(BackendConfig(context_len=64, dtype=torch.float32), None)
TAILS = ("continued", "continued tree", "slots", "slots tree", "branches")


def workspace():
    return EagerWorkspace(TorchOps(), torch.device("cpu"), {})


@attrs.frozen(eq=False)
class Problem:
    """A segment and the tensors that it is about."""

    segment: Segment
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor

    def request(self, *more):
        """What a backend would ask of a kernel."""
        view = self.segment.kv
        return KernelRequest(
            forward_mode="test",
            device="cpu",
            arch=0,
            q_dtype=torch.float32,
            kv_dtype=torch.float32,
            num_q_heads=4,
            num_kv_heads=2,
            head_dim=4,
            v_head_dim=3,
            page_size=1 if view is None else view.page_size,
            features=self.segment.features() | {"sinks", *more},
        )

    def attend(self, segment=None, sinks=None):
        """out and lse of the reference kernel."""
        segment = self.segment if segment is None else segment
        out, lse = torch.full((self.q.shape[0], 4, 3), math.nan), torch.full((self.q.shape[0], 4), math.nan)
        kernel = Reference()
        prepared = kernel.prepare(segment, KIND, self.request(), workspace())
        kernel.run(prepared, self.q, self.k, self.v, out, lse=lse, sinks=sinks)
        return out, lse

    def lowered(self, lowering):
        """out and lse through a lowering, sinks where it says; its declaration is held against the parts."""
        asked = lowering.becomes(self.request())
        parts = lowering.lower(self.segment, workspace(), CONTEXT)
        assert len(asked) == len(parts) and (lowering.merges or len(parts) == 1)
        for request, part in zip(asked, parts, strict=True):
            check_truth(lowering, self, request, part)
        if not lowering.merges:
            return self.attend(parts[0], self.sinks)
        results = [self.attend(part) for part in parts]
        out, lse = torch.empty_like(results[0][0]), torch.empty_like(results[0][1])
        TorchOps().merge([r[0] for r in results], [r[1] for r in results], out, lse, self.sinks)
        return out, lse


def check_truth(lowering, problem, request, part):
    """`becomes` promised no less than the part needs, and something was gained."""
    part.check(lowering.key)
    call = {"lse"} if lowering.merges else {"sinks"}
    assert call <= request.features and ("sinks" in request.features) != lowering.merges
    assert part.features() <= request.features
    assert request.page_size == (1 if part.kv is None else part.kv.page_size)
    assert request != problem.request()
    assert part.tokens == problem.segment.tokens
    kept = {"forward_mode", "q_dtype", "kv_dtype", "num_q_heads", "num_kv_heads", "head_dim", "v_head_dim"}
    assert all(getattr(request, name) == getattr(problem.request(), name) for name in kept)
    if part.rows:
        assert int(part.cu_seqlens_q.diff().max()) <= part.max_seqlen_q, "a host bound is too small"
        lens = part.kv_len if part.committed else torch.zeros_like(part.kv_len)
        assert int(lens.max()) <= part.max_kv_len, "a host bound is too small"
    assert int(part.cu_seqlens_q[-1]) <= part.tokens


def visible(problem):
    """Per query, the slots in k that it sees, in prose: one pair at a time."""
    s = problem.segment
    rule, view, tail = s.visibility, s.kv, s.tail
    seen = [[] for _ in range(s.tokens)]
    for b in range(s.rows):
        first, last = int(s.cu_seqlens_q[b]), int(s.cu_seqlens_q[b + 1])
        live = last - first if s.q_len is None else int(s.q_len[b])
        length, tail_len = int(s.kv_len[b]), 0 if tail is None else int(tail.lens[b])
        padded = view is not None and not view.dense and int(view.req_pool_indices[b]) == 0
        left = rule.window[0] if rule.row_window is None else int(rule.row_window[b])
        right, chunk, keep = rule.window[1], rule.chunk, 0 if rule.keep is None else int(rule.keep[b])
        index, count = (0, 1) if view is None or view.shard is None else view.shard
        for j in range(live):
            token = first + j
            p = length + tail_len - live + j if s.positions is None else int(s.positions[token])

            def near(t, p=p, left=left, right=right, chunk=chunk):
                inside = (left is None or p - left <= t) and (right is None or t <= p + right)
                return inside and (chunk is None or t // chunk == p // chunk)

            for t in range(0 if padded or not s.committed else length):
                at = t * count + index
                if (near(at) or at < keep) and (at <= p or not rule.causal):
                    seen[token].append(slot_of(s, b, t))
            for c in range(tail_len):
                at = length + c if tail.positions is None else int(tail.positions[first + c])
                allowed = bool(tail.mask[token, c]) if tail.mask is not None else at <= p or not rule.causal
                if near(at) and allowed:
                    seen[token].append(tail_slot(s, b, token, c))
    return seen


def slot_of(segment, b, t):
    view = segment.kv
    if view is None:
        offsets = segment.cu_seqlens_q if segment.cu_seqlens_k is None else segment.cu_seqlens_k
        return int(offsets[b]) + t
    i, row = t + (0 if view.start is None else int(view.start[b])), int(view.req_pool_indices[b])
    if view.page_stride is None:
        slot = int(view.req_to_token[row, i])
    else:
        slot = int(view.req_to_token[row, i // view.page_size]) * view.page_stride + i % view.page_size
    return slot if view.slot_map is None else int(view.slot_map[slot])


def tail_slot(segment, b, token, c):
    tail = segment.tail
    if tail.slots is None:
        return slot_of(segment, b, int(segment.kv_len[b]) + c)
    slot = int(tail.slots[token if tail.per_query else b, c])
    return slot if segment.kv.slot_map is None else int(segment.kv.slot_map[slot])


def expected(problem):
    """float64 out and lse, by definition."""
    out, lse = torch.zeros(problem.q.shape[0], 4, 3).double(), torch.full((problem.q.shape[0], 4), -math.inf).double()
    for token, slots in enumerate(visible(problem)):
        if not slots:
            continue
        k, v = (x[slots].double().repeat_interleave(2, 1) for x in (problem.k, problem.v))
        scores = torch.einsum("hd,khd->hk", problem.q[token].double(), k) * KIND.scale
        lse[token] = scores.logsumexp(-1)
        weights = (scores - torch.logaddexp(lse[token], problem.sinks.double())[:, None]).exp()
        out[token] = torch.einsum("hk,khd->hd", weights, v)
    return out, lse


def check_equal(problem, result):
    """The result is the definition's."""
    for got, wanted in zip(result, expected(problem), strict=True):
        torch.testing.assert_close(got.double(), wanted, atol=2e-5, rtol=0)


def check_padding_tokens(lowering):
    """No row at all, and tokens nevertheless, as a rank without work has them."""
    segment = Segment(
        rows=0,
        tokens=2,
        cu_seqlens_q=torch.zeros(1, dtype=torch.int32),
        max_seqlen_q=0,
        kv_len=torch.zeros(0, dtype=torch.int32),
        max_kv_len=0,
        kv=KVView(torch.full((2, 3), -1), torch.zeros(0, dtype=torch.int32), 1),
        visibility=Visibility(window=(3, None)),
    )
    nothing = torch.full((1, 2, 4), math.nan)
    problem = Problem(segment, torch.zeros(2, 4, 4), nothing, nothing[..., :3], torch.zeros(4))
    check_equal(problem, problem.lowered(lowering))


class Draw:
    """Random segments.

    Args:
        seed: decides everything that is left open.
        page: tokens per page.
        has: features that the segment has for certain ("chunk", "window", "keep", "start", ...).
        never: features that it never has; "huge": table entries far outside the pool.
        tails: kinds of tail from `TAILS` that it may have; it has one if "tail" is in `has`.
    """

    def __init__(self, seed, page, *, has=(), never=(), tails=TAILS):
        self.rng = random.Random(f"{seed} {page} {sorted(has)} {sorted(never)}")
        self.page, self._has, self._never, self._tails = page, set(has), set(never), tails

    def wants(self, feature, chance=0.35):
        drawn = self.rng.random() < chance
        return feature in self._has or (drawn and feature not in self._never)

    def problem(self):
        rng, page = self.rng, self.page
        raw = self.wants("raw_kv", 0.15) and self._has.isdisjoint({"tail", "start", "slot_map", "sharded"})
        tail_kind = rng.choice(self._tails) if not raw and self.wants("tail", 0.4) else None
        sharded = not raw and tail_kind is None and self.wants("sharded", 0.15)
        rows = rng.randint(1, 4) if "rows" in self._has else rng.choice([0, 1, 2, 3, 4])
        lens = [rng.choice([0, 1, page, page + 1, rng.randint(0, 20)]) for _ in range(rows)]
        branch = tail_kind == "branches"
        spans = [3 if branch else rng.choice([0, 1, 1, 2, rng.randint(0, 7)]) for _ in range(rows)]
        if raw and (rng.random() < 0.5):
            lens = list(spans)
        if not self.wants("more queries than keys", 0.3) and not branch:
            spans = [min(span, length) for span, length in zip(spans, lens, strict=True)]
        rows_of = [0 if not raw and rng.random() < 0.15 else row for row in rng.sample(range(1, 9), rows)]
        q_lens = [rng.randint(0, span) for span in spans] if not branch and self.wants("q_len") else None
        sizes = [min(span, 4) if tail_kind else 0 for span in spans]
        if branch:
            sizes = [rng.randint(1, 3) for _ in sizes]
        sizes = [size if row else 0 for size, row in zip(sizes, rows_of, strict=True)]
        tree = tail_kind is not None and "tree" in tail_kind
        if tree:
            spans = sizes = [min(span, 4) for span in spans]
            sizes = [size if row else 0 for size, row in zip(sizes, rows_of, strict=True)]
            q_lens = None
        tokens = sum(spans) + rng.choice([0, 0, 2])
        starts = [rng.randint(0, page + 2) for _ in range(rows)] if not raw and self.wants("start") else None
        offsets = self.index([0, *torch.tensor([0, *spans]).cumsum(0).tolist()[1:]], torch.int32)
        depths = [starts[b] + lens[b] + sizes[b] if starts else lens[b] + sizes[b] for b in range(rows)]
        store = self.store(rows_of, depths, raw, sum(lens))
        live = self.live(rows_of, lens, sizes if tail_kind and "continued" in tail_kind else [0] * rows, starts, store)
        tail, positions = None, None
        if tail_kind:
            tail = self.tail(tail_kind, sizes, spans, tokens, store, live)
            if tree or branch or "behind" in self._has:
                positions = self.standing(tail_kind, lens, sizes, spans, tokens)
                tail = attrs.evolve(tail, positions=positions if tree else None)
        if positions is None and self.wants("positions", 0.25):
            longest = max([*lens, 0]) * 2 + 3
            positions = self.index([rng.randint(0, longest) for _ in range(tokens)], torch.int32)
        view = None if raw else self.view(store, rows_of, starts, sharded)
        slack = rng.choice([0, 0, 3])
        segment = Segment(
            rows=rows,
            tokens=tokens,
            cu_seqlens_q=offsets,
            max_seqlen_q=max([0, *spans]) + rng.choice([0, 0, 2]),
            kv_len=self.index(lens),
            max_kv_len=max([0, *lens]) + slack,
            kv=view,
            visibility=self.rule(rows, lens),
            tail=tail,
            positions=positions,
            q_len=None if q_lens is None else self.index(q_lens),
            cu_seqlens_k=self.index(torch.tensor([0, *lens]).cumsum(0).tolist(), torch.int32)
            if raw and (lens != spans or rng.random() < 0.5)
            else None,
            committed=not (tail is not None and self.wants("tail_only", 0.15)),
        )
        return self.filled(segment, store, live)

    def index(self, values, dtype=None):
        return torch.tensor(values, dtype=dtype or self.rng.choice([torch.int32, torch.int64]))

    def rule(self, rows, lens):
        causal = not self.wants("non_causal", 0.2)
        left = self.rng.choice([0, 1, 3, 7]) if self.wants("window") else None
        right = self.rng.choice([0, 1, 3]) if self.wants("window_right", 0.15) else None
        row_window = None
        if left is not None and self.wants("row_window", 0.3):
            row_window = self.index([self.rng.randint(0, left) for _ in range(rows)])
        keep = self.index([self.rng.randint(0, length + 2) for length in lens]) if self.wants("keep", 0.25) else None
        chunk = self.rng.choice([1, 2, 3, 4, 5, self.page]) if self.wants("chunk") else None
        return Visibility(causal=causal, window=(left, right), chunk=chunk, keep=keep, row_window=row_window)

    def store(self, rows_of, depths, raw, keys):
        """The table, whole aligned pages in random order, poison behind the live range; and free slots."""
        page, rng = self.page, self.rng
        if raw:
            return {"slots": keys + 2, "free": [], "table": None}
        need = sum(-(-depth // page) for depth in depths)
        ids = list(range(1, need + 40))
        rng.shuffle(ids)
        width = max([1, *depths]) + rng.choice([0, 0, 3])
        total = (len(ids) + 1) * page
        spoilt = rng.choice([-1, None] if "huge" in self._never else [-1, 2**30, None])
        table = torch.full((9, width), 0 if spoilt is None else spoilt)
        if spoilt is None:
            table = torch.randint(0, total, (9, width), generator=torch.Generator().manual_seed(rng.getrandbits(31)))
        for row, depth in zip(rows_of, depths, strict=True):
            if row:
                pages = [ids.pop() for _ in range(-(-depth // page))]
                slots = [p * page + i for p in pages for i in range(page)][:depth]
                table[row, :depth] = torch.tensor(slots, dtype=torch.long)
        free = [p * page + i for p in ids for i in range(page)]
        rng.shuffle(free)
        return {"slots": total, "free": free, "table": table.to(rng.choice([torch.int32, torch.int64]))}

    def live(self, rows_of, lens, more, starts, store):
        """Full slots that hold a token."""
        if store["table"] is None:
            return set(range(sum(lens)))
        found = set()
        for b, row in enumerate(rows_of):
            first = starts[b] if starts else 0
            if row:
                found |= set(store["table"][row, first : first + lens[b] + more[b]].tolist())
        return found

    def tail(self, kind, sizes, spans, tokens, store, live):
        size = max([1, *sizes]) + self.rng.choice([0, 1])
        slots, mask = None, None
        if kind in ("slots", "slots tree", "branches"):
            owners = range(len(sizes))
            if kind == "branches":
                owners = [b for b, span in enumerate(spans) for _ in range(span)]
            count = tokens if kind == "branches" else len(sizes)
            table = torch.full((count, size), -1 if "huge" in self._never else self.rng.choice([-1, 2**30]))
            for line, b in enumerate(owners):
                own = [store["free"].pop() for _ in range(sizes[b])]
                live.update(own)
                table[line, : sizes[b]] = torch.tensor(own, dtype=torch.long)
            slots = table.to(self.rng.choice([torch.int32, torch.int64]))
        if "tree" in kind:
            generator = torch.Generator().manual_seed(self.rng.getrandbits(31))
            mask = torch.rand(tokens, size, generator=generator) < 0.6
        return Tail(size, self.index(sizes), slots, per_query=kind == "branches", mask=mask)

    def standing(self, kind, lens, sizes, spans, tokens):
        """Positions of tree nodes and of branches."""
        flat = []
        for length, size, span in zip(lens, sizes, spans, strict=True):
            flat += [length + (max(0, size - 1) if kind == "branches" else self.rng.randint(0, 3)) for _ in range(span)]
        return self.index(flat + [0] * (tokens - len(flat)), torch.int32)

    def view(self, store, rows_of, starts, sharded):
        slot_map = None
        if self.wants("slot_map", 0.3):
            pages = store["slots"] // self.page
            order = list(range(1, pages))
            self.rng.shuffle(order)
            pages = torch.tensor([0, *order])
            slot_map = self.index((pages[:, None] * self.page + torch.arange(self.page)).flatten().tolist())
        table, blocks = store["table"], self.wants("block_table", 0.2)
        if blocks:
            table = table[:, :: self.page] // self.page
        return KVView(
            table,
            self.index(rows_of),
            self.page,
            start=None if starts is None else self.index(starts),
            slot_map=slot_map,
            shard=(self.rng.randint(0, 2), 3) if sharded else None,
            page_stride=self.page if blocks else None,
        )

    def filled(self, segment, store, live):
        """Numbers where tokens are, NaN everywhere else."""
        generator = torch.Generator().manual_seed(self.rng.getrandbits(31))
        k, v = torch.full((store["slots"], 2, 4), math.nan), torch.full((store["slots"], 2, 3), math.nan)
        slots = torch.tensor(sorted(live), dtype=torch.long)
        if segment.kv is not None and segment.kv.slot_map is not None:
            slots = segment.kv.slot_map.long()[slots]
        k[slots] = torch.randn(len(slots), 2, 4, generator=generator) * 2
        v[slots] = torch.randn(len(slots), 2, 3, generator=generator)
        q = torch.randn(segment.tokens, 4, 4, generator=generator) * 2
        return Problem(segment, q, k, v, torch.randn(4, generator=generator))
