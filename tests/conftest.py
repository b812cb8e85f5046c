"""A toy engine for the tests of core, kernels and modes: one pool, one request table, and dense attention to compare.

`World` lays requests out on shuffled pages, fills everything that no request owns with NaN and every table entry that
no request owns with an id far outside the pool, and knows the answer from token identities alone.
"""

from __future__ import annotations

import math
import random

import pytest
import torch

from faback import AttentionBackend, AttentionLayer, BackendConfig, ForwardBatch, Pools
from faback.builtins import BUILTINS
from faback.core.registry import Registry

torch.set_num_threads(1)


class ToyPool:
    """A KVPool of plain tensors, every slot NaN; `interleaved` makes K and V views of one tensor per layer."""

    def __init__(self, layers, slots, page_size=1, dtype=torch.float32, interleaved=False, fill=math.nan):
        self.page_size, self.num_slots, self._dtype = page_size, slots, dtype
        self._kv = {}
        for layer in layers:
            heads, dim, v_dim = layer.num_kv_heads, layer.head_dim, layer.v_head_dim
            if interleaved:
                both = torch.full((slots // page_size, 2, page_size, heads, dim), fill).to(dtype)
                k, v = both.transpose(0, 1).unbind(0)
                stride = (2 * page_size * heads * dim, heads * dim, dim, 1)
                assert k.stride() == v.stride() == stride
                # [pages, page, H, D] has no slot view, so pages of one token are the interleaved layout that has one.
                assert page_size == 1
                self._kv[layer.layer_id] = k.squeeze(1), v.squeeze(1)
            else:
                k, v = torch.full((slots, heads, dim), fill), torch.full((slots, heads, v_dim), fill)
                self._kv[layer.layer_id] = k.to(dtype), v.to(dtype)

    def buffers(self, layer):
        return self._kv[layer.layer_id]

    def dtype(self, kind):
        return self._dtype

    def slot_map(self, group):
        return None


class World:
    """Requests with `lens[i]` tokens of which the last `new[i]` are new; q, k and v of every layer.

    Args:
        fill, table_fill: what lies in slots and table entries that belong to nobody.
        options: of `BackendConfig`.
    """

    def __init__(
        self,
        layers,
        lens,
        new,
        *,
        page_size=1,
        dtype=torch.float32,
        kv_dtype=None,
        index_dtype=torch.int64,
        interleaved=False,
        fill=math.nan,
        table_fill=1 << 30,
        seed=0,
        points=(),
        **options,
    ):
        shuffle, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.layers, self.lens, self.new, self.dtype = list(layers), list(lens), list(new), dtype
        self.index_dtype = index_dtype
        pages = [-(-n // page_size) for n in lens]
        free = list(range(1, 2 * sum(pages) + 3))
        shuffle.shuffle(free)
        width = max([*lens, 1]) + 3
        rows = list(range(1, len(lens) + 3))
        shuffle.shuffle(rows)
        self.rows = rows[: len(lens)]
        table = torch.full((len(rows) + 1, width), table_fill, dtype=index_dtype)
        self.slots = []
        for row, count, length in zip(self.rows, pages, lens, strict=True):
            own = torch.tensor([free.pop() for _ in range(count)], dtype=torch.long)
            slots = (own[:, None] * page_size + torch.arange(page_size)).flatten()[:length]
            table[row, :length] = slots.to(index_dtype)
            self.slots.append(slots)
        total = (2 * sum(pages) + 4) * page_size
        self.pool = ToyPool(layers, total, page_size, kv_dtype or dtype, interleaved, fill)
        self.pools = Pools(req_to_token=table, kv=self.pool)
        self.q, self.k, self.v = {}, {}, {}
        for layer in self.layers:
            h, g, d, e = layer.num_q_heads, layer.num_kv_heads, layer.head_dim, layer.v_head_dim

            def noise(count, heads, dim):
                return torch.randn(count, heads, dim, generator=generator).to(dtype)

            self.q[layer.layer_id] = noise(sum(new), h, d)
            self.k[layer.layer_id] = [noise(n, g, d) for n in lens]
            self.v[layer.layer_id] = [noise(n, g, e) for n in lens]
        self.config = BackendConfig(context_len=width, dtype=dtype, **options)
        registry = Registry.load(self.config, BUILTINS, points)
        self.backend = AttentionBackend(self.config, self.pools, self.layers, registry=registry)
        self.cache_prefixes()

    def cache_prefixes(self):
        """Puts the tokens that are not new into the pool."""
        for layer in self.layers:
            caches = self.pool.buffers(layer)
            scales = layer.k_scale, layer.v_scale
            for cache, tokens, scale in zip(caches, (self.k, self.v), scales, strict=True):
                for slots, values, new in zip(self.slots, tokens[layer.layer_id], self.new, strict=True):
                    factor = scale.view(-1, 1) if isinstance(scale, torch.Tensor) else scale or 1.0
                    cached = values[: len(values) - new].float() / factor
                    if cache.dtype.itemsize == 1:
                        cached = cached.clamp(-torch.finfo(cache.dtype).max, torch.finfo(cache.dtype).max)
                    cache[slots[: len(values) - new]] = cached.to(cache.dtype)

    def batch(self, mode="extend", **changes):
        def index(values):
            return torch.tensor(values, dtype=self.index_dtype)

        new_slots = [s[len(s) - n :] for s, n in zip(self.slots, self.new, strict=True)]
        fields = {
            "req_pool_indices": index(self.rows),
            "seq_lens": index(self.lens),
            "out_cache_loc": torch.cat([*new_slots, torch.zeros(0, dtype=torch.long)]).to(self.index_dtype),
        }
        if mode in ("extend", "mixed"):
            fields["extend_seq_lens"] = index(self.new)
        return ForwardBatch(forward_mode=mode, **{**fields, **changes})

    def fresh(self, layer):
        """k and v of the new tokens, packed."""
        return tuple(
            torch.cat([t[len(t) - n :] for t, n in zip(tokens[layer.layer_id], self.new, strict=True)] or [tokens])
            for tokens in (self.k, self.v)
        )

    def run(self, layer, mode="extend", **kwargs):
        """Plans and attends."""
        self.backend.plan(self.batch(mode))
        return self.backend.forward(self.q[layer.layer_id], *self.fresh(layer), layer, **kwargs)

    def expected(self, layer, sinks=None):
        """float64 out and lse, one query and one head at a time."""
        q, group = self.q[layer.layer_id].double(), layer.num_q_heads // layer.num_kv_heads
        out = torch.zeros(q.shape[0], layer.num_q_heads, layer.v_head_dim, dtype=torch.float64)
        lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
        token = 0
        for request, (length, new) in enumerate(zip(self.lens, self.new, strict=True)):
            k, v = self.k[layer.layer_id][request].double(), self.v[layer.layer_id][request].double()
            for p in range(length - new, length):
                low = 0 if layer.window is None else max(0, p - layer.window)
                for head in range(layer.num_q_heads):
                    scores = (k[low : p + 1, head // group] @ q[token, head]) * layer.scale
                    if layer.softcap:
                        scores = layer.softcap * torch.tanh(scores / layer.softcap)
                    lse[token, head] = scores.logsumexp(0)
                    bottom = lse[token, head]
                    if sinks is not None:
                        bottom = torch.logaddexp(bottom, sinks[head].double())
                    out[token, head] = (scores - bottom).exp() @ v[low : p + 1, head // group]
                token += 1
        return out, lse

    def check(self, layer, result, *, sinks=None, atol=2e-5):
        """The result is the dense one."""
        torch.testing.assert_close(result.double(), self.expected(layer, sinks)[0], atol=atol, rtol=0)


@pytest.fixture
def world():
    """The class `World`."""
    return World


@pytest.fixture
def layer():
    """Makes an `AttentionLayer` of a few small heads; arguments replace its fields."""

    def make(layer_id=0, **fields):
        return AttentionLayer(layer_id=layer_id, **{"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 8, **fields})

    return make
