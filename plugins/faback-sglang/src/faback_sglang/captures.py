"""Captured passes: SGLang's three calls around a CUDA graph on faback's `capture` and `replay`.

The graph runner captures with a batch over its own buffers, and fills those before each replay. What it hands over then
is a view whose per-token tensors may still be those of the unpadded batch, so that the captured ones are taken instead.
"""

from __future__ import annotations

from typing import Any, Protocol

import attrs
import torch

from faback import BatchError, ForwardBatch
from faback_sglang.batches import extend_lens, per_request

Tensor = torch.Tensor


class Capturing(Protocol):
    """`faback.AttentionBackend` or `faback.MultiStepDraft`."""

    def capture(self, batch: ForwardBatch) -> Any: ...

    def replay(self, batch: ForwardBatch) -> Any: ...


class Captures:
    """The passes that one backend has captured.

    Args:
        backend: plans them.
    """

    def __init__(self, backend: Capturing) -> None:
        self._backend = backend
        self._static: dict[tuple[str, int], ForwardBatch] = {}

    def capture(self, batch: ForwardBatch) -> tuple[Any, int]:
        """Plans for a batch of static tensors; its plan and tokens. A second graph of the same tensors shares the plan.

        Args:
            batch: over the runner's buffers.
        """
        key = batch.forward_mode, batch.bs
        known = self._static.get(key)
        if known is not None and same(known, batch):
            return self._backend.replay(known), batch.num_tokens
        plan = self._backend.capture(batch)
        self._static[key] = batch
        return plan, batch.num_tokens

    def replay(self, mode: str, fb: Any) -> tuple[Any, int]:
        """Brings the plan of a captured size up to date; the plan and its tokens.

        Args:
            mode: faback's.
            fb: the runner's view of the batch, padded to a captured size.

        Raises:
            BatchError: the size was not captured, or a length is beyond what was captured.
        """
        static = self._static.get((mode, fb.batch_size))
        if static is None:
            sizes = sorted(size for known, size in self._static if known == mode)
            wanted = f"a captured size of mode {mode}: {sizes}"
            raise BatchError("forward_batch.batch_size", wanted=wanted, got=fb.batch_size)
        fresh: dict[str, Any] = per_request(fb)
        slots, mask = fb.out_cache_loc, getattr(fb.spec_info, "custom_mask", None)
        if slots is not None and static.out_cache_loc is not None and slots.shape == static.out_cache_loc.shape:
            fresh["out_cache_loc"] = slots
        if static.extend_seq_lens is not None and extend_lens(fb) is not None:
            fresh["extend_seq_lens"] = extend_lens(fb)
        if static.custom_mask is not None and mask is not None:
            fresh["custom_mask"] = mask
        return self._backend.replay(attrs.evolve(static, **fresh)), static.num_tokens


def same(one: ForwardBatch, other: ForwardBatch) -> bool:
    """Whether two batches are over the same memory."""

    def places(batch: ForwardBatch) -> dict[str, tuple[int, int]]:
        values = attrs.asdict(batch, recurse=False)
        found = {n: v for n, v in values.items() if isinstance(v, Tensor) and not n.endswith("_cpu")}
        return {name: (value.data_ptr(), value.numel()) for name, value in found.items()}

    return places(one) == places(other)


def largest(
    mode: str, requests: int, tokens: int, device: torch.device, *, encoder: bool, custom_mask: Tensor | None
) -> ForwardBatch:
    """A batch of the largest size that will be captured; only its sizes matter.

    Args:
        mode: faback's.
        requests: how many.
        tokens: of each request.
        device: of the pools.
        encoder: the model has cross-attention.
        custom_mask: of verification, with room for the largest tree.
    """
    one = torch.zeros(requests, dtype=torch.int64, device=device)
    return ForwardBatch(
        forward_mode=mode,
        req_pool_indices=one,
        seq_lens=one,
        out_cache_loc=torch.zeros(requests * tokens, dtype=torch.int64, device=device),
        extend_seq_lens=one if mode == "draft_extend" else None,
        encoder_lens=one if encoder else None,
        custom_mask=custom_mask if mode == "target_verify" else None,
    )
