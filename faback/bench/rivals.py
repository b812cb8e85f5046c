"""FlashAttention 3 (`flash_attn_interface`) on the same caches, called the way engines call it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch

from faback.bench.problem import DIM, KV_HEADS, SCALES, Problem
from faback.core.layer import AttentionLayer
from faback.core.workspace import DeviceOps

Tensor = torch.Tensor


def attention(problem: Problem) -> Callable[[], Any] | None:
    """One layer's attention; None where it is not installed or has no such attention in one call."""
    if problem.case.tree or problem.case.latent or not installed():
        return None
    return _whole(problem, problem.layer)


def step(problem: Problem, ops: DeviceOps) -> Callable[[], Any] | None:
    """All layers, each writing its keys and values and attending; trees as a prefix and an expanded part, merged.

    Args:
        problem: the layers.
        ops: merges the parts of a tree.
    """
    if problem.case.latent or problem.case.fp8 or not installed():
        return None
    attend = [(_tree(problem, layer, ops) if problem.case.tree else _whole(problem, layer)) for layer in problem.layers]
    caches = [problem.kv.buffers(layer) for layer in problem.layers]
    slots = problem.batch.out_cache_loc
    assert slots is not None

    def run() -> None:
        out = problem.out
        for (k, v), call in zip(caches, attend, strict=True):
            k[slots] = problem.k
            v[slots] = problem.v
            out = call()
        problem.out.copy_(out)

    return run


def installed() -> bool:
    """Whether there is anything to compare with."""
    return find_spec("flash_attn_interface") is not None


def _whole(problem: Problem, layer: AttentionLayer) -> Callable[[], Tensor]:
    from flash_attn_interface import flash_attn_with_kvcache

    case, device = problem.case, problem.device
    k, v, table = _paged(problem, layer)
    new = [n for _, n in case.lens]
    total = torch.tensor([c + n for c, n in case.lens], dtype=torch.int32, device=device)
    offsets = torch.tensor(list(accumulate(new, initial=0)), dtype=torch.int32, device=device)
    q, extra = problem.q, dict[str, Any]()
    if case.fp8:
        q = q.to(torch.float8_e4m3fn)
        ones = torch.ones(len(new), KV_HEADS, device=device)
        extra = {"q_descale": ones, "k_descale": ones * SCALES["k_scale"], "v_descale": ones * SCALES["v_scale"]}

    def call() -> Tensor:
        out: Tensor = flash_attn_with_kvcache(
            q,
            k,
            v,
            cache_seqlens=total,
            page_table=table,
            cu_seqlens_q=offsets,
            max_seqlen_q=max(new),
            causal=True,
            window_size=(-1, -1) if case.window is None else (case.window, 0),
            softmax_scale=layer.scale,
            **extra,
        )
        return out

    return call


def _tree(problem: Problem, layer: AttentionLayer, ops: DeviceOps) -> Callable[[], Tensor]:
    """All committed keys for every draft, then each draft as a row of its own over pages of one token."""
    from flash_attn_interface import flash_attn_with_kvcache

    case, device, tokens = problem.case, problem.device, problem.begins[-1]
    k, v, table = _paged(problem, layer)
    singles = [buffer.view(-1, 1, KV_HEADS, DIM) for buffer in problem.kv.buffers(layer)]
    cached = torch.tensor([c for c, _ in case.lens], dtype=torch.int32, device=device)
    offsets = torch.tensor(problem.begins, dtype=torch.int32, device=device)
    slots, seen = _ancestors(problem)
    each = torch.arange(tokens + 1, dtype=torch.int32, device=device)
    most = max(n for _, n in case.lens)
    out, parts = (
        torch.empty_like(problem.q),
        {"causal": False, "softmax_scale": layer.scale, "return_softmax_lse": True},
    )

    def call() -> Tensor:
        prefix, prefix_lse, *_ = flash_attn_with_kvcache(
            problem.q, k, v, cache_seqlens=cached, page_table=table, cu_seqlens_q=offsets, max_seqlen_q=most, **parts
        )
        tail, tail_lse, *_ = flash_attn_with_kvcache(
            problem.q, *singles, cache_seqlens=seen, page_table=slots, cu_seqlens_q=each, max_seqlen_q=1, **parts
        )
        ops.merge([prefix, tail], [prefix_lse.T.contiguous(), tail_lse.T.contiguous()], out, None, None)
        return out

    return call


def _paged(problem: Problem, layer: AttentionLayer) -> tuple[Tensor, Tensor, Tensor]:
    """k and v [pages, page, heads, dim], and the table [requests, pages]."""
    page = problem.case.page_size
    k, v = (buffer.view(-1, page, KV_HEADS, DIM) for buffer in problem.kv.buffers(layer))
    table = (problem.pools.req_to_token[1:, ::page] // page).to(torch.int32).contiguous()
    return k, v, table


def _ancestors(problem: Problem) -> tuple[Tensor, Tensor]:
    """int32 [tokens, drafts]: slots of the drafts that each draft sees, first of all; int32 [tokens]: how many."""
    most = max(n for _, n in problem.case.lens)
    lines, counts, mask = [], [], problem.batch.custom_mask
    assert mask is not None
    begin = 0
    for row, (cached, drafts) in enumerate(problem.case.lens, 1):
        block = mask[begin : begin + drafts * (cached + drafts)].view(drafts, -1)[:, cached:]
        begin += drafts * (cached + drafts)
        own = problem.pools.req_to_token[row, cached : cached + drafts]
        order = (~block).int().argsort(dim=1, stable=True)
        lines.append(torch.nn.functional.pad(own[order], (0, most - drafts)))
        counts.append(block.sum(1))
    return torch.cat(lines).to(torch.int32), torch.cat(counts).to(torch.int32)
