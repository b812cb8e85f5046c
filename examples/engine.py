"""The smallest honest engine on faback's facade: continuous batching, chunked prefill, prefix reuse, tree speculation
and, on a GPU, CUDA graphs. Greedy; the model is a small random one (`small_model.py`, drafts come from `drafts.py`).

    python examples/engine.py

Read `Engine.step` first. Everything that touches faback is `Engine.__init__`, `_run` and the two methods that pack.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import torch
from drafts import TOPK, Tree, tree
from small_model import Model
from torch import Tensor

from faback import AttentionBackend, BackendConfig, ForwardBatch, GraphRunner, Pools, SpeculativeConfig
from faback.graph_runner import capture_all
from faback.pools import MHAPool, PageAllocator, ReqToTokenPool

NODES = 8
"""Drafts that are verified at once, a text's own last token among them."""


@attrs.define(eq=False)
class Request:
    """One text as it grows, to `wanted` tokens; the first `cached` ones have their keys in pages."""

    tokens: list[int]
    wanted: int
    row: int = 0
    pages: list[int] = attrs.field(factory=list)
    cached: int = 0

    @property
    def done(self) -> bool:
        return len(self.tokens) >= self.wanted


@attrs.define(eq=False)
class Prefixes:
    """Whole pages by what they hold: (page before, its tokens) -> page. They stay until room is short."""

    allocator: PageAllocator
    _known: dict[tuple[int, tuple[int, ...]], int] = attrs.field(factory=dict)
    _users: dict[int, int] = attrs.field(factory=dict)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The pages that hold a text's beginning, which stays in use; its last token is left to be run."""
        size, pages = self.allocator.page_size, list[int]()
        for end in range(size, len(tokens), size):
            page = self._known.get((pages[-1] if pages else 0, tuple(tokens[end - size : end])))
            if page is None:
                break
            pages.append(page)
        for page in pages:
            self._users[page] += 1
        return pages

    def release(self, request: Request) -> None:
        """A request's whole pages become known, or go back if others hold the same already; the last one goes back."""
        size, before, lost = self.allocator.page_size, 0, False
        for index, page in enumerate(request.pages):
            tokens = tuple(request.tokens[index * size : (index + 1) * size])
            whole = (index + 1) * size <= request.cached
            if page in self._users:
                self._users[page] -= 1
            elif whole and not lost and (before, tokens) not in self._known:
                self._known[before, tokens], self._users[page] = page, 0
            else:
                lost = True  # what follows would hang on a page that is gone
                self.allocator.free(torch.tensor([page * size]))
            before = page
        request.pages = []

    def make_room(self, pages: int) -> bool:
        """Gives unused pages back, the youngest of a chain first, until so many are free."""
        for key, page in reversed(list(self._known.items())):
            if self.allocator.available_pages >= pages:
                break
            if self._users[page] == 0 and not any(before == page for before, _ in self._known):
                del self._known[key], self._users[page]
                self.allocator.free(torch.tensor([page * self.allocator.page_size]))
        return self.allocator.available_pages >= pages


