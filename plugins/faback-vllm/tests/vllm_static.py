"""vLLM's persistent input tensors, and batches in them."""

from __future__ import annotations

from typing import Any

import torch
from vllm_world import World

REQUESTS, TOKENS, WIDTH = 6, 24, 40


class Static:
    """The tensors, as large as the largest batch."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.tensors = {
            "query_start_loc": torch.zeros(REQUESTS + 1, dtype=torch.int32),
            "seq_lens": torch.zeros(REQUESTS, dtype=torch.int32),
            "block_table_tensor": torch.zeros(REQUESTS, WIDTH, dtype=torch.int32),
            "slot_mapping": torch.full((TOKENS,), -1, dtype=torch.int64),
        }

    def common(self, new: list[tuple[int, int]], requests: int, tokens: int, most: int) -> Any:
        """The batch in the static tensors, padded to a size that was captured."""
        live = sum(count for _, count in new)
        plain = self.world.common(new, padded=(requests - len(new), tokens - live))
        sizes = {"query_start_loc": requests + 1, "seq_lens": requests, "slot_mapping": tokens}
        views = {name: self.tensors[name][:size] for name, size in sizes.items()}
        for name, view in views.items():
            view.copy_(getattr(plain, name))
        views["block_table_tensor"] = table = self.tensors["block_table_tensor"][:requests]
        table.fill_(1 << 30)
        table[:, : plain.block_table_tensor.shape[1]] = plain.block_table_tensor
        return replaced(plain, **views, max_query_len=most)


def replaced(common: Any, **changes: Any) -> Any:
    """Metadata with other fields."""
    fields = {name: getattr(common, name) for name in type(common).__dataclass_fields__ if not name.startswith("_")}
    return type(common)(**fields | changes)


def captured(world: World, static: Static, requests: int, tokens: int, most: int) -> Any:
    """As vLLM captures: nothing real in the batch, the longest lengths for the host."""
    common = replaced(static.common([], requests, tokens, most), max_seq_len=128)
    return world.builder.build_for_cudagraph_capture(common)
