"""Requests whose queries, keys and values depend on who and where a token is, and on nothing else.

One story can so be told in many ways: on other pages, in another order, in pieces, with other contents in what nobody
owns. The answers, by request and position, must stay.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count
from typing import Any

import attrs
import torch

from faback import AttentionBackend, AttentionLayer, BackendConfig, ForwardBatch, Pools
from faback.builtins import BUILTINS
from faback.core.registry import Registry
from faback.pools import MHAPool
from faback.testing import poor

Tensor = torch.Tensor

HEADS, KV_HEADS, DIM = 4, 2, 8
LAYERS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"window": 3},
    "local": {"chunk": 5},
    "scores": {"sinks": True, "softcap": 4.0, "window": 6},
}


@attrs.frozen(kw_only=True)
class Story:
    """What happens.

    Attributes:
        lens: tokens of each request in the end.
        new: how many of them the pass brings.
        rule: a key of `LAYERS`.
        seed: of all numbers.
        changed: (request, position) of a token that is another one, or None.
    """

    lens: tuple[int, ...]
    new: tuple[int, ...]
    rule: str = "full"
    seed: int = 0
    changed: tuple[int, int] | None = None

    @property
    def layer(self) -> AttentionLayer:
        """The only layer."""
        sizes = {"num_q_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM}
        return AttentionLayer(layer_id=0, **sizes, **LAYERS[self.rule])

    def numbers(self, what: str, request: int, position: int) -> Tensor:
        """q, k or v of one token."""
        other = what != "q" and self.changed == (request, position)
        generator = torch.Generator().manual_seed(
            hash((self.seed, "qkv".index(what), request, position, other)) % 2**31
        )
        return torch.randn(HEADS if what == "q" else KV_HEADS, DIM, generator=generator)


@attrs.frozen(kw_only=True)
class Telling:
    """How a story is told.

    Attributes:
        page_size: tokens per page.
        layout: which pages and rows are taken, by seed.
        poison: what lies in slots that nobody owns.
        garbage: what stands in table entries that nobody owns.
        order: requests, in the order of the batch; that of the story if None.
        pieces: the new tokens come in so many passes.
        kernel: who attends.
        deterministic: as in `BackendConfig`.
    """

    page_size: int = 1
    layout: int = 0
    poison: float = float("nan")
    garbage: int = 1 << 30
    order: tuple[int, ...] | None = None
    pieces: int = 1
    kernel: str = "reference"
    deterministic: bool = False

    def tell(self, story: Story) -> dict[tuple[int, int], Tensor]:
        """The output [heads, dim] of each new token, by request and position."""
        pick, layer = random.Random(self.layout), story.layer
        width = max([*story.lens, 1])
        counts = [-(-n // self.page_size) for n in story.lens]
        pages = list(range(1, 2 * sum(counts) + 3))
        pick.shuffle(pages)
        rows = pick.sample(range(1, len(story.lens) + 3), len(story.lens))
        kv = MHAPool(num_pages=len(pages) + 1, page_size=self.page_size, layers=[layer], dtype=torch.float32)
        for buffer in kv.buffers(layer):
            buffer.fill_(self.poison)
        table = torch.full((len(story.lens) + 3, width), self.garbage, dtype=torch.int64)
        for request, (row, count_, length) in enumerate(zip(rows, counts, story.lens, strict=True)):
            own = torch.tensor([pages.pop() for _ in range(count_)], dtype=torch.int64)
            slots = (own[:, None] * self.page_size + torch.arange(self.page_size)).flatten()[:length]
            table[row, :length] = slots
            for position in range(length - story.new[request]):
                for buffer, what in zip(kv.buffers(layer), "kv", strict=True):
                    buffer[slots[position]] = story.numbers(what, request, position)
        config = BackendConfig(
            context_len=width, dtype=torch.float32, kernels=self.kernel, deterministic=self.deterministic
        )
        registry = Registry.load(config, BUILTINS, entry_points=[])
        registry.register(poor, "poor")
        backend = AttentionBackend(config, Pools(req_to_token=table, kv=kv), [layer], registry=registry)
        sinks = torch.linspace(-1, 1, HEADS) if layer.sinks else None
        found: dict[tuple[int, int], Tensor] = {}
        done = [length - new for length, new in zip(story.lens, story.new, strict=True)]
        for piece in range(self.pieces):
            ends = [
                length - new + new * (piece + 1) // self.pieces
                for length, new in zip(story.lens, story.new, strict=True)
            ]
            self._pass(story, backend, table, rows, done, ends, sinks, found)
            done = ends
        return found

    def _pass(
        self,
        story: Story,
        backend: AttentionBackend,
        table: Tensor,
        rows: Sequence[int],
        begins: Sequence[int],
        ends: Sequence[int],
        sinks: Tensor | None,
        found: dict[tuple[int, int], Tensor],
    ) -> None:
        order = range(len(rows)) if self.order is None else self.order
        tokens = [(request, position) for request in order for position in range(begins[request], ends[request])]
        stack = {what: [story.numbers(what, *token) for token in tokens] for what in "qkv"}
        shape = {"q": (0, HEADS, DIM), "k": (0, KV_HEADS, DIM), "v": (0, KV_HEADS, DIM)}
        q, k, v = (torch.stack(stack[what]) if tokens else torch.zeros(shape[what]) for what in "qkv")
        batch = ForwardBatch(
            forward_mode="extend",
            req_pool_indices=torch.tensor([rows[request] for request in order]),
            seq_lens=torch.tensor([ends[request] for request in order]),
            extend_seq_lens=torch.tensor([ends[request] - begins[request] for request in order]),
            out_cache_loc=torch.tensor([int(table[rows[r], p]) for r, p in tokens], dtype=torch.int64),
        )
        given = [x.clone() for x in (q, k, v, table, batch.req_pool_indices, batch.seq_lens, batch.extend_seq_lens)]
        backend.plan(batch)
        out = backend.forward(q, k, v, story.layer, sinks=sinks)
        after = [q, k, v, table, batch.req_pool_indices, batch.seq_lens, batch.extend_seq_lens]
        assert all(map(torch.equal, given, after)), "an input was changed"
        assert isinstance(out, Tensor)
        found |= {token: out[index] for index, token in zip(count(), tokens, strict=False)}
