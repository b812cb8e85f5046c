"""context parallel: a prompt's queries shared out over ranks. decode context parallel: a cache shared out over them.

Both speak through `torch.distributed` groups, given in the configuration:

    BackendConfig(options={"context_parallel": {"group": group}, "decode_context_parallel": {"group": group}})
"""

from __future__ import annotations

import attrs
import torch
import torch.distributed as dist

from faback.core.batch import ForwardBatch
from faback.core.config import BackendConfig
from faback.core.contracts import Mode, Overlay, PlanContext
from faback.core.errors import BatchError, ConfigError
from faback.core.hooks import hookimpl
from faback.core.layer import LayerKind
from faback.core.segment import KVView, KVWrite, Segment
from faback.core.workspace import DeviceOps, Workspace

Tensor = torch.Tensor
Group = dist.ProcessGroup


class ContextParallel(Mode):
    """An extend whose queries are shared out in a zigzag, so that causal work is even.

    Request i's new tokens are cut into 2 * ranks half-chunks of h_i = ceil(n_i / (2 * ranks)) tokens, the last ones
    short or empty. Rank r has half-chunk r of every request, then half-chunk 2 * ranks - 1 - r of every request, each
    padded to h_i tokens (`zigzag` gives the indices). The batch describes all tokens; q, k and v are the rank's own
    share, `num_tokens` its length. Keys and values are gathered and written whole on each rank.
    """

    key = "context_parallel"
    needs = ("out_cache_loc", "extend_seq_lens")

    def __init__(self, group: Group) -> None:
        self._group = group

    def build(self, batch: ForwardBatch, ws: Workspace, ctx: PlanContext) -> Segment:
        assert batch.extend_seq_lens is not None
        assert batch.out_cache_loc is not None
        rank, ranks = self._group.rank(), self._group.size()
        rows = 2 * batch.bs
        lens = (batch.seq_lens, batch.extend_seq_lens, batch.req_pool_indices)
        table = ws.fill("zigzag", (4, rows), _zigzag_rows, *lens, rank=rank, ranks=ranks)
        tokens = batch.out_cache_loc.shape[0]
        order = ws.fill(
            "gather_order", (tokens,), _gather_order, batch.extend_seq_lens, ranks=ranks, share=batch.num_tokens
        )
        half = -(-batch.bound("extend_seq_lens", tokens) // (2 * ranks))
        return Segment(
            rows=rows,
            tokens=batch.num_tokens,
            cu_seqlens_q=ws.offsets("cu_seqlens_q", table[0]),
            max_seqlen_q=half,
            kv_len=table[2],
            max_kv_len=batch.bound("seq_lens", ctx.config.context_len),
            kv=KVView(ctx.pools.req_to_token, table[3], ctx.page_size),
            q_len=table[1],
            write=KVWrite(batch.out_cache_loc),
            exchange=GatherKV(self._group, order),
        )


class DecodeContextParallel(Overlay):
    """Token t of a request is kept by rank t % ranks, as its token t // ranks; results are merged by log-sum-exp.

    All ranks plan the same batch and bring the same q. `req_to_token` and `out_cache_loc` are each rank's own:
    `req_to_token[r, j]` is the slot of token j * ranks + rank, and `out_cache_loc` is 0 for tokens that others keep.
    """

    key = "decode_context_parallel"
    after = ("encoder_offset", "hybrid_pool", "no_cache", "prefill_aware_swa", "sliding_window", "local_attention")

    def __init__(self, group: Group) -> None:
        self._group = group

    def applies(self, layer: LayerKind) -> bool:
        return layer.cached and not layer.cross

    def transform(
        self, segment: Segment, layer: LayerKind, batch: ForwardBatch, ws: Workspace, ctx: PlanContext
    ) -> Segment:
        if segment.kv is None:
            return segment
        if segment.tail is not None or segment.kv.start is not None or segment.exchange is not None:
            got = f"forward mode {batch.forward_mode!r} with {', '.join(sorted(segment.features()))}"
            wanted = "rows of committed tokens without encoder tokens, draft branches or trees"
            raise BatchError("decode context parallel", wanted=wanted, got=got)
        rank, ranks = self._group.rank(), self._group.size()
        return attrs.evolve(
            segment,
            kv=attrs.evolve(segment.kv, shard=(rank, ranks)),
            kv_len=ws.fill("shard_lens", (segment.rows,), _shard_lens, segment.kv_len, rank=rank, ranks=ranks),
            max_kv_len=-(-segment.max_kv_len // ranks),
            positions=ws.fill("positions", (segment.tokens,), ws.ops.positions, segment=segment),
            exchange=MergeRanks(self._group, ws.ops),
        )


@attrs.frozen(eq=False)
class GatherKV:
    """Each rank's new keys, gathered and put into the order of the batch.

    Attributes:
        group: the ranks.
        order: int32 [all tokens], where each token of the batch lies in the shares, rank after rank.
    """

    group: Group
    order: Tensor
    needs_lse: bool = attrs.field(default=False, init=False)

    def spread(self, tensor: Tensor) -> Tensor:
        """[share, heads, dim] -> [all tokens, heads, dim]."""
        shares = tensor.new_empty((self.group.size() * tensor.shape[0], *tensor.shape[1:]))
        dist.all_gather_into_tensor(shares, tensor.contiguous(), group=self.group)
        return shares[self.order]

    def collect(self, out: Tensor, lse: Tensor | None, sinks: Tensor | None) -> None:
        """Each rank keeps its own queries."""


@attrs.frozen(eq=False)
class MergeRanks:
    """Every rank's partial result over its own keys, merged on every rank."""

    group: Group
    ops: DeviceOps
    needs_lse: bool = attrs.field(default=True, init=False)

    def spread(self, tensor: Tensor) -> Tensor:
        """New keys are the same on every rank."""
        return tensor

    def collect(self, out: Tensor, lse: Tensor | None, sinks: Tensor | None) -> None:
        """Sinks enter here, once."""
        assert lse is not None
        ranks = self.group.size()
        outs = out.new_empty((ranks, *out.shape))
        lses = lse.new_empty((ranks, *lse.shape))
        dist.all_gather_into_tensor(outs.flatten(0, 1), out.contiguous(), group=self.group)
        dist.all_gather_into_tensor(lses.flatten(0, 1), lse.contiguous(), group=self.group)
        self.ops.merge(list(outs), list(lses), out, lse, sinks)


def zigzag(extend_seq_lens: list[int], rank: int, ranks: int) -> Tensor:
    """Which of a batch's tokens a rank has, in the order of `ContextParallel`.

    Args:
        extend_seq_lens: new tokens of each request.
        rank, ranks: whose share, of how many.

    Returns:
        int64 [share] index into the batch's packed tokens, -1 for padding.
    """
    starts = [sum(extend_seq_lens[:i]) for i in range(len(extend_seq_lens))]
    share: list[int] = []
    for chunk in (rank, 2 * ranks - 1 - rank):
        for start, count in zip(starts, extend_seq_lens, strict=True):
            half = -(-count // (2 * ranks))
            share += [start + t if t < count else -1 for t in range(chunk * half, (chunk + 1) * half)]
    return torch.tensor(share, dtype=torch.int64)


def _zigzag_rows(out: Tensor, seq_lens: Tensor, new: Tensor, rows: Tensor, *, rank: int, ranks: int) -> None:
    """out [4, 2 * bs]: padded queries, live queries, keys and req_pool_index of each half-chunk."""
    half = torch.div(new + 2 * ranks - 1, 2 * ranks, rounding_mode="floor")
    chunk = out.new_tensor([[rank], [2 * ranks - 1 - rank]])
    live = torch.minimum(half, (new - chunk * half).clamp(min=0))
    reach = torch.minimum(seq_lens, seq_lens - new + chunk * half + live)
    for line, value in zip(out, (half.expand(2, -1), live, reach * (live > 0), rows.expand(2, -1)), strict=True):
        line.copy_(value.flatten())


def _gather_order(out: Tensor, new: Tensor, *, ranks: int, share: int) -> None:
    """out [all tokens]: rank * share + place, for each token of the batch."""
    ends = new.long().cumsum(0)
    token = torch.arange(out.shape[0], device=out.device)
    row = torch.searchsorted(ends, token, right=True).clamp(max=max(0, new.shape[0] - 1))
    if not new.shape[0]:
        return
    half = torch.div(new.long() + 2 * ranks - 1, 2 * ranks, rounding_mode="floor")
    before = half.cumsum(0) - half
    index = token - (ends - new)[row]
    chunk = index // half.clamp(min=1)[row]
    second = chunk >= ranks
    owner = torch.where(second, 2 * ranks - 1 - chunk, chunk)
    out.copy_(owner * share + second * half.sum() + before[row] + index % half.clamp(min=1)[row])


def _shard_lens(out: Tensor, lens: Tensor, *, rank: int, ranks: int) -> None:
    """out[b] = how many of lens[b] tokens a rank keeps."""
    out.copy_(torch.div(lens + ranks - 1 - rank, ranks, rounding_mode="floor"))


def _checked(group: Group | None = None) -> Group:
    """The group that the options name, or that of all processes."""
    group = group or (dist.group.WORLD if dist.is_initialized() else None)
    if not isinstance(group, Group):
        hint = "Call torch.distributed.init_process_group first."
        raise ConfigError("config.options[...]['group']", wanted="a process group", got=group, hint=hint)
    return group


@hookimpl
def faback_modes(config: BackendConfig) -> list[Mode]:
    group = config.configured("context_parallel", _checked)
    return [] if group is None else [ContextParallel(group)]


@hookimpl
def faback_overlays(config: BackendConfig) -> list[Overlay]:
    group = config.configured("decode_context_parallel", _checked)
    return [] if group is None else [DecodeContextParallel(group)]
