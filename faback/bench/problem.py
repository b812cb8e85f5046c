"""One measured shape laid out on the GPU: pools with random pages, a batch, q, and a backend for any kernel."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import attrs
import torch

from faback.bench.cases import Case
from faback.core.backend import AttentionBackend
from faback.core.batch import ForwardBatch
from faback.core.config import BackendConfig, SpeculativeConfig
from faback.core.layer import AttentionLayer
from faback.core.pools import Pools
from faback.pools import MHAPool, MLAPool

HEADS, KV_HEADS, DIM = 32, 8, 128
LATENT, ROPE = 512, 64
SCALES = {"k_scale": 0.5, "v_scale": 0.25}
CHECKED_ROWS, CHECKED_QUERIES = 3, 256


class Problem:
    """A Llama-3-8B layer (32 query heads, 8 KV heads, dim 128), or a latent one, in bfloat16.

    Args:
        case: the shape.
        device: where it lies.
        seed: of all random numbers.
        layers: how many there are, each with keys and values of its own.
    """

    def __init__(self, case: Case, device: torch.device | str = "cuda", seed: int = 0, layers: int = 1) -> None:
        self.case, self.device = case, torch.device(device)
        self._random = torch.Generator().manual_seed(seed)
        self._random_there = torch.Generator(self.device).manual_seed(seed)
        self.layer = _layer(case)
        self.layers = [attrs.evolve(self.layer, layer_id=number) for number in range(layers)]
        table, pages = self._table()
        self.kv = _pool(case, self.layers, pages, self.device)
        for layer in self.layers:
            for buffer in self.kv.buffers(layer):
                buffer.copy_(self._noise(*buffer.shape))
        self.pools = Pools(req_to_token=table.to(self.device), kv=self.kv)
        self.begins = list(accumulate((new for _, new in case.lens), initial=0))
        self.q = self._noise(self.begins[-1], self.layer.num_q_heads, self.layer.head_dim)
        self.out = torch.empty_like(self.q[..., : self.layer.v_head_dim], memory_format=torch.contiguous_format)
        self.k = self._noise(self.begins[-1], self.layer.num_kv_heads, self.layer.head_dim)
        self.v = self._noise(self.begins[-1], self.layer.num_kv_heads, self.layer.v_head_dim)
        self.batch = self._batch(table)

    def backend(self, kernel: str, deterministic: bool = False) -> AttentionBackend:
        """A backend pinned to a kernel, with the batch planned; results depend on their request alone if asked for."""
        drafts = max(new for _, new in self.case.lens)
        speculative = SpeculativeConfig(topk=4, num_steps=4, num_draft_tokens=drafts) if self.case.tree else None
        longest = self.pools.req_to_token.shape[1]
        config = BackendConfig(
            context_len=longest, kernels=kernel, speculative=speculative, deterministic=deterministic
        )
        backend = AttentionBackend(config, self.pools, self.layers)
        backend.plan(self.batch)
        return backend

    def run(self, backend: AttentionBackend) -> Callable[[], Any]:
        """The attention of one layer, keys already written."""
        return lambda: backend.forward(self.q, None, None, self.layer, out=self.out, save_kv_cache=False)

    def step(self, backend: AttentionBackend) -> Callable[[], Any]:
        """All layers, each writing its new keys and values and attending: the attention of one forward pass."""

        def run() -> None:
            for layer in self.layers:
                backend.forward(self.q, self.k, self.v, layer, out=self.out)

        return run

    def live_bytes(self) -> int:
        """Bytes of the keys and values that any query sees."""
        window = self.case.window
        reach = sum(c + n if window is None else min(c + n, window + n) for c, n in self.case.lens)
        layer, size = self.layer, self.kv.buffers(self.layer)[0].element_size()
        width = layer.head_dim if layer.latent else layer.head_dim + layer.v_head_dim
        return reach * layer.num_kv_heads * width * size

    def error(self, call: Callable[[], Any]) -> float:
        """Relative error (Frobenius) of the last queries of some requests against plain float32 attention.

        Args:
            call: writes `out`, last of all that of the last layer.

        Raises:
            AssertionError: rows that were not written.
        """
        self.out.fill_(float("nan"))
        call()
        assert not self.out.isnan().any(), "rows that were not written"
        rows = len(self.case.lens)
        return max(self._row_error(row) for row in sorted({0, rows // 2, rows - 1}))

    def _row_error(self, row: int) -> float:
        (cached, new), layer = self.case.lens[row], self.layer
        last = min(new, CHECKED_QUERIES)
        slots = self.pools.req_to_token[row + 1, : cached + new].long()
        keys, values = (buffer[slots].float() for buffer in self.kv.buffers(self.layers[-1]))
        if self.case.fp8:
            keys, values = keys * SCALES["k_scale"], values * SCALES["v_scale"]
        end = self.begins[row + 1]
        span = slice(end - last, end)
        q = self.q[span].float().view(last, layer.num_kv_heads, -1, layer.head_dim)
        scores = torch.einsum("qhgd,khd->hgqk", q, keys) * layer.scale
        weights = scores.masked_fill(~self._visible(row, last), -torch.inf).softmax(-1)
        expected = torch.einsum("hgqk,khd->qhgd", weights, values).reshape(last, layer.num_q_heads, -1)
        return float((self.out[span].float() - expected).norm() / expected.norm())

    def _visible(self, row: int, last: int) -> torch.Tensor:
        """bool [last queries of the request, keys]."""
        cached, new = self.case.lens[row]
        total = cached + new
        if self.case.tree:
            assert self.batch.custom_mask is not None
            begin = sum(n * (c + n) for c, n in self.case.lens[:row])
            return self.batch.custom_mask[begin : begin + new * total].view(new, total)[new - last :]
        p = torch.arange(total - last, total, device=self.device)[:, None]
        t = torch.arange(total, device=self.device)
        seen = t <= p
        return seen if self.case.window is None else seen & (t >= p - self.case.window)

    def _noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=self.device, generator=self._random_there)

    def _table(self) -> tuple[torch.Tensor, int]:
        """The request table on random pages, row 0 unused, and the number of pages, page 0 unused."""
        page, total = self.case.page_size, [cached + new for cached, new in self.case.lens]
        counts = [-(-n // page) for n in total]
        order = torch.randperm(sum(counts), generator=self._random) + 1
        table = torch.zeros(len(total) + 1, max(total), dtype=torch.int32)
        for row, pages in enumerate(torch.split(order, counts)):
            slots = (pages[:, None] * page + torch.arange(page)).flatten()
            table[row + 1, : total[row]] = slots[: total[row]]
        return table, sum(counts) + 1

    def _batch(self, table: torch.Tensor) -> ForwardBatch:
        case = self.case
        cached, new = torch.tensor(case.lens).unbind(1)
        slots = [table[row, c : c + n] for row, (c, n) in enumerate(case.lens, 1)]
        lens = cached if case.tree else cached + new
        fields: dict[str, Any] = {"custom_mask": self._trees()} if case.tree else {}
        if case.mode == "extend":
            fields |= {"extend_seq_lens": new.to(self.device), "extend_seq_lens_cpu": new}
        return ForwardBatch(
            forward_mode=case.mode,
            req_pool_indices=torch.arange(1, len(lens) + 1, dtype=torch.int32, device=self.device),
            seq_lens=lens.to(self.device),
            seq_lens_cpu=lens,
            out_cache_loc=torch.cat(slots).to(self.device),
            **fields,
        )

    def _trees(self) -> torch.Tensor:
        """A random tree per request: each node sees its ancestors and itself."""
        blocks = []
        for cached, drafts in self.case.lens:
            tree = torch.eye(drafts, dtype=torch.bool)
            for node in range(1, drafts):
                tree[node] |= tree[int(torch.randint(0, node, (), generator=self._random))]
            blocks.append(torch.cat([torch.ones(drafts, cached, dtype=torch.bool), tree], dim=1).flatten())
        return torch.cat(blocks).to(self.device)


def _layer(case: Case) -> AttentionLayer:
    if case.latent:
        dims: dict[str, Any] = {"head_dim": LATENT + ROPE, "v_head_dim": LATENT}
        return AttentionLayer(layer_id=0, num_q_heads=case.latent, num_kv_heads=1, latent=True, **dims)
    heads: dict[str, Any] = {"num_q_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM}
    return AttentionLayer(layer_id=0, window=case.window, **heads | (SCALES if case.fp8 else {}))


def _pool(case: Case, layers: list[AttentionLayer], pages: int, device: torch.device) -> MHAPool | MLAPool:
    dtype = torch.float8_e4m3fn if case.fp8 else torch.bfloat16
    kind = MLAPool if case.latent else MHAPool
    return kind(num_pages=pages, page_size=case.page_size, layers=layers, dtype=dtype, device=device)
