"""MLA prefill, un-absorbed: queries against keys that come with the call, expanded from latents by the model.

Absorbed layers need nothing of this: they are described with `latent=True` and run in every mode. Un-absorbed ones
are plain multi-head layers without a cache (`kv_group="none"`), and attend in one of two ways:

- in parts: the new tokens among themselves ("extend" of such a layer), then one chunk of the cached prefix after the
  other ("prefix_chunk"), each with `return_lse=True`, merged by `AttentionBackend.merge`;
- at once: prefix and new tokens expanded together ("one_shot").
"""

from __future__ import annotations

import torch

from faback.core.batch import ForwardBatch
from faback.core.config import BackendConfig
from faback.core.contracts import Mode, PlanContext
from faback.core.errors import BatchError
from faback.core.hooks import hookimpl
from faback.core.segment import INDEX_DTYPES, Segment
from faback.core.workspace import Workspace

Tensor = torch.Tensor


class PrefixChunk(Mode):
    """The new tokens see one chunk of each request's prefix.

    `extras["chunk_lens"]` [bs] says how many keys each request has in this chunk, one request after the other in k and
    v, and `extras["chunk_starts"]` [bs] which token of the request its first one is. A request without keys in a chunk
    yields 0 and -inf.
    """

    key = "prefix_chunk"
    needs = ("extend_seq_lens", "chunk_lens", "chunk_starts")

    def build(self, batch: ForwardBatch, ws: Workspace, ctx: PlanContext) -> Segment:
        lens, starts = _per_request(batch, "chunk_lens"), _per_request(batch, "chunk_starts")
        assert batch.extend_seq_lens is not None
        offsets = ws.offsets("cu_seqlens_q", batch.extend_seq_lens)
        stands = (offsets, batch.seq_lens, batch.extend_seq_lens, starts)
        return Segment(
            rows=batch.bs,
            tokens=batch.num_tokens,
            cu_seqlens_q=offsets,
            max_seqlen_q=batch.bound("extend_seq_lens", batch.num_tokens),
            kv_len=lens,
            max_kv_len=batch.bound("chunk_lens", ctx.config.context_len),
            kv=None,
            cu_seqlens_k=ws.offsets("cu_seqlens_k", lens),
            positions=ws.fill("positions", (batch.num_tokens,), _relative_positions, *stands),
            absolute=False,
        )


class OneShot(Mode):
    """The new tokens see the whole request, whose keys all come with the call: `seq_lens[i]` of each, in order."""

    key = "one_shot"
    needs = ("extend_seq_lens",)

    def build(self, batch: ForwardBatch, ws: Workspace, ctx: PlanContext) -> Segment:
        assert batch.extend_seq_lens is not None
        return Segment(
            rows=batch.bs,
            tokens=batch.num_tokens,
            cu_seqlens_q=ws.offsets("cu_seqlens_q", batch.extend_seq_lens),
            max_seqlen_q=batch.bound("extend_seq_lens", batch.num_tokens),
            kv_len=batch.seq_lens,
            max_kv_len=batch.bound("seq_lens", ctx.config.context_len),
            kv=None,
            cu_seqlens_k=ws.offsets("cu_seqlens_k", batch.seq_lens),
        )


def _per_request(batch: ForwardBatch, name: str) -> Tensor:
    """An index tensor [bs] out of the batch's extras."""
    value = batch.extras[name]
    if not isinstance(value, Tensor) or value.dtype not in INDEX_DTYPES or value.shape != (batch.bs,):
        got = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise BatchError(f"batch.extras[{name!r}]", wanted=f"int32 or int64 [{batch.bs}]", got=got)
    return value


def _relative_positions(out: Tensor, offsets: Tensor, seq_lens: Tensor, new: Tensor, starts: Tensor) -> None:
    """out [tokens]: where each query stands, counted from the first key of its request's chunk."""
    token = torch.arange(out.shape[0], device=out.device)
    row = torch.searchsorted(offsets[1:].contiguous(), token, right=True).clamp(max=max(0, new.shape[0] - 1))
    if new.shape[0]:
        out.copy_(token - offsets[row] + (seq_lens - new - starts)[row])


@hookimpl
def faback_modes(config: BackendConfig) -> list[Mode]:
    return [PrefixChunk(), OneShot()]
