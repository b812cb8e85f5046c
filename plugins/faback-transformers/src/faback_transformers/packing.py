"""From chunks to tensors: one packed batch for the model and its description for faback."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from faback import ForwardBatch
from faback.pools import ReqToTokenPool
from faback_transformers.scheduler import Chunk
from faback_transformers.speculation import Draft

Tensor = torch.Tensor


@attrs.frozen(eq=False)
class PackedBatch:
    """One forward pass over several requests.

    Attributes:
        input_ids: int64 [1, tokens], one chunk after another.
        position_ids: int64 [1, tokens], each token's place in its request.
        sampled: int64 [samples], tokens whose logits are wanted.
        forward: the batch as faback wants it.
    """

    input_ids: Tensor
    position_ids: Tensor
    sampled: Tensor
    forward: ForwardBatch


def pack(chunks: Sequence[Chunk], slots: Sequence[int], rows: ReqToTokenPool) -> PackedBatch:
    """Packs chunks and writes their slots into the request table. Two copies to the device, no wait.

    Args:
        chunks: what runs, at least one token.
        slots: slot of each token, chunk after chunk.
        rows: the request table.
    """
    ids = [token for chunk in chunks for token in chunk.request.tokens[chunk.start : chunk.end]]
    positions = [position for chunk in chunks for position in range(chunk.start, chunk.end)]
    owners = [chunk.request.row for chunk in chunks for _ in range(chunk.count)]
    tokens = torch.tensor([ids, positions, owners, slots])
    counts = torch.tensor([chunk.count for chunk in chunks])
    ends = torch.tensor([chunk.end for chunk in chunks])
    requests = torch.stack((torch.tensor([chunk.request.row for chunk in chunks]), ends, counts, ends - counts))
    sampling = torch.tensor([chunk.samples for chunk in chunks])
    sampled = (counts.cumsum(0) - 1)[sampling]
    device = rows.device
    on_device, per_request = tokens.to(device, non_blocking=True), requests.to(device, non_blocking=True)
    rows.write_tokens(on_device[2], on_device[1], on_device[3])
    forward = ForwardBatch(
        forward_mode=_mode(chunks),
        req_pool_indices=per_request[0],
        seq_lens=per_request[1],
        seq_lens_cpu=ends,
        out_cache_loc=on_device[3],
        positions=on_device[1],
        extend_seq_lens=per_request[2],
        extend_seq_lens_cpu=counts,
        extend_prefix_lens=per_request[3],
        extend_prefix_lens_cpu=ends - counts,
    )
    return PackedBatch(on_device[:1], on_device[1:2], sampled.to(device, non_blocking=True), forward)


def pack_drafts(drafts: Sequence[Draft], slots: Sequence[int], rows: ReqToTokenPool) -> PackedBatch:
    """Packs trees; every node is sampled after. Three copies to the device, no wait.

    Args:
        drafts: what is verified, at least one.
        slots: slot of each node, tree after tree.
        rows: the request table; nodes take the places behind a request's cached tokens, in their order.
    """
    chunks = [draft.chunk for draft in drafts]
    ids = [token for draft in drafts for token in draft.tree.tokens]
    positions = [draft.chunk.start + depth for draft in drafts for depth in draft.tree.depths]
    owners = [chunk.request.row for chunk in chunks for _ in range(chunk.count)]
    columns = [column for chunk in chunks for column in range(chunk.start, chunk.end)]
    starts, counts = torch.tensor([chunk.start for chunk in chunks]), torch.tensor([chunk.count for chunk in chunks])
    requests = torch.stack((torch.tensor([chunk.request.row for chunk in chunks]), starts, counts))
    device = rows.device
    tokens = torch.tensor([ids, positions, owners, columns, slots]).to(device, non_blocking=True)
    per_request = requests.to(device, non_blocking=True)
    rows.write_tokens(tokens[2], tokens[3], tokens[4])
    forward = ForwardBatch(
        forward_mode="target_verify",
        req_pool_indices=per_request[0],
        seq_lens=per_request[1],
        seq_lens_cpu=starts,
        out_cache_loc=tokens[4],
        positions=tokens[1],
        verify_lens=per_request[2],
        verify_lens_cpu=counts,
        custom_mask=torch.cat([_mask(draft) for draft in drafts]).to(device, non_blocking=True),
    )
    return PackedBatch(tokens[:1], tokens[1:2], torch.arange(len(ids), device=device), forward)


def _mask(draft: Draft) -> Tensor:
    """bool [nodes * (cached tokens + nodes)]: every node sees what is cached, its ancestors and itself."""
    cached = torch.ones((len(draft.tree), draft.chunk.start), dtype=torch.bool)
    return torch.cat((cached, torch.tensor(draft.tree.mask())), 1).view(-1)


def _mode(chunks: Sequence[Chunk]) -> str:
    """decode, extend, or mixed where both are in one batch."""
    generating = sum(chunk.count == 1 for chunk in chunks)
    if generating == len(chunks):
        return "decode"
    return "mixed" if generating else "extend"
