"""The facade for the layers of one KV cache group, and the plans that serve vLLM's batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from faback import AttentionBackend, AttentionLayer, BackendConfig, ForwardBatch, Pools
from faback.core.graphs import Graphs
from faback.core.plan import Plan
from faback_vllm.caches import BlockPool
from faback_vllm.mode import KEY

Tensor = torch.Tensor


@attrs.define(eq=False)
class Passes:
    """Plans batches for layers that are all causal as vLLM says, or all bidirectional.

    A plan reads vLLM's own tensors and nothing else of the batch, so one that was captured serves every batch of its
    size that lies in the same tensors. What a kernel needs besides (a page table, say) is filled again for each.

    Attributes:
        layers: by layer name.
        pool: the group's caches.
        backend: the facade.
    """

    layers: Mapping[str, AttentionLayer]
    pool: BlockPool
    backend: AttentionBackend
    _graphs: list[Graphs[Plan]] = attrs.field(factory=list)
    _captured: dict[tuple[int, int], dict[int, ForwardBatch]] = attrs.field(factory=dict)
    """By requests and tokens, then by the longest query, in the order of `_graphs`."""

    @classmethod
    def of(cls, layers: Mapping[str, AttentionLayer], pool: BlockPool, config: BackendConfig) -> Passes:
        """Raises a `NoKernelError` for a layer that no kernel can serve."""
        # The table comes with each batch; of this one only the width counts, which is the longest request.
        none = torch.zeros(1, 1, dtype=torch.int32, device=pool.device).expand(1, config.context_len)
        return cls(layers, pool, AttentionBackend(config, Pools(req_to_token=none, kv=pool), layers.values()))

    def plan(self, batch: ForwardBatch) -> Plan:
        """A plan for a batch. Plans that were captured for its size are brought up to date, and the tightest is it."""
        longest = batch.bound("extend_seq_lens", batch.num_tokens)
        found: dict[int, Plan] = {}
        known = self._captured.get((batch.bs, batch.num_tokens), {})
        for graphs, (most, static) in zip(self._graphs, known.items(), strict=False):
            if most >= longest and _same_tensors(static, batch):
                found[most] = graphs.replay(attrs.evolve(batch, bounds=static.bounds))
        return found[min(found)] if found else self.backend.build(batch, self.backend.workspace())

    def capture(self, batch: ForwardBatch) -> Plan:
        """A plan whose kernels will be recorded in a CUDA graph: for tensors that stay, up to the batch's bounds."""
        assert batch.bounds is not None
        longest = batch.bounds["extend_seq_lens"]
        bounds = {"extend_seq_lens": longest, "seq_lens": self.backend.config.context_len}
        bounds["seq_lens"] = max(bounds["seq_lens"], batch.bounds["seq_lens"])
        # One size may be captured twice, for decoding and for any mixture of as many tokens; a build brings both up to
        # date, so these two share no memory. Sizes do.
        known = self._captured.setdefault((batch.bs, batch.num_tokens), {})
        known[longest] = attrs.evolve(batch, bounds=bounds)
        number = list(known).index(longest)
        if number == len(self._graphs):
            self._graphs.append(self.backend.graphs(self.backend.build, apart=number > 0))
        plan = self._graphs[number].capture(batch, bounds)
        return plan


def batch_of(common: Any, rows: Tensor, common_prefix_len: int) -> ForwardBatch:
    """A `CommonAttentionMetadata` in faback's words; every tensor is vLLM's own.

    Args:
        common: the metadata.
        rows: int32 [num_reqs] 0, 1, 2 ...
        common_prefix_len: tokens that all requests share, in whole blocks.
    """
    tokens, slots = int(common.num_actual_tokens), common.slot_mapping  # numpy's integers come, too
    extras = {
        "query_start_loc": common.query_start_loc,
        "block_table": common.block_table_tensor,
        "common_prefix_len": common_prefix_len,
    }
    return ForwardBatch(
        forward_mode=KEY,
        req_pool_indices=rows,
        seq_lens=common.seq_lens,
        out_cache_loc=slots[:tokens] if slots.shape[0] > tokens else slots,
        num_tokens=tokens,
        extras=extras,
        bounds={"extend_seq_lens": int(common.max_query_len), "seq_lens": int(common.max_seq_len)},
    )


def _same_tensors(static: ForwardBatch, batch: ForwardBatch) -> bool:
    """Whether a batch lies where a captured plan reads."""
    pairs = [(getattr(static, name), getattr(batch, name)) for name in ("seq_lens", "out_cache_loc")]
    pairs += [(static.extras[name], batch.extras[name]) for name in ("query_start_loc", "block_table")]
    return static.extras["common_prefix_len"] == batch.extras["common_prefix_len"] and all(
        mine.data_ptr() == theirs.data_ptr() and mine.shape == theirs.shape and mine.stride() == theirs.stride()
        for mine, theirs in pairs
    )
