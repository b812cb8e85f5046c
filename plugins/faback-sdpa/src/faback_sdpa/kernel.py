"""sdpa: attention by `torch.nn.functional.scaled_dot_product_attention`, over keys that are gathered from their pages.

Rows are padded to the longest one, keys gathered slot by slot, and the rule becomes a boolean mask. PyTorch chooses
among its implementations.
"""

from __future__ import annotations

import attrs
import torch
from torch.nn.functional import scaled_dot_product_attention

from faback.core.kernel import Capabilities, KernelProvider, KernelRequest, Rejection
from faback.core.layer import LayerKind
from faback.core.segment import Segment
from faback.core.workspace import Workspace
from faback_sdpa.fills import query_tokens, visible

Tensor = torch.Tensor

NAME = "sdpa"
DEVICES = frozenset({"cpu", "cuda"})
FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32})
FP8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
RULES = frozenset({"non_causal", "window", "window_right", "row_window", "chunk", "keep"})
KEYS = frozenset({"sharded", "start", "slot_map", "raw_kv", "dense_table", "latent", "kv_scales"})
SCORES = 1 << 24
"""Scores (queries x keys x heads) of one call; a single row may have more."""
NO_LSE = "scaled_dot_product_attention returns no log-sum-exp"
HINTS = (
    ("lse", f"{NO_LSE}, so nothing can be merged with its results"),
    ("sinks", f"{NO_LSE}, after which sinks could enter"),
    ("softcap", "scaled_dot_product_attention has no place for it; kernel 'reference' does it on any device"),
    ("deterministic", "sums depend on the longest row of a batch"),
)
"""What a user may want to know about features that are missing."""


@attrs.frozen(eq=False)
class Prepared:
    """A padded segment, and the layer's constants. All tensors are metadata, so captured plans stay up to date.

    Attributes:
        tokens: int32 [rows, queries], index in q, -1 for padding.
        slots: int32 [rows, keys], index in k and v.
        visible: bool [rows, queries, keys].
        scale: factor on the scores.
        together: rows of one call.
    """

    tokens: Tensor
    slots: Tensor
    visible: Tensor
    scale: float
    together: int


class Sdpa(KernelProvider):
    """Every rule and every layout of committed keys. Slower than a kernel that reads pages, for it copies them."""

    name = NAME
    priority = -2000

    def probe(self, device: torch.device) -> str | None:
        return None if device.type in DEVICES else f"made for {' and '.join(sorted(DEVICES))}, not {device.type}"

    def capabilities(self, device: torch.device) -> Capabilities:
        return Capabilities(
            devices=DEVICES,
            q_dtypes=FLOATS,
            kv_dtypes=FLOATS | FP8,
            features=RULES | KEYS | {"positions", "q_len", "graph"},
        )

    def reject(self, request: KernelRequest, device: torch.device) -> tuple[Rejection, ...]:
        found = [_with_hint(reason) for reason in super().reject(request, device)]
        q_dtype, kv_dtype = request.q_dtype, request.kv_dtype
        if {q_dtype, kv_dtype} <= FLOATS and torch.promote_types(q_dtype, kv_dtype) != q_dtype:
            wanted = f"{q_dtype} queries on {kv_dtype} keys"
            hint = f"keys would lose digits; a cache of {q_dtype} or 8 bits is served"
            found.append(Rejection(self.name, "dtypes", wanted, "keys that the dtype of q can hold", hint))
        return tuple(found)

    def prepare(self, segment: Segment, layer: LayerKind, request: KernelRequest, ws: Workspace) -> Prepared | None:
        """None where there is no query."""
        rows, queries, keys = segment.rows, segment.max_seqlen_q, max(1, segment.max_kv_len)
        if 0 in (rows, queries, segment.tokens):
            return None
        tokens = ws.fill("sdpa_tokens", (rows, queries), query_tokens, segment=segment)
        slots = ws.fill("sdpa_slots", (rows, keys), ws.ops.slot_table, segment=segment)
        shape = (rows, queries, keys)
        seen = ws.fill("sdpa_visible", shape, visible, tokens, dtype=torch.bool, segment=segment)
        return Prepared(tokens, slots, seen, layer.scale, max(1, SCORES // (queries * keys * layer.num_q_heads)))

    def run(
        self,
        prepared: Prepared | None,
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
        assert lse is None and sinks is None
        if prepared is None or not k.shape[0]:
            out.zero_()
            return
        found = out.new_zeros((out.shape[0] + 1, *out.shape[1:]))  # the last one is where padding goes
        padded = (prepared.tokens, prepared.slots, prepared.visible)
        parts = (torch.split(tensor, prepared.together) for tensor in padded)
        for tokens, slots, seen in zip(*parts, strict=True):
            live = tokens >= 0
            queries = q[tokens.long().clamp(min=0)]
            # A key that no query sees may be anything, and 0 times anything is not always 0.
            unseen = ~seen.any(1)[:, :, None, None]
            keys = _gathered(k, slots, k_scale, q.dtype).masked_fill(unseen, 0)
            values = _gathered(v, slots, v_scale, q.dtype).masked_fill(unseen, 0)
            result = _attended(queries, keys, values, seen, prepared.scale)
            found[torch.where(live, tokens, out.shape[0]).long()] = result.to(out.dtype)
        out.copy_(found[:-1])


def _attended(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Attention of a padded batch; a query that sees nothing yields 0.

    The query heads of one KV head become queries of it, which no key has to be repeated for.

    Args:
        q: [rows, queries, heads, dim].
        k: [rows, keys, kv_heads, dim].
        v: [rows, keys, kv_heads, v_dim].
        seen: bool [rows, queries, keys].
        scale: factor on the scores.

    Returns:
        [rows, queries, heads, v_dim].
    """
    rows, queries, heads, dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    grouped = q.view(rows, queries, kv_heads, group, dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    mask = seen[:, None].expand(-1, group, -1, -1).reshape(rows, 1, group * queries, -1)
    found = scaled_dot_product_attention(grouped, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale)
    found = found.view(rows, kv_heads, group, queries, -1).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return found.masked_fill(~seen.any(2)[:, :, None, None], 0)


def _gathered(cache: Tensor, slots: Tensor, scale: float | Tensor | None, dtype: torch.dtype) -> Tensor:
    """cache [slots, heads, dim] at slots [rows, keys], multiplied by its scale: [rows, keys, heads, dim] in dtype."""
    at = slots.long()
    found = cache[at] if cache.dtype not in FP8 else cache.view(torch.uint8)[at].view(cache.dtype)
    if scale is None:
        return found.to(dtype)
    return (found.float() * (scale.view(-1, 1) if isinstance(scale, Tensor) else scale)).to(dtype)


def _with_hint(reason: Rejection) -> Rejection:
    """The reason with what there is to say about its feature."""
    if reason.aspect != "feature":
        return reason
    hint = next((hint for name, hint in HINTS if reason.wanted.startswith(f"{name} ")), "")
    return attrs.evolve(reason, hint=hint)