class Engine:
    """Serves texts with one model.

    Args:
        model: on the device where everything runs.
        num_pages, page_size: of the KV pool.
        context_len: the longest text.
        max_requests: texts that run at once.
        chunk: prompt tokens of one pass at most.
        speculate: verify trees of drafts looked up in the text itself.
        graphs: record decode and verify passes.
        kernels: as in `BackendConfig`.
    """

    def __init__(
        self,
        model: Model,
        *,
        num_pages: int = 128,
        page_size: int = 4,
        context_len: int = 256,
        max_requests: int = 8,
        chunk: int = 32,
        speculate: bool = False,
        graphs: bool = False,
        kernels: str = "auto",
    ) -> None:
        device, layers, dtype = model.embed.weight.device, model.attention, model.embed.weight.dtype
        self.rows = ReqToTokenPool(max_requests, context_len, device)
        self.kv = MHAPool(num_pages=num_pages, page_size=page_size, layers=layers, dtype=dtype, device=device)
        self.allocator = PageAllocator(num_pages, page_size)
        self.prefixes = Prefixes(self.allocator)
        speculative = SpeculativeConfig(topk=TOPK, num_steps=NODES - 1, num_draft_tokens=NODES)
        config = BackendConfig(context_len=context_len, dtype=dtype, kernels=kernels, speculative=speculative)
        pools = Pools(req_to_token=self.rows.req_to_token, kv=self.kv)
        self.backend = AttentionBackend(config, pools, layers)
        self.model, self.device, self.chunk, self.speculate = model, device, chunk, speculate
        self.waiting, self.running = list[Request](), list[Request]()
        self.passes, self.reused, self.room = (
            {"extend": 0, "decode": 0, "target_verify": 0, "graphs": 0},
            0,
            context_len,
        )
        self.graphs: dict[str, GraphRunner] = {}
        if graphs:
            self._record(max_requests)

    def submit(self, prompt: Sequence[int], new_tokens: int) -> Request:
        """Queues a text."""
        assert prompt and len(prompt) + new_tokens + NODES <= self.room
        self.waiting.append(Request(list(prompt), len(prompt) + new_tokens))
        return self.waiting[-1]

    @torch.inference_mode()
    def step(self) -> bool:
        """One pass; False if there was nothing to do."""
        while self.waiting and self._admit(self.waiting[0]):
            self.running.append(self.waiting.pop(0))
        if not self.running:
            return False
        prompts = [r for r in self.running if len(r.tokens) - r.cached > 1]
        if prompts:
            self._extend(prompts)
        elif self.speculate:
            self._verify([(r, tree(r.tokens, NODES)) for r in self.running])
        else:
            self._decode(self.running)
        for request in [r for r in self.running if r.done]:
            self.running.remove(request)
            self.backend.release(torch.tensor([request.row], device=self.device))
            self.prefixes.release(request)
            self.rows.free([request.row])
        return True

    def _admit(self, request: Request) -> bool:
        """Gives a text a row, its known prefix and all pages that it can ever need; nothing is preempted later."""
        if self.rows.available == 0:
            return False
        size = self.allocator.page_size
        request.pages = self.prefixes.match(request.tokens)
        needed = -(-(request.wanted + NODES) // size) - len(request.pages)
        if not self.prefixes.make_room(needed):
            self.prefixes.release(request)
            return False
        request.cached = len(request.pages) * size
        self.reused += request.cached
        request.pages += (self.allocator.alloc_pages(needed)[::size] // size).tolist()
        [request.row] = self.rows.alloc()
        slots = torch.tensor(request.pages)[:, None] * size + torch.arange(size)
        self.rows.write(request.row, 0, slots.flatten()[: self.room])
        return True

    def _extend(self, requests: list[Request]) -> None:
        """A chunk of each prompt; one that is complete yields its first token."""
        counts, left = [], self.chunk
        for request in requests:
            counts.append(min(left, len(request.tokens) - request.cached))
            left -= counts[-1]
        runs = [(request, count) for request, count in zip(requests, counts, strict=True) if count]
        logits = self._run("extend", runs, [list(range(r.cached, r.cached + n)) for r, n in runs])
        ends = torch.tensor([n for _, n in runs]).cumsum(0) - 1
        for (request, count), token in zip(runs, logits[ends].argmax(-1).tolist(), strict=True):
            request.cached += count
            if request.cached == len(request.tokens):
                request.tokens.append(token)

    def _decode(self, requests: list[Request]) -> None:
        logits = self._run("decode", [(r, 1) for r in requests], [[r.cached] for r in requests])
        for request, token in zip(requests, logits.argmax(-1).tolist(), strict=True):
            request.cached += 1
            request.tokens.append(token)

    def _verify(self, drafts: list[tuple[Request, Tree]]) -> None:
        """Trees of drafts in one pass; accepted nodes' keys move to where a plain pass would have put them."""
        runs = [(request, len(drafted.tokens)) for request, drafted in drafts]
        depths = [[r.cached + depth for depth in drafted.depths] for r, drafted in drafts]
        blocks = [torch.cat([torch.ones(NODES, r.cached, dtype=torch.bool), t.mask()], 1).flatten() for r, t in drafts]
        ids = [drafted.tokens for _, drafted in drafts]
        choices = self._run("target_verify", runs, depths, ids, torch.cat(blocks)).argmax(-1).view(-1, NODES).tolist()
        moves = list[tuple[int, int]]()
        for (request, drafted), chosen in zip(drafts, choices, strict=True):
            path = drafted.accepted(chosen)[: request.wanted - len(request.tokens)]
            moves += [(self._slot(request, request.cached + node), self._slot(request, request.cached + place))
                      for place, node in enumerate(path) if node != place]  # fmt: skip
            request.tokens += [chosen[node] for node in path]
            request.cached += len(path)
        if moves:
            self.kv.copy_slots(*map(list, zip(*moves, strict=True)))

    def _run(
        self,
        mode: str,
        runs: list[tuple[Request, int]],
        positions: list[list[int]],
        ids: list[list[int]] | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """[tokens, vocab] logits of one pass over the next tokens of each text."""
        if ids is None:
            ids = [request.tokens[request.cached : request.cached + count] for request, count in runs]
        slots = [self._slot(request, request.cached + j) for request, count in runs for j in range(count)]
        committed = mode == "target_verify"
        lens = torch.tensor([r.cached + (0 if committed else n) for r, n in runs])
        batch = ForwardBatch(
            forward_mode=mode,
            req_pool_indices=self._there([request.row for request, _ in runs]),
            seq_lens=lens.to(self.device),
            seq_lens_cpu=lens,
            out_cache_loc=self._there(slots),
            extend_seq_lens=self._there([count for _, count in runs]) if mode == "extend" else None,
            custom_mask=None if mask is None else mask.to(self.device),
        )
        tokens, places = (self._there([x for line in lines for x in line]) for lines in (ids, positions))
        self.passes[mode] += 1
        runner = self.graphs.get(mode)
        if runner is not None and runner.size_for(batch.bs) is not None:
            self.passes["graphs"] += 1
            return runner.run(batch, ids=tokens, positions=places)
        self.backend.plan(batch)
        return self.model(self._attend, tokens, places)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.backend.forward(q, k, v, self.model.attention[layer])

    @torch.inference_mode()
    def _record(self, requests: int) -> None:
        """Decode and verify passes for 1, 2, 4 ... requests."""

        def passes(batch: ForwardBatch, ids: Tensor, positions: Tensor) -> Tensor:
            return self.model(self._attend, ids, positions)

        for mode, count in (("decode", 1), ("target_verify", NODES)):
            one, each = self._there([0] * requests), self._there([0] * requests * count)
            mask = torch.zeros(requests * NODES * (self.room + NODES), dtype=torch.bool, device=self.device)
            largest = ForwardBatch(
                forward_mode=mode,
                req_pool_indices=one,
                seq_lens=one,
                out_cache_loc=each,
                custom_mask=mask if mode == "target_verify" else None,
            )
            self.graphs[mode] = GraphRunner(self.backend, passes, largest, {"ids": each, "positions": each})
        capture_all(list(self.graphs.values()))

    def _slot(self, request: Request, token: int) -> int:
        size = self.allocator.page_size
        return request.pages[token // size] * size + token % size

    def _there(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, device=self.device)


def main() -> None:
    """Serves a few texts that share a beginning, and says what that took."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    engine = Engine(Model().to(device), speculate=True, graphs=device == "cuda")
    beginning = [int(97 * math.sin(i) ** 2) for i in range(40)]
    requests = [engine.submit([*beginning, n, n + 1], 20) for n in range(12)]
    while engine.step():
        pass
    for request in requests[:3]:
        print(*request.tokens[-20:])
    print(f"{engine.passes} passes, {engine.reused} prompt tokens reused, {engine.allocator.used_pages} pages kept")


if __name__ == "__main__":
    main()
