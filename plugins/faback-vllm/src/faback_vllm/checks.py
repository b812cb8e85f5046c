"""What vLLM says of a batch, looked at before anybody relies on it. Every message names vLLM's field."""

from __future__ import annotations

from typing import Any

import torch

from faback import BatchError

Tensor = torch.Tensor

INDEX = (torch.int32, torch.int64)
UNSUPPORTED = {
    "causal": "passes that are causal for some requests only",
    "mm_req_doc_ranges": "mask that is bidirectional within images",
    "rswa_prefix_lens": "reference sliding window in its vLLM backend",
    "dcp_local_seq_lens": "decode context parallelism in its vLLM backend",
}
"""Fields that change who sees what, and what they mean: not to be passed over in silence."""


def field(name: str) -> str:
    """What errors call a field of `CommonAttentionMetadata`."""
    return f"common_attn_metadata.{name}"


def check_shapes(common: Any, device: torch.device, *, cached: bool) -> None:
    """Presence, shapes, dtypes and devices; reads nothing that lies on a device.

    Args:
        common: a `CommonAttentionMetadata`.
        device: where the caches are.
        cached: whether the layers have a cache.
    """
    requests = common.num_reqs
    vectors = [
        ("query_start_loc", (torch.int32,), requests + 1),
        ("seq_lens", INDEX, requests),
        ("slot_mapping", INDEX, None),
        ("block_table_tensor", INDEX, None),
    ]
    for name, dtypes, length in vectors:
        tensor = getattr(common, name)
        if not isinstance(tensor, torch.Tensor):
            raise BatchError(field(name), wanted=f"a tensor on {device}", got=repr(tensor))
        if tensor.device != device:
            raise BatchError(field(name), wanted=f"a tensor on {device} like the KV cache", got=tensor.device)
        if tensor.dtype not in dtypes:
            raise BatchError(field(name), wanted=" or ".join(map(str, dtypes)), got=tensor.dtype)
        ndim = 2 if name == "block_table_tensor" else 1
        if tensor.ndim != ndim or (length is not None and tensor.shape[0] != length):
            wanted = f"[{requests}, blocks]" if ndim == 2 else f"[{'tokens' if length is None else length}]"
            raise BatchError(field(name), wanted=f"{wanted} with num_reqs={requests}", got=list(tensor.shape))
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise BatchError(field(name), wanted="elements side by side", got=f"strides {tensor.stride()}")
    if cached and common.block_table_tensor.shape[0] < requests:
        wanted = f"a row for each of num_reqs={requests}"
        raise BatchError(field("block_table_tensor"), wanted=wanted, got=common.block_table_tensor.shape[0])
    for name, meaning in UNSUPPORTED.items():
        value = getattr(common, name)
        if value is not None and not isinstance(value, bool):
            hint = f"faback has no {meaning}; choose another backend for this model."
            raise BatchError(field(name), wanted="True or False" if name == "causal" else None, got=value, hint=hint)
    offsets = common.query_start_loc_cpu
    if offsets.device.type != "cpu" or tuple(offsets.shape) != (requests + 1,):
        got = f"{offsets.device} {list(offsets.shape)}"
        raise BatchError(field("query_start_loc_cpu"), wanted=f"a CPU tensor [{requests + 1}]", got=got)


def check_contents(common: Any, *, cached: bool, block_size: int, num_blocks: int) -> None:
    """What lies on the device, too: waits for it, so for checked runs alone.

    Args:
        common: as for `check_shapes`, which comes first.
        cached: whether the layers have a cache.
        block_size, num_blocks: of it.
    """
    # In this order: vLLM may still be copying the host's offsets when the device is asked.
    offsets, lens, host = common.query_start_loc.cpu().long(), common.seq_lens.cpu().long(), common.query_start_loc_cpu
    if not torch.equal(offsets, host.long()):
        wanted = f"as in query_start_loc_cpu: {host.tolist()}"
        raise BatchError(field("query_start_loc"), wanted=wanted, got=offsets.tolist())
    queries = offsets.diff()
    if bool((queries < 0).any()):
        raise BatchError(field("query_start_loc"), wanted="ascending offsets", got=offsets.tolist())
    tokens, longest = common.num_actual_tokens, int(queries.max()) if len(queries) else 0
    if int(offsets[-1]) > tokens:
        wanted = f"at most num_actual_tokens={tokens} at its end"
        raise BatchError(field("query_start_loc"), wanted=wanted, got=int(offsets[-1]))
    if longest > common.max_query_len:
        wanted = f"{longest} or more, as in query_start_loc"
        raise BatchError(field("max_query_len"), wanted=wanted, got=common.max_query_len)
    if common.causal is True and bool((queries > lens).any()):
        hint = "seq_lens counts the new tokens, too."
        wanted = f"at least the query lengths {queries.tolist()}"
        raise BatchError(field("seq_lens"), wanted=wanted, got=lens.tolist(), hint=hint)
    if lens.numel() and int(lens.max()) > common.max_seq_len:
        raise BatchError(field("seq_lens"), wanted=f"at most max_seq_len={common.max_seq_len}", got=int(lens.max()))
    if not cached:
        return
    table, slots = common.block_table_tensor.cpu().long(), common.slot_mapping.cpu().long()
    needed = (lens + block_size - 1).div(block_size, rounding_mode="floor")
    if needed.numel() and int(needed.max()) > table.shape[1]:
        wanted = f"{int(needed.max())} blocks of {block_size} for seq_lens {lens.tolist()}"
        raise BatchError(field("block_table_tensor"), wanted=wanted, got=f"{table.shape[1]} columns")
    live = table[: len(lens)][torch.arange(table.shape[1]) < needed[:, None]]
    if live.numel() and not 0 <= int(live.min()) <= int(live.max()) < num_blocks:
        got = f"{int(live.min())} to {int(live.max())}"
        raise BatchError(field("block_table_tensor"), wanted=f"blocks from 0 to {num_blocks - 1}", got=got)
    if slots.numel() and int(slots.max()) >= num_blocks * block_size:
        wanted = f"slots below {num_blocks * block_size}, or negative for padding"
        raise BatchError(field("slot_mapping"), wanted=wanted, got=int(slots.max()))
