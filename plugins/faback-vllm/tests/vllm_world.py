"""vLLM's side of a forward pass, and what attention over the true tokens must give.

A `World` has requests with texts of keys and values, lays them into blocks as vLLM does, and says so in vLLM's own
`CommonAttentionMetadata`. `expected` knows nothing of blocks: it attends to the texts. Everything lives on torch's
default device.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import vllm_here
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata

from faback_vllm.backend import FabackAttentionBackend

TOLERANCE = 2e-5
ORDERS = {"LBNHC": (0, 2, 1, 3), "LBHNC": (0, 1, 2, 3), "LHBNC": (1, 0, 2, 3)}
"""Memory orders of [blocks, heads, tokens, content] of one layer."""


def layer(name: str, **options: Any) -> SimpleNamespace:
    """What the plugin reads of vLLM's `Attention` module."""
    given = {"num_heads": 4, "head_size": 16, "scale": 0.25, "num_kv_heads": 2, **options}
    scales = given.pop("scales", (1.0, 1.0))
    impl = FabackAttentionBackend.get_impl_cls()(**given)
    k_scale, v_scale = (torch.tensor(scale, dtype=torch.float32) for scale in scales)
    return SimpleNamespace(
        layer_name=name,
        impl=impl,
        kv_cache=torch.tensor([]),
        _k_scale=k_scale,
        _v_scale=v_scale,
        kv_sharing_target_layer_name=impl.kv_sharing_target_layer_name,
    )


def config_of(layers: list[Any], **settings: Any) -> SimpleNamespace:
    """What the plugin reads of `VllmConfig`."""
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={one.layer_name: one for one in layers}),
        model_config=SimpleNamespace(max_model_len=128, dtype=torch.float32),
        device_config=SimpleNamespace(device=torch.get_default_device()),
        additional_config={"faback": settings},
    )


