"""The operators of FlashAttention 3 on a CPU, in plain torch: their arguments, and their nasty sides."""

from __future__ import annotations

import torch

FWD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, Tensor? q_v=None, "
    "Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, "
    "Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, "
    "Tensor? v_descale=None, float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, int attention_chunk=0, float softcap=0.0, bool is_rotary_interleaved=False, "
    "Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, int sm_margin=0, Tensor? sinks=None) "
    "-> (Tensor(out!), Tensor, Tensor, Tensor)"
)
METADATA = (
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, "
    "int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? leftpad_k=None, "
    "int? page_size=None, int max_seqlen_k_new=0, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, int attention_chunk=0, bool has_softcap=False, int num_splits=0, bool? pack_gqa=None, "
    "int sm_margin=0) -> Tensor"
)


def loadable(x):
    """Whether every head can be loaded 16 bytes at a time."""
    *strides, last = x.stride()
    return last == 1 and all(number % 16 == 0 for number in (x.data_ptr(), *(n * x.itemsize for n in strides)))


def scheduler_metadata(batch_size, max_seqlen_q, *sizes, **given):
    """As long as the real one, and a fingerprint of the lengths that it was made from."""
    seqused_k = sizes[6]
    metadata = torch.zeros(batch_size + 1, dtype=torch.int32)
    metadata[1:] = seqused_k
    return metadata


def fwd(
    q, k, v, k_new=None, v_new=None, q_v=None, out=None, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None,
    seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None,
    leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None, k_descale=None,
    v_descale=None, softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0,
    softcap=0.0, is_rotary_interleaved=False, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
    sinks=None, sink_dtypes=(torch.bfloat16,),
):  # fmt: skip
    """Rows of queries against pages, or against packed keys; tokens of no row are left as they are."""
    assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.float16, torch.bfloat16)
    assert all(map(loadable, (q, k, v, out)))
    assert softcap == 0 and k.shape[-1] == v.shape[-1] == q.shape[-1] and q.shape[-1] % 8 == 0
    assert cu_seqlens_q.dtype == torch.int32 and seqused_k.dtype == torch.int32
    assert (page_table is None) != (cu_seqlens_k is None)
    assert page_table is None or (page_table.dtype == torch.int32 and page_table.stride(-1) == 1)
    assert sinks is None or sinks.dtype in sink_dtypes
    if scheduler_metadata is not None:
        assert scheduler_metadata[1:].tolist() == seqused_k.tolist(), "metadata of other lengths"
    group = q.shape[1] // k.shape[-2]
    lse = torch.full((q.shape[1], q.shape[0]), torch.nan)
    for row, length in enumerate(seqused_k.tolist()):
        begin, end = cu_seqlens_q[row : row + 2].tolist()
        assert end - begin <= max_seqlen_q
        if page_table is None:
            first = int(cu_seqlens_k[row])
            keys, values = k[first : first + length], v[first : first + length]
        else:
            pages = page_table[row, : -(-length // k.shape[1])].long()
            keys, values = k[pages].flatten(0, 1)[:length], v[pages].flatten(0, 1)[:length]
        keys, values = (x.double().repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].double(), keys) * softmax_scale
        p, t = length - (end - begin) + torch.arange(end - begin)[:, None], torch.arange(length)
        seen = torch.ones(end - begin, length, dtype=torch.bool)
        right = 0 if is_causal else window_size_right
        seen &= t <= p + right if right >= 0 else seen
        seen &= t >= p - window_size_left if window_size_left >= 0 else seen
        if attention_chunk:
            seen &= t.div(attention_chunk, rounding_mode="floor") == p.div(attention_chunk, rounding_mode="floor")
        scores = scores.masked_fill(~seen, -torch.inf)
        total = scores.logsumexp(-1)
        bottom = total if sinks is None else torch.logaddexp(total, sinks.double()[:, None])
        weights = torch.where(bottom[..., None] == -torch.inf, 0.0, (scores - bottom[..., None]).exp())
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)
        lse[:, begin:end] = total.float()
    return out, lse, torch.empty(0), torch.empty(0)


def register():
    """Defines the operators for CPU tensors; keep the result for as long as they are wanted."""
    library = torch.library.Library("flash_attn_3", "DEF")
    library.define(FWD)
    library.define(METADATA)
    library.impl("fwd", fwd, "CPU")
    library.impl("get_scheduler_metadata", scheduler_metadata, "CPU")
    return library
