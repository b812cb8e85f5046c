"""The same texts served in different ways: alone, together, whole, in chunks, token by token.

texts = Texts([70, 9], LAYERS)
whole = texts.run(make, texts.whole())
assert texts.same(whole, texts.run(make, texts.chunked([16])))
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from faback import AttentionLayer, BackendConfig, ForwardBatch, Pools
from faback.pools import MHAPool, MLAPool, PageAllocator, ReqToTokenPool

Tensor = torch.Tensor
Piece = tuple[int, int, int]
"""Text, first token and end of what a pass brings of it."""
Pass = tuple[str, list[Piece]]
"""Forward mode and pieces; a piece of text -1 is a padded row."""


@attrs.define(eq=False)
class Texts:
    """Requests of given lengths, their queries, keys and values, and the model's layers.

    Attributes:
        lens: tokens of each text.
        layers: all of one shape, latent or none.
        dtype, kv_dtype: of q and of the pool.
        page_size: tokens per page.
        device: where everything lies.
    """

    lens: Sequence[int]
    layers: Sequence[AttentionLayer]
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    page_size: int = 4
    device: str = "cpu"
    _tensors: dict[Any, tuple[Tensor, ...]] = attrs.field(factory=dict, init=False)

    def tensors(self, text: int, layer: AttentionLayer) -> tuple[Tensor, ...]:
        """q, k and v of all tokens of a text."""
        key = text, layer.layer_id
        if key not in self._tensors:
            generator = torch.Generator().manual_seed(1000 * text + layer.layer_id)
            shapes = (layer.num_q_heads, layer.head_dim), (layer.num_kv_heads, layer.head_dim)
            shapes += ((layer.num_kv_heads, layer.v_head_dim),)
            made = (torch.randn(self.lens[text], *shape, generator=generator) for shape in shapes)
            self._tensors[key] = tuple(tensor.to(self.device, self.dtype) for tensor in made)
        return self._tensors[key]

    def whole(self) -> list[Pass]:
        """Each text alone, in one pass."""
        return [("extend", [(text, 0, length)]) for text, length in enumerate(self.lens)]

    def chunked(self, sizes: Sequence[int]) -> list[Pass]:
        """Each text alone, in chunks of these sizes by turns."""
        passes: list[Pass] = []
        for text, length in enumerate(self.lens):
            start = 0
            while start < length:
                end = min(length, start + sizes[len(passes) % len(sizes)])
                passes.append(("extend", [(text, start, end)]))
                start = end
        return passes

    def together(self, seed: int, mode: str = "extend", longest: int = 40) -> list[Pass]:
        """Any texts at once, a random piece of each, padded rows among them."""
        pick, passes = random.Random(seed), list[Pass]()
        done = [0] * len(self.lens)
        while unfinished := [text for text, length in enumerate(self.lens) if done[text] < length]:
            chosen = pick.sample(unfinished, pick.randint(1, len(unfinished)))
            pieces = [(t, done[t], min(self.lens[t], done[t] + pick.randint(1, longest))) for t in chosen]
            for text, _, end in pieces:
                done[text] = end
            pieces += [(-1, 0, 1)] * pick.randint(0, 2)
            pick.shuffle(pieces)
            passes.append((mode, pieces))
        return passes

    def decoded(self, prompts: Sequence[int], seed: int) -> list[Pass]:
        """Prompts whole, then token by token, in batches of any order and size."""
        pick = random.Random(seed)
        passes: list[Pass] = [("extend", [(text, 0, prompt)]) for text, prompt in enumerate(prompts)]
        done = list(prompts)
        while unfinished := [text for text, length in enumerate(self.lens) if done[text] < length]:
            chosen = pick.sample(unfinished, pick.randint(1, len(unfinished)))
            pieces = [(text, done[text], done[text] + 1) for text in chosen]
            for text in chosen:
                done[text] += 1
            pieces += [(-1, 0, 1)] * pick.randint(0, 2)
            pick.shuffle(pieces)
            passes.append(("decode", pieces))
        return passes

    def run(self, make: Callable[..., Any], passes: Sequence[Pass], seed: int = 0, **config: Any) -> dict[Any, Tensor]:
        """(text, layer id) -> what all its tokens answered; texts lie in other pages for each seed."""
        longest = max(self.lens)
        slots = PageAllocator(sum(-(-n // self.page_size) for n in self.lens) + 6, self.page_size, self.device)
        rows = ReqToTokenPool(num_requests=len(self.lens) + 1, context_len=longest, device=self.device)
        pool = MLAPool if self.layers[0].latent else MHAPool
        dtype = self.kv_dtype or self.dtype
        kv = pool(
            num_pages=slots.num_pages, page_size=self.page_size, layers=self.layers, dtype=dtype, device=self.device
        )
        settings = BackendConfig(context_len=longest, dtype=self.dtype, deterministic=True, **config)
        backend = make(settings, Pools(req_to_token=rows.req_to_token, kv=kv), self.layers)
        order = list(range(len(self.lens)))
        random.Random(seed).shuffle(order)
        table = dict[int, int]()
        for text in order:
            (table[text],) = rows.alloc()
            rows.write(table[text], 0, slots.alloc_extend([0], [self.lens[text]]))
        found = {
            (text, layer.layer_id): torch.full((n, layer.num_q_heads, layer.v_head_dim), torch.nan, dtype=self.dtype)
            for text, n in enumerate(self.lens)
            for layer in self.layers
        }
        for mode, pieces in passes:
            backend.plan(self._batch(mode, pieces, table, rows.req_to_token))
            for layer in self.layers:
                answers = self._attend(backend, pieces, layer).cpu().split([end - start for _, start, end in pieces])
                for (text, start, end), answer in zip(pieces, answers, strict=True):
                    if text >= 0:
                        found[text, layer.layer_id][start:end] = answer
        return found

    def same(self, one: dict[Any, Tensor], other: dict[Any, Tensor]) -> list[str]:
        """Where the two differ in any bit, or have no answer."""
        return [
            f"text {text} of {self.lens[text]} tokens, layer {layer}: {int((~equal).sum())} tokens differ, "
            f"the first is {int((~equal).nonzero()[0])}"
            for (text, layer), tensor in one.items()
            if not bool((equal := (tensor == other[text, layer]).flatten(1).all(1)).all())
        ]

    def _batch(self, mode: str, pieces: Sequence[Piece], table: dict[int, int], req_to_token: Tensor) -> ForwardBatch:
        def index(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, device=self.device)

        owned = [(table.get(text, 0), start, end) for text, start, end in pieces]
        slots = [
            req_to_token[row, start:end] if row else req_to_token.new_zeros(end - start) for row, start, end in owned
        ]
        lens = [end for _, _, end in owned]
        new = [end - start for _, start, end in owned]
        more = {} if mode == "decode" else {"extend_seq_lens": index(new), "extend_seq_lens_cpu": torch.tensor(new)}
        return ForwardBatch(
            forward_mode=mode,
            req_pool_indices=index([row for row, _, _ in owned]),
            seq_lens=index(lens),
            seq_lens_cpu=torch.tensor(lens),
            out_cache_loc=torch.cat(slots).long(),
            **more,
        )

    def _attend(self, backend: Any, pieces: Sequence[Piece], layer: AttentionLayer) -> Tensor:
        parts = [[t[start:end] for t in self.tensors(max(0, text), layer)] for text, start, end in pieces]
        q, k, v = (torch.cat(column) for column in zip(*parts, strict=True))
        return backend.forward(q, k, None if layer.latent else v, layer)
