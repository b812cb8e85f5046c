"""The forward mode of vLLM: one batch of any requests, over vLLM's block table as it is.

Fields of the batch, all of them vLLM's own tensors (`CommonAttentionMetadata`):

    req_pool_indices           [requests] rows of the block table
    seq_lens                   [requests] tokens, the new ones included; of encoders for cross-attention
    out_cache_loc              [tokens] slot_mapping; negative for padding
    extras["query_start_loc"]  int32 [requests + 1]
    extras["block_table"]      [requests, blocks]
    extras["common_prefix_len"]  tokens that all requests share, in whole blocks; 0 for none

Every request is judged by its own lengths, so prompts, chunks of prompts, decoding and verification mix freely.
"""

from __future__ import annotations

import attrs
import torch

from faback import hookimpl
from faback.core.batch import ForwardBatch
from faback.core.config import BackendConfig
from faback.core.contracts import Mode, PlanContext
from faback.core.layer import LayerKind
from faback.core.segment import KVView, KVWrite, Segment, Visibility
from faback.core.workspace import Workspace

Tensor = torch.Tensor

KEY = "vllm"


@attrs.frozen(eq=False)
class WithPrefix(Segment):
    """A segment whose rows all begin with the same keys.

    Attributes:
        everyone: int32 [2], 0 and the number of tokens that belong to a row.
        shared: int32 [1], the number of shared keys.
        starts: int32 [rows], the same for each row.
        rest: int32 [rows], keys of each row behind them.
    """

    everyone: Tensor = attrs.field(kw_only=True)
    shared: Tensor = attrs.field(kw_only=True)
    starts: Tensor = attrs.field(kw_only=True)
    rest: Tensor = attrs.field(kw_only=True)


class VllmPass(Mode):
    """The queries of request b are its last tokens, causal unless a layer is not.

    Layers without a cache attend to the keys of the batch. Where vLLM says that all requests share a prefix, its keys
    are read once for all of them, and the results merged; layers with a window do without.
    """

    key = KEY
    needs = ("out_cache_loc", "query_start_loc", "block_table", "common_prefix_len")

    def build(self, batch: ForwardBatch, ws: Workspace, ctx: PlanContext) -> Segment:
        offsets, slots, prefix = batch.extras["query_start_loc"], batch.out_cache_loc, batch.extras["common_prefix_len"]
        assert slots is not None
        stride = getattr(ctx.pools.kv, "page_stride", ctx.page_size)
        cached = any(layer.cached for layer in ctx.layers)
        view = KVView(
            batch.extras["block_table"], batch.req_pool_indices, ctx.page_size, dense=True, page_stride=stride
        )
        if cached and stride != ctx.page_size:
            parts = {"page_size": ctx.page_size, "page_stride": stride}
            slots = ws.fill("slots", tuple(slots.shape), spread, slots, dtype=torch.int64, **parts)
        segment = Segment(
            rows=batch.bs,
            tokens=batch.num_tokens,
            cu_seqlens_q=offsets,
            max_seqlen_q=batch.bound("extend_seq_lens", batch.num_tokens),
            kv_len=batch.seq_lens,
            max_kv_len=batch.bound("seq_lens", ctx.config.context_len),
            kv=view if cached else None,
            write=KVWrite(slots) if cached else KVWrite(),
        )
        if prefix <= 0 or not cached or batch.bs < 2 or ctx.config.deterministic:
            return segment
        filled = ws.fill("shared_prefix", (3 + 2 * batch.bs,), behind_prefix, offsets, batch.seq_lens, prefix=prefix)
        return WithPrefix(
            **{field.name: getattr(segment, field.name) for field in attrs.fields(Segment)},
            everyone=filled[:2],
            shared=filled[2:3],
            starts=filled[3 : 3 + batch.bs],
            rest=filled[3 + batch.bs :],
        )

    def calls(self, segment: Segment, layer: LayerKind, ctx: PlanContext) -> tuple[Segment, ...]:
        view, rule = segment.kv, segment.visibility
        if not isinstance(segment, WithPrefix) or view is None or rule.features():
            return (segment,)
        plain = {field.name: getattr(segment, field.name) for field in attrs.fields(Segment)}
        once = {
            "rows": 1,
            "cu_seqlens_q": segment.everyone,
            "max_seqlen_q": segment.tokens,
            "kv_len": segment.shared,
            "kv": attrs.evolve(view, req_pool_indices=view.req_pool_indices[:1]),
            "visibility": Visibility(causal=False),
        }
        rest = {"kv_len": segment.rest, "kv": attrs.evolve(view, start=segment.starts), "absolute": False}
        return Segment(**plain | once), Segment(**plain | rest)


def spread(out: Tensor, slots: Tensor, *, page_size: int, page_stride: int) -> None:
    """out [tokens] = the pool's number of vLLM's slots, whose pages lie page_stride apart; negative stays negative."""
    out.copy_(slots.div(page_size, rounding_mode="floor") * page_stride + slots.remainder(page_size))


def behind_prefix(out: Tensor, offsets: Tensor, lens: Tensor, *, prefix: int) -> None:
    """out [3 + 2 * rows]: 0, the last of offsets [rows + 1], prefix, prefix for each row, lens [rows] without it."""
    rows = lens.shape[0]
    out[:2] = offsets[:: max(1, rows)]
    out[2 : 3 + rows] = prefix
    out[3 + rows :] = (lens - prefix).clamp(min=0)


@hookimpl
def faback_modes(config: BackendConfig) -> list[Mode]:
    return [VllmPass()]
