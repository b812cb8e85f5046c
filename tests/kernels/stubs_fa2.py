"""FlashAttention 2 on a CPU, in plain torch: its signatures, its checks, and its nasty sides."""

from __future__ import annotations

from types import ModuleType

import torch

from faback.kernels import fa2
from kernels.stubs_fa3 import loadable

VARLEN = (
    "_flash_attn_varlen_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float dropout_p, float softmax_scale, bool causal, "
    "SymInt window_size_left=-1, SymInt window_size_right=-1, float softcap=0., Tensor? alibi_slopes=None, "
    "bool return_softmax=False, Tensor? block_table=None, Tensor? leftpad_k=None, Tensor? seqused_k=None, "
    "bool zero_tensors=False) -> (Tensor, Tensor, Tensor, Tensor)"
)


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
):  # fmt: skip
    """Rows of equally many queries [rows, queries, heads, dim] against pages."""
    rows, queries, heads, _ = q.shape
    assert cache_seqlens.dtype == torch.int32 and cache_seqlens.shape == (rows,)
    left, right = window_size
    if queries == 1:
        causal = False  # as the package has it: the one query sees all keys, unless there is a window
    out, lse = torch.empty_like(q), torch.empty(rows, heads, queries)
    for row, length in enumerate(cache_seqlens.tolist()):
        keys, values = paged(k_cache, v_cache, block_table, row, length)
        out[row], lse[row] = attend(q[row], keys, values, softmax_scale, causal, left, right, softcap)
    return (out, lse) if return_softmax_lse else out


def varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None,
    leftpad_k=None, seqused_k=None, zero_tensors=False,
):  # fmt: skip
    """Rows of queries against pages or packed keys; tokens of no row are left as they are."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == seqused_k.dtype == torch.int32
    assert cu_seqlens_q.shape == cu_seqlens_k.shape and dropout_p == 0
    rows, offsets = cu_seqlens_q.shape[0] - 1, cu_seqlens_q.tolist()
    if max_seqlen_q == 1:
        causal = False
        if q.shape[1] > k.shape[-2] and window_size_left < 0 and window_size_right < 0:
            q, offsets = q.reshape(rows, *q.shape[1:]), list(range(rows + 1))  # whatever the offsets say
    if window_size_left >= max_seqlen_k:
        window_size_left = -1
    out, lse = torch.full_like(q, torch.nan), torch.full((q.shape[1], q.shape[0]), torch.nan)
    for row, length in enumerate(seqused_k.tolist()):
        begin, end = offsets[row : row + 2]
        assert end - begin <= max_seqlen_q and length <= max_seqlen_k
        if block_table is None:
            first = int(cu_seqlens_k[row])
            keys, values = k[first : first + length], v[first : first + length]
        else:
            keys, values = paged(k, v, block_table, row, length)
        sides = window_size_left, window_size_right
        out[begin:end], lse[:, begin:end] = attend(q[begin:end], keys, values, softmax_scale, causal, *sides, softcap)
    return out, lse, torch.empty(0), torch.empty(2, dtype=torch.int64)


def paged(k, v, block_table, row, length):
    """Keys and values of a row."""
    size = k.shape[1]
    assert size % 256 == 0 and block_table.dtype == torch.int32 and block_table.stride(-1) == 1
    assert length <= block_table.shape[1] * size
    pages = block_table[row, : -(-length // size)].long()
    return (x[pages].flatten(0, 1)[:length] for x in (k, v))


def attend(q, k, v, scale, causal, left, right, softcap):
    """q [queries, heads, dim] over k, v [keys, heads, dim]: out, and lse [heads, queries], +inf for seeing nothing."""
    assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.float16, torch.bfloat16)
    assert all(map(loadable, (q, k, v)))
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256 and q.shape[-1] % 8 == 0
    queries, length = q.shape[0], k.shape[0]
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    p, t = length - queries + torch.arange(queries)[:, None], torch.arange(length)
    seen = torch.ones(queries, length, dtype=torch.bool)
    right = 0 if causal else right
    seen &= t <= p + right if right >= 0 else seen
    seen &= t >= p - left if left >= 0 else seen
    scores = scores.masked_fill(~seen, -torch.inf)
    total = scores.logsumexp(-1)
    weights = torch.where(total[..., None] == -torch.inf, 0.0, (scores - total[..., None]).exp())
    lse = torch.where(total == -torch.inf, torch.inf, total).float()
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype), lse


def module():
    """The package's module, as far as it is used."""
    found = ModuleType(fa2.MODULE)
    found.flash_attn_with_kvcache = flash_attn_with_kvcache
    return found


def register():
    """The library that holds the operator, for as long as it lives."""
    library = torch.library.Library(fa2.OPERATOR, "FRAGMENT")
    library.define(VARLEN)
    library.impl("_flash_attn_varlen_forward", varlen, "CPU")
    return library
