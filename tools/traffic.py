"""Mixed traffic on one backend, for tools/soak.py: requests that come, grow in passes of all kinds, and go."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from faback import (
    AttentionBackend,
    AttentionLayer,
    BackendConfig,
    ForwardBatch,
    GraphRunner,
    Pools,
    SpeculativeConfig,
    hookimpl,
)
from faback.builtins import BUILTINS
from faback.core.registry import Registry
from faback.graph_runner import capture_all
from faback.kernels.reference import Reference
from faback.pools import HybridPool, ReqToTokenPool
from faback.testing.late import Late

Tensor = torch.Tensor
DRAFTS = 4


@attrs.frozen(kw_only=True)
class Sizes:
    """Of the model, the pool and the traffic; `error` is what graphs and plans may differ by."""

    heads: tuple[int, int]
    head_dim: int
    requests: int
    context: int
    prompt: int
    page: int
    window: int
    dtype: torch.dtype
    error: float


GPU = Sizes(
    heads=(32, 8), head_dim=128, requests=64, context=4096, prompt=512, page=16, window=1024, dtype=torch.bfloat16,
    error=0.1,
)  # fmt: skip
CPU = Sizes(
    heads=(2, 1), head_dim=8, requests=4, context=64, prompt=16, page=4, window=8, dtype=torch.float32, error=1e-4
)  # fmt: skip


@attrs.define(eq=False)
class Request:
    """One text: its row, the slots of its tokens on the host, its length, and how long it will be."""

    row: int
    limit: int
    slots: Tensor = attrs.field(factory=lambda: torch.zeros(0, dtype=torch.int64))
    evicted: int = 0

    @property
    def length(self) -> int:
        return len(self.slots)


class LateKernels:
    """A kernel that can be captured without a GPU."""

    @hookimpl
    def faback_kernels(self) -> list[Late]:
        return [Late(Reference())]


class Traffic:
    """An engine with two runners on one backend, and requests that come and go.

    Attributes:
        served: requests that came and went.
        tokens: that passed through the model.
        replay_allocations: memory that replays asked torch for, which should be none.
        error: the largest difference between a graph and a plan.
    """

    def __init__(self, device: torch.device, sizes: Sizes, seed: int) -> None:
        self.device, self.sizes, self.pick = device, sizes, random.Random(seed)
        self.on_gpu = device.type == "cuda"
        self.served, self.tokens, self.replay_allocations, self.error = 0, 0, 0, 0.0
        shape: dict[str, Any] = {"num_q_heads": sizes.heads[0], "num_kv_heads": sizes.heads[1]}
        shape |= {"head_dim": sizes.head_dim}
        sliding = {"window": sizes.window, "kv_group": "window"}
        self.layers = [AttentionLayer(layer_id=i, **shape, **(sliding if i % 2 else {})) for i in range(4)]
        pages = (sizes.requests + 2) * sizes.context // sizes.page + 1
        self.kv = HybridPool(
            num_pages=pages, num_window_pages=pages, page_size=sizes.page, layers=self.layers, dtype=sizes.dtype,
            device=device,
        )  # fmt: skip
        self.slots, self.rows = self.kv.allocator, ReqToTokenPool(sizes.requests + 2, sizes.context, device)
        self.free_pages = self.slots.available_pages
        self.backend = self._backend()
        generator, most = torch.Generator(device).manual_seed(seed), max(4 * sizes.prompt, sizes.requests * DRAFTS)
        self.noise = {
            name: torch.randn(most, heads, sizes.head_dim, generator=generator, device=device).to(sizes.dtype)
            for name, heads in (("q", sizes.heads[0]), ("k", sizes.heads[1]), ("v", sizes.heads[1]))
        }
        self.runners = {mode: self._runner(mode, new) for mode, new in (("decode", 1), ("target_verify", DRAFTS))}
        self.memory = capture_all(list(self.runners.values()))
        self.active: list[Request] = []
        for _ in range(2):  # the largest passes first, so that later ones find memory
            largest = [self._admitted(sizes.context) for _ in range(self._room())]
            self._planned("extend", [(request, sizes.prompt) for request in largest])
            for request in largest:
                self._leave(request)
        self.standing = [self._admitted(sizes.context) for _ in range(2)]
        for _ in range(sizes.context // 2 // sizes.prompt):
            self._planned("extend", [(request, sizes.prompt) for request in self.standing])

    def _backend(self) -> AttentionBackend:
        config = BackendConfig(
            context_len=self.sizes.context,
            dtype=self.sizes.dtype,
            kernels="triton" if self.on_gpu else "late reference",
            speculative=SpeculativeConfig(topk=1, num_steps=DRAFTS, num_draft_tokens=DRAFTS),
        )
        registry = Registry.load(config, BUILTINS, [])
        registry.register(LateKernels(), "late kernels")
        pools = Pools(req_to_token=self.rows.req_to_token, kv=self.kv)
        return AttentionBackend(config, pools, self.layers, registry=registry)

    def _runner(self, mode: str, new: int) -> GraphRunner:
        zeros = torch.zeros(self.sizes.requests * new, dtype=torch.int64, device=self.device)
        each = zeros[: self.sizes.requests]
        largest = ForwardBatch(forward_mode=mode, req_pool_indices=each, seq_lens=each, out_cache_loc=zeros)
        return GraphRunner(self.backend, self.model, largest, self.inputs(len(zeros)))

    def model(self, batch: ForwardBatch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Four layers, each over the output of the one before."""
        x = q
        for layer in self.layers:
            x = x + self.backend.forward(x, k, v, layer)
        return x

    def step(self, number: int) -> None:
        """One pass of some kind, and what an engine does around it."""
        kind = self.pick.choices(("prompts", "mixed", "decode", "target_verify"), (15, 10, 50, 25))[0]
        if not self.active or (kind == "prompts" and self._room()):
            self._prompts()
        elif kind == "mixed":
            chosen = self._some()
            self._planned(
                "mixed", [(r, self._more(r, self.sizes.prompt // 4) if i < 4 else 1) for i, r in enumerate(chosen)]
            )
        elif kind == "target_verify":
            self._verify(self._some())
        else:
            self._decode(self._some(), compare=number % 50 == 0)
        self._tidy()

    def finish(self) -> None:
        """Sends everybody home and looks whether every page came back."""
        for request in [*self.active, *self.standing]:
            self._leave(request)
        self.slots.check()
        self.rows.check()

    @property
    def lost_pages(self) -> int:
        """Pages that are neither free nor anybody's, once everybody has left."""
        return self.free_pages - self.slots.available_pages

    def _prompts(self) -> None:
        few = [
            self._admitted(self.pick.randint(self.sizes.prompt, self.sizes.context - DRAFTS))
            for _ in range(self._room())
        ]
        self.active += few
        self._planned("extend", [(request, self.pick.randint(1, self.sizes.prompt)) for request in few])

    def _decode(self, chosen: Sequence[Request], compare: bool) -> None:
        batch = self._grown("decode", [(request, 1) for request in chosen])
        got = self._replayed(batch)
        if compare:
            got = got.clone()
            self.backend.plan(batch)
            wanted = self.model(batch, **self.inputs(batch.num_tokens))
            self.error = max(self.error, float((got - wanted).abs().nan_to_num(torch.inf).max()))

    def _verify(self, chosen: Sequence[Request]) -> None:
        """Drafted tokens take slots behind the committed ones; pages of those that are not accepted go back."""
        before = [request.length for request in chosen]
        batch = self._grown("target_verify", [(request, DRAFTS) for request in chosen])
        self._replayed(attrs.evolve(batch, seq_lens=batch.seq_lens - DRAFTS, seq_lens_cpu=torch.tensor(before)))
        for request, length in zip(chosen, before, strict=True):
            accepted = length + self.pick.randint(1, DRAFTS)
            held = -(-accepted // self.sizes.page) * self.sizes.page
            if request.length > held:
                self.slots.free(request.slots[held:])
            request.slots = request.slots[:accepted]

    def _planned(self, mode: str, pieces: Sequence[tuple[Request, int]]) -> None:
        batch = self._grown(mode, pieces)
        self.backend.plan(batch)
        self.model(batch, **self.inputs(batch.num_tokens))

    def _replayed(self, batch: ForwardBatch) -> Tensor:
        before = self._allocations()
        out = self.runners[batch.forward_mode].run(batch, **self.inputs(batch.num_tokens))
        self.replay_allocations += self._allocations() - before
        return out

    def _grown(self, mode: str, pieces: Sequence[tuple[Request, int]]) -> ForwardBatch:
        """Slots for the new tokens, written into the table, and the batch."""
        before = [request.length for request, _ in pieces]
        after = [length + new for length, (_, new) in zip(before, pieces, strict=True)]
        last = torch.tensor([int(request.slots[-1]) if request.length else 0 for request, _ in pieces])
        taken = self.slots.alloc_extend(before, after, last).cpu()
        new = [count for _, count in pieces]
        for (request, _), start, part in zip(pieces, before, taken.split(new), strict=True):
            self.rows.write(request.row, start, part)
            request.slots = torch.cat([request.slots, part])
        self.tokens += len(taken)
        return self.batch(mode, [request.row for request, _ in pieces], after, taken, new)

    def batch(
        self, mode: str, rows: Sequence[int], lens: Sequence[int], slots: Tensor, new: Sequence[int] = ()
    ) -> ForwardBatch:
        fields: dict[str, Any] = {"seq_lens_cpu": torch.tensor(lens)}
        if mode in ("extend", "mixed"):
            fields |= {"extend_seq_lens": self._index(new), "extend_seq_lens_cpu": torch.tensor(new)}
        return ForwardBatch(
            forward_mode=mode,
            req_pool_indices=self._index(rows),
            seq_lens=self._index(lens),
            out_cache_loc=slots.to(self.device),
            **fields,
        )

    def _admitted(self, limit: int) -> Request:
        return Request(self.rows.alloc()[0], limit)

    def _leave(self, request: Request) -> None:
        self.backend.release(self._index([request.row]))
        self.slots.free(request.slots)
        self.rows.free([request.row])

    def _tidy(self) -> None:
        """Window pages that nobody reaches go back, and so do requests that are done."""
        for request in self.active:
            gone = max(0, request.length - self.sizes.window) // self.sizes.page * self.sizes.page
            if gone > request.evicted:
                self.slots.evict(request.slots[request.evicted : gone])
                request.evicted = gone
        done = [
            r for r in self.active if r.length + self.sizes.prompt // 4 + DRAFTS > r.limit or self.pick.random() < 0.01
        ]
        for request in done:
            self._leave(request)
        self.active = [request for request in self.active if request not in done]
        self.served += len(done)

    def _room(self) -> int:
        """How many prompts may come at once."""
        return min(4, self.sizes.requests - len(self.active))

    def _some(self) -> list[Request]:
        return self.pick.sample(self.active, self.pick.randint(1, len(self.active)))

    def _more(self, request: Request, most: int) -> int:
        return self.pick.randint(1, max(1, min(most, request.limit - request.length)))

    def inputs(self, tokens: int) -> dict[str, Tensor]:
        return {name: tensor[:tokens] for name, tensor in self.noise.items()}

    def _index(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, device=self.device)

    def _allocations(self) -> int:
        return int(torch.cuda.memory_stats(self.device)["allocation.all.allocated"]) if self.on_gpu else 0