class World:
    """Requests whose keys lie in blocks.

    Args:
        layers: of one KV cache group, as `layer` makes them.
        block_size: tokens per block.
        order: memory order of the caches, or "apart" for blocks between which other layers lie.
        seed: of texts and of the order of blocks.
        settings: faback's, in `additional_config`.
    """

    def __init__(
        self, layers: list[Any], *, block_size: int = 16, order: str = "LBNHC", seed: int = 0, **settings: Any
    ) -> None:
        self.layers, self.size, self.pick = layers, block_size, random.Random(seed)
        self.generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
        self.blocks = 200
        self.free = list(range(1, self.blocks))  # block 0 is vLLM's null block
        self.pick.shuffle(self.free)
        for one in layers:
            if one.impl.kv_sharing_target_layer_name is None and not one.impl.attn_type.startswith("encoder_only"):
                one.kv_cache = self.cache(one, order)
        by_name = {one.layer_name: one for one in layers}
        for one in layers:
            if one.impl.kv_sharing_target_layer_name is not None:
                one.kv_cache = by_name[one.impl.kv_sharing_target_layer_name].kv_cache
        spec = SimpleNamespace(block_size=block_size, dtype=self.stored(layers[0]))
        names = [one.layer_name for one in layers]
        self.vllm_config = config_of(layers, **settings)
        cls = FabackAttentionBackend.get_builder_cls()
        self.builder = cls(spec, names, self.vllm_config, torch.get_default_device())
        self.tables: list[list[int]] = []
        self.texts: list[dict[str, tuple[Tensor, Tensor]]] = []

    def stored(self, one: Any) -> torch.dtype:
        return torch.uint8 if one.impl.kv_cache_dtype.startswith("fp8") else torch.float32

    def cache(self, one: Any, order: str) -> Tensor:
        """[blocks, heads, size, 2 * dim] in a memory order, poisoned."""
        shape = self.blocks, one.impl.num_kv_heads, self.size, 2 * one.impl.head_size
        poison = 0x7F if self.stored(one) == torch.uint8 else math.nan  # 0x7f is NaN in e4m3, and in e5m2
        if order == "apart":
            whole = torch.full((shape[0], 3, *shape[1:]), poison, dtype=self.stored(one))
            return whole[:, 1]
        permuted = ORDERS[order]
        memory = torch.full([shape[axis] for axis in permuted], poison, dtype=self.stored(one))
        return memory.permute([permuted.index(axis) for axis in range(4)])

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def add(self) -> int:
        """A request without a token."""
        self.tables.append([])
        self.texts.append(
            {
                one.layer_name: (
                    self.noise(0, one.impl.num_kv_heads, one.impl.head_size),
                    self.noise(0, one.impl.num_kv_heads, one.impl.head_size),
                )
                for one in self.layers
            }
        )
        return len(self.tables) - 1

    def length(self, request: int) -> int:
        return self.texts[request][self.layers[0].layer_name][0].shape[0]

    def common(self, new: list[tuple[int, int]], *, padded: tuple[int, int] = (0, 0), **changes: Any) -> Any:
        """vLLM's metadata of a pass, for (request, new tokens) and padded (requests, tokens)."""
        slots, lens, queries = [], [], [count for _, count in new]
        for request, count in new:
            begin, end = self.length(request), self.length(request) + count
            while len(self.tables[request]) * self.size < end:
                self.tables[request].append(self.free.pop())
            table = self.tables[request]
            slots += [table[t // self.size] * self.size + t % self.size for t in range(begin, end)]
            lens.append(end)
        width = max([1, *(len(self.tables[request]) for request, _ in new)]) + 2
        blocks = torch.full((len(new) + padded[0], width), 1 << 30, dtype=torch.int32)
        for row, (request, _) in enumerate(new):
            blocks[row, : len(self.tables[request])] = torch.tensor(self.tables[request], dtype=torch.int32)
        offsets = torch.tensor([0, *queries, *[0] * padded[0]], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        fields = {
            "query_start_loc": offsets,
            "query_start_loc_cpu": offsets.cpu().clone(),
            "seq_lens": torch.tensor([*lens, *[0] * padded[0]], dtype=torch.int32),
            "num_reqs": len(new) + padded[0],
            "num_actual_tokens": sum(queries) + padded[1],
            "max_query_len": max([0, *queries]),
            "max_seq_len": max([0, *lens]),
            "block_table_tensor": blocks,
            "slot_mapping": torch.tensor([*slots, *[-1] * padded[1]], dtype=torch.int64),
            "causal": True,
        }
        return CommonAttentionMetadata(**fields | changes)

    def step(self, new: list[tuple[int, int]], *, prefix: int = 0, extra: int = 0, **options: Any) -> None:
        """One pass: new keys are written, every layer's output is compared, and the texts grow.

        Args:
            new: (request, new tokens).
            prefix: `common_prefix_len`.
            extra: rows of q, k and v past `num_actual_tokens`, as piecewise graphs have them.
            options: of `common`.
        """
        common = self.common(new, **options)
        metadata = self.builder.build(prefix, common)
        self.attend(metadata, common, new, extra)

    def attend(
        self,
        metadata: Any,
        common: Any,
        new: list[tuple[int, int]],
        extra: int = 0,
        run: Callable[..., None] | None = None,
    ) -> None:
        """All layers of one planned pass; `run(layer, q, k, v, out)` stands in for a layer's call."""
        tokens, live = common.num_actual_tokens + extra, sum(count for _, count in new)
        for one in self.layers:
            impl = one.impl
            q = self.noise(tokens, impl.num_heads, impl.head_size)
            k, v = (self.noise(tokens, impl.num_kv_heads, impl.head_size) for _ in "kv")
            q[live:], k[live:], v[live:] = math.nan, math.nan, math.nan
            target = impl.kv_sharing_target_layer_name
            begin = 0
            for request, count in new:
                old = self.texts[request]
                mine = (k[begin : begin + count], v[begin : begin + count])
                if target is None:
                    pairs = zip(old[one.layer_name], mine, strict=True)
                    old[one.layer_name] = tuple(torch.cat(pair) for pair in pairs)
                else:
                    old[one.layer_name] = old[target]
                begin += count
            out = torch.full((tokens, impl.num_heads, impl.head_size), 7.0)
            if run is None:
                assert impl.forward(one, q, k, v, one.kv_cache, metadata, out) is out
            else:
                run(one, q, k, v, out)
            wanted = self.expected(one, q, new, common.causal)
            torch.testing.assert_close(out[:live], wanted, atol=TOLERANCE, rtol=0)
            assert not out[live : common.num_actual_tokens].any(), "a token of nobody gets zeros"
            assert (out[common.num_actual_tokens :] == 7).all(), "rows that vLLM does not count are left alone"

    def expected(self, one: Any, q: Tensor, new: list[tuple[int, int]], causal: bool) -> Tensor:
        """Plain attention over the texts, a request and a query at a time."""
        impl, found, begin = one.impl, [], 0
        for request, count in new:
            k, v = self.texts[request][one.layer_name]
            if impl.kv_cache_dtype.startswith("fp8"):
                kind = torch.float8_e5m2 if impl.kv_cache_dtype == "fp8_e5m2" else torch.float8_e4m3fn
                k, v = (
                    (x / s.view(-1, 1)).to(kind).float() * s.view(-1, 1)
                    for x, s in ((k, one._k_scale), (v, one._v_scale))
                )
            for j in range(count):
                p, length = k.shape[0] - count + j, k.shape[0]
                at = torch.arange(length)
                seen = at <= p if causal else torch.ones(length, dtype=torch.bool)
                if impl.sliding_window is not None:
                    seen &= at > p - impl.sliding_window
                    if not causal:
                        seen &= at < p + impl.sliding_window
                found.append(self.one_query(one, q[begin + j], k[seen], v[seen]))
            begin += count
        return torch.stack(found) if found else torch.zeros(0, impl.num_heads, impl.head_size)

    def one_query(self, one: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        impl, group = one.impl, one.impl.num_heads // one.impl.num_kv_heads
        k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("hd,thd->ht", q.double(), k) * impl.scale
        if impl.logits_soft_cap:
            scores = impl.logits_soft_cap * torch.tanh(scores / impl.logits_soft_cap)
        bottom = scores.logsumexp(-1)
        if impl.sinks is not None:
            bottom = torch.logaddexp(bottom, impl.sinks.double())
        return torch.einsum("ht,thd->hd", (scores - bottom[:, None]).exp(), v).float()


assert vllm_here
