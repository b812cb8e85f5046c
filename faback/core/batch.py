"""The forward batch: what an engine says about one forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from faback.core.errors import BatchError
from faback.core.segment import INDEX_DTYPES

Tensor = torch.Tensor

MIRRORED = ("seq_lens", "extend_seq_lens", "extend_prefix_lens", "encoder_lens", "verify_lens")
PER_REQUEST = ("req_pool_indices", *MIRRORED, *(f"{name}_cpu" for name in MIRRORED))
PER_TOKEN = ("out_cache_loc", "positions")
ON_DEVICE = ("req_pool_indices", *MIRRORED, *PER_TOKEN, "encoder_out_cache_loc", "custom_mask")
"""Fields that are tensors on the pools' device."""


@attrs.frozen(kw_only=True, eq=False)
class ForwardBatch:
    """One forward pass, in the field's names. Tensors are read and never written.

    Index tensors are int32 or int64, on the pools' device; those named `_cpu` are optional host copies that spare a
    bound from being taken from the configuration.

    Attributes:
        forward_mode: key of the mode: "decode", "extend", "mixed", "idle", or one that a plugin brings.
        req_pool_indices: [bs] row of each request in `req_to_token`; row 0 belongs to padding.
        seq_lens: [bs] tokens of each request, the new ones included; for drafting and verification the committed
            ones. Encoder tokens are not counted.
        out_cache_loc: [tokens] slots where new keys and values go.
        positions: [tokens] absolute positions, as the model uses them.
        extend_seq_lens: [bs] new tokens of each request.
        extend_prefix_lens: [bs] tokens that were already cached.
        encoder_lens: [bs] encoder tokens of each request.
        encoder_out_cache_loc: [encoder tokens] slots for the cross-attention cache.
        draft_step: index of the draft step, from 0.
        custom_mask: flat bool mask of tree verification, per request a [drafts, seq_len + drafts] block.
        verify_lens: [bs] tokens to verify per request, where they differ.
        num_tokens: rows of q, where no per-token tensor tells it.
        token_stride: tokens from one request to the next where rows are padded to one length; None if packed.
        extras: fields of plugins.
        bounds: longest lengths by name of the field, in place of host copies; None takes these from the tensors
            themselves where they lie on the CPU. For plans that outlive the contents of their batch.
    """

    forward_mode: str
    req_pool_indices: Tensor
    seq_lens: Tensor
    seq_lens_cpu: Tensor | None = None
    out_cache_loc: Tensor | None = None
    positions: Tensor | None = None
    extend_seq_lens: Tensor | None = None
    extend_seq_lens_cpu: Tensor | None = None
    extend_prefix_lens: Tensor | None = None
    extend_prefix_lens_cpu: Tensor | None = None
    encoder_lens: Tensor | None = None
    encoder_lens_cpu: Tensor | None = None
    encoder_out_cache_loc: Tensor | None = None
    draft_step: int | None = None
    custom_mask: Tensor | None = None
    verify_lens: Tensor | None = None
    verify_lens_cpu: Tensor | None = None
    num_tokens: int = attrs.field(default=attrs.Factory(lambda self: self._count_tokens(), takes_self=True))
    token_stride: int | None = None
    extras: Mapping[str, Any] = attrs.field(factory=dict)
    bounds: Mapping[str, int] | None = None

    @property
    def bs(self) -> int:
        """Number of requests, padded ones included."""
        return self.req_pool_indices.shape[0]

    def __attrs_post_init__(self) -> None:
        self._check_index("req_pool_indices", None)
        for name in PER_REQUEST:
            self._check_index(name, self.bs)
        for name in PER_TOKEN:
            self._check_index(name, None)
        self._check_index("encoder_out_cache_loc", None)
        mask: object = self.custom_mask
        if mask is not None and (not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.ndim != 1):
            got = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
            hint = "Convert with `.bool()`, requests one after another."
            raise BatchError("batch.custom_mask", wanted="torch.bool", got=got, hint=hint)
        for name in MIRRORED:
            if getattr(self, f"{name}_cpu") is not None and getattr(self, f"{name}_cpu").device.type != "cpu":
                raise BatchError(f"batch.{name}_cpu", wanted="a CPU tensor", got=getattr(self, f"{name}_cpu").device)

    def bound(self, name: str, otherwise: int) -> int:
        """Largest value of a per-request field, from its host copy; `otherwise` where there is none.

        A CPU tensor is its own host copy. Never synchronises with a device. Fields of `extras` have bounds, too.
        """
        if self.bounds is not None:
            return self.bounds.get(name, otherwise)
        lens = getattr(self, f"{name}_cpu", None)
        if lens is None:
            own = getattr(self, name, self.extras.get(name))
            lens = own if own is not None and own.device.type == "cpu" else None
        if lens is None or lens.numel() == 0:
            return otherwise if lens is None else 0
        return int(lens.max())

    def check_fields(self, needs: tuple[str, ...]) -> None:
        """Raises a `BatchError` naming the first needed field that is missing."""
        for name in needs:
            value = self.extras.get(name) if not hasattr(self, name) else getattr(self, name)
            if value is None:
                raise BatchError(f"batch.{name}", wanted=f"a value in forward mode {self.forward_mode!r}", got=None)

    def check_lengths(self, columns: int, num_slots: int, device_data: bool) -> None:
        """Raises a `BatchError` naming a length or slot beyond the pools.

        Args:
            columns: tokens that a row of `req_to_token` holds.
            num_slots: slots of the pool.
            device_data: also look at tensors of a device, which synchronises; else at host data only.
        """

        def readable(name: str) -> Tensor | None:
            value = getattr(self, f"{name}_cpu", None)
            value = getattr(self, name) if value is None else value
            return value.cpu() if value is not None and (device_data or value.device.type == "cpu") else None

        if self.bounds is not None:
            return  # what the tensors hold now is not what a replay will find
        seq_lens, new, slots = readable("seq_lens"), readable("extend_seq_lens"), readable("out_cache_loc")
        if seq_lens is not None and seq_lens.numel() and int(seq_lens.max()) > columns:
            wanted = f"at most {columns} tokens, the width of req_to_token"
            raise BatchError("batch.seq_lens", wanted=wanted, got=int(seq_lens.max()))
        if not device_data:
            return
        if new is not None and int(new.sum()) > self.num_tokens and self.token_stride is None:
            wanted = f"at most {self.num_tokens} new tokens, as there are queries"
            raise BatchError("batch.extend_seq_lens", wanted=wanted, got=int(new.sum()))
        if new is not None and seq_lens is not None and bool((new > seq_lens).any()):
            raise BatchError("batch.extend_seq_lens", wanted="no more than seq_lens", got=new.tolist())
        if slots is not None and slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < num_slots:
            got = f"{int(slots.min())} to {int(slots.max())}"
            raise BatchError("batch.out_cache_loc", wanted=f"slots from 0 to {num_slots - 1}", got=got)

    def check_device(self, device: torch.device) -> None:
        """Raises a `BatchError` naming the first tensor that is not on the pools' device."""
        for name in ON_DEVICE:
            value = getattr(self, name)
            if value is not None and value.device != device:
                raise BatchError(f"batch.{name}", wanted=f"a tensor on {device} like the pools", got=value.device)

    def _count_tokens(self) -> int:
        for name in PER_TOKEN:
            value = getattr(self, name)
            if isinstance(value, Tensor) and value.ndim == 1:
                return value.shape[0]
        rows: object = self.req_pool_indices
        return rows.shape[0] if isinstance(rows, Tensor) and rows.ndim == 1 else 0

    def _check_index(self, name: str, length: int | None) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if not isinstance(value, Tensor) or value.dtype not in INDEX_DTYPES:
            got = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise BatchError(f"batch.{name}", wanted="an int32 or int64 tensor", got=got)
        if value.ndim != 1 or (length is not None and value.shape[0] != length):
            wanted = f"[{'n' if length is None else length}]"
            hint = "" if length is None else "One entry per row of req_pool_indices."
            raise BatchError(f"batch.{name}", wanted=wanted, got=list(value.shape), hint=hint or None)
