"""A deliberately poor kernel: causal attention over int32 page tables, with a log-sum-exp, and nothing else.

If every mode runs on it, the lowerings are complete. It is the smallest kernel that one could bring. The module is a
plugin: `registry.register(faback.testing.poor, "poor")`.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

from faback.core.hooks import hookimpl
from faback.core.kernel import Capabilities, KernelProvider, KernelRequest
from faback.core.layer import LayerKind
from faback.core.segment import Segment
from faback.core.workspace import Workspace

Tensor = torch.Tensor

DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2})


@attrs.frozen(eq=False)
class Prepared:
    """Lengths and page table [rows, pages] of a segment, and the layer's constants."""

    cu_seqlens_q: Tensor
    kv_len: Tensor
    table: Tensor
    page_size: int
    scale: float
    softcap: float


class Poor(KernelProvider):
    """Rows of queries that are the last tokens of their keys; keys in pages. One row at a time.

    Lengths are read when it runs, so that captured plans can be replayed on it.

    Softcap, scales and shared latents are arithmetic of the scores and no concern of visibility; it has them so that
    lowered cells cover them.
    """

    name = "poor"
    priority = -1000

    def capabilities(self, device: torch.device) -> Capabilities:
        """Nothing that changes what is seen."""
        return Capabilities(
            devices=frozenset({device.type}),
            q_dtypes=DTYPES,
            kv_dtypes=DTYPES,
            features=frozenset({"lse", "dense_table", "softcap", "kv_scales", "latent", "graph"}),
        )

    def prepare(self, segment: Segment, layer: LayerKind, request: KernelRequest, ws: Workspace) -> Prepared:
        """Writes the page table out."""
        view = segment.kv
        assert view is not None
        lens = segment.kv_len if view.dense else ws.lens("live_keys", segment.kv_len, active=view.req_pool_indices)
        table = ws.page_table("page_table", view, lens, segment.max_kv_len)
        return Prepared(segment.cu_seqlens_q, lens, table, view.page_size, layer.scale, layer.softcap)

    def run(
        self,
        prepared: Prepared,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        *,
        lse: Tensor | None = None,
        sinks: Tensor | None = None,
        k_scale: Any = None,
        v_scale: Any = None,
    ) -> None:
        """Row by row, head groups expanded."""
        assert sinks is None
        out.zero_()
        if lse is not None:
            lse.fill_(-torch.inf)
        offsets: list[int] = prepared.cu_seqlens_q.tolist()
        for row, length in enumerate(prepared.kv_len.tolist()):
            start, end = offsets[row : row + 2]
            if start == end or length == 0:
                continue
            token = torch.arange(length, device=q.device)
            slots = prepared.table[row, token // prepared.page_size].long() * prepared.page_size
            slots += token % prepared.page_size
            keys, values = (_dequantised(x, slots, s) for x, s in ((k, k_scale), (v, v_scale)))
            group = q.shape[1] // k.shape[1]
            keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", q[start:end].float() * prepared.scale, keys)
            if prepared.softcap:
                scores = prepared.softcap * torch.tanh(scores / prepared.softcap)
            position = length - (end - start) + torch.arange(end - start, device=q.device)
            scores = scores.masked_fill(token > position[:, None], -torch.inf)
            total = scores.logsumexp(-1)
            weights = torch.where(total[..., None] == -torch.inf, 0.0, (scores - total[..., None]).exp())
            out[start:end] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)
            if lse is not None:
                lse[start:end] = total.T


@hookimpl
def faback_kernels(device: torch.device) -> list[KernelProvider]:
    return [Poor()]


def _dequantised(cache: Tensor, slots: Tensor, scale: Any) -> Tensor:
    found = (
        cache[slots].float() if cache.element_size() > 1 else cache.view(torch.uint8)[slots].view(cache.dtype).float()
    )
    if scale is None:
        return found
    return found * (scale.view(-1, 1) if isinstance(scale, Tensor) else scale)
