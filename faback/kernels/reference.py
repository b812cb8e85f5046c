"""The reference kernel: dense attention by definition, exact on any device.

Every other kernel is tested against it, and machines without a GPU are served by it.
"""

from __future__ import annotations

import attrs
import torch

from faback.core.hooks import hookimpl
from faback.core.kernel import Capabilities, KernelProvider, KernelRequest
from faback.core.layer import LayerKind
from faback.core.segment import FEATURES, Segment, Visibility
from faback.core.workspace import Workspace
from faback.kernels.reference_layout import Batch, Layout

Tensor = torch.Tensor

DTYPES = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2}
)


@attrs.frozen(eq=False)
class Prepared:
    """Batches of one segment, and the layer's constants."""

    batches: tuple[Batch, ...]
    rule: Visibility
    scale: float
    softcap: float


class Reference(KernelProvider):
    """Dense attention by definition.

    Args:
        compute_dtype: dtype of scores and sums, float32 or float64.
    """

    name = "reference"
    priority = -100

    def __init__(self, compute_dtype: torch.dtype = torch.float32) -> None:
        self._compute = compute_dtype

    def capabilities(self, device: torch.device) -> Capabilities:
        return Capabilities(
            devices=frozenset({device.type}),
            q_dtypes=DTYPES,
            kv_dtypes=DTYPES,
            features=frozenset(FEATURES) - {"graph"},
        )

    def prepare(self, segment: Segment, layer: LayerKind, request: KernelRequest, ws: Workspace) -> Prepared:
        batches = tuple(Layout(segment).batches(layer.num_q_heads, "deterministic" in request.features))
        return Prepared(batches, segment.visibility, layer.scale, layer.softcap)

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
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
    ) -> None:
        out.zero_()
        if lse is not None:
            lse.fill_(-torch.inf)
        for batch in prepared.batches:
            keys = _gathered(k, batch.slots, k_scale, self._compute)
            values = _gathered(v, batch.slots, v_scale, self._compute)
            result, log_sum = attend(
                q[batch.tokens].to(self._compute),
                keys,
                values,
                batch.visible(prepared.rule),
                scale=prepared.scale,
                softcap=prepared.softcap,
                sinks=sinks,
            )
            out[batch.tokens] = result.to(out.dtype)
            if lse is not None:
                lse[batch.tokens] = log_sum.float()


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Dense attention over padded batches, in the inputs' dtype.

    Args:
        q: [B, Q, heads, dim].
        k: [B, K, kv_heads, dim].
        v: [B, K, kv_heads, v_dim].
        visible: bool [B, Q, K], None for all.
        scale, softcap: score = softcap * tanh(scale * q.k / softcap).
        sinks: [heads] logits that enter the denominator.

    Returns:
        out [B, Q, heads, v_dim] and the log-sum-exp without sinks [B, Q, heads].
    """
    size, queries, heads, _ = q.shape
    kv_heads = k.shape[2]
    grouped = q.view(size, queries, kv_heads, heads // kv_heads, -1).permute(0, 2, 3, 1, 4)
    grouped = grouped.reshape(size, kv_heads, heads // kv_heads * queries, -1)
    scores = torch.matmul(grouped * scale, k.permute(0, 2, 3, 1)).view(size, heads, queries, -1)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if visible is not None:
        scores = scores.masked_fill(~visible[:, None], -torch.inf)
    highest = scores.amax(-1, keepdim=True)
    highest = torch.where(highest == -torch.inf, 0.0, highest)
    weights = (scores - highest).exp()
    total = weights.sum(-1, keepdim=True)
    lse = (total.log() + highest).squeeze(-1).permute(0, 2, 1)
    denominator = total if sinks is None else total + (sinks.to(total.dtype).view(1, heads, 1, 1) - highest).exp()
    weights = weights / torch.where(denominator == 0, 1.0, denominator)
    out = torch.matmul(weights.view(size, kv_heads, heads // kv_heads * queries, -1), v.permute(0, 2, 1, 3))
    out = out.view(size, heads, queries, -1).permute(0, 2, 1, 3)
    return out, lse


def _gathered(cache: Tensor, slots: Tensor, scale: float | Tensor | None, dtype: torch.dtype) -> Tensor:
    """cache [slots, heads, dim] at slots [B, K], de-quantised: [B, K, heads, dim]."""
    if cache.element_size() == 1:
        found = cache.view(torch.uint8)[slots].view(cache.dtype).to(dtype)
    else:
        found = cache[slots].to(dtype)
    if scale is None:
        return found
    return found * (scale.to(dtype).view(-1, 1) if isinstance(scale, Tensor) else scale)


@hookimpl
def faback_kernels(device: torch.device) -> list[KernelProvider]:
    return [Reference()]
