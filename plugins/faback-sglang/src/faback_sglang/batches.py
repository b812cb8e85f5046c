"""SGLang's forward batch in faback's terms. Host work only, but for what checked mode reads."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from faback import BatchError, ForwardBatch, SpeculativeConfig

Tensor = torch.Tensor

MODES = {
    ForwardMode.IDLE: "idle",
    ForwardMode.DECODE: "decode",
    ForwardMode.EXTEND: "extend",
    ForwardMode.SPLIT_PREFILL: "extend",
    ForwardMode.MIXED: "mixed",
    ForwardMode.TARGET_VERIFY: "target_verify",
    ForwardMode.DRAFT_EXTEND_V2: "draft_extend",
}
REFUSED = (
    "cross_attention_custom_mask",
    "multi_item_delimiter_indices",
    "attn_cp_metadata",
    "attn_dcp_metadata",
    "dcp_kv_mask",
    "encoder_swa_row_floor",
    "fused_prefix_k",
)
"""Fields that would change who sees what, and that nothing here honours."""


def translate(fb: Any, spec: SpeculativeConfig | None = None, *, embedding: bool = False) -> ForwardBatch:
    """A forward pass of a target model, or an extend of a draft model.

    Args:
        fb: SGLang's `ForwardBatch`, or one of the views that its graph runners make.
        spec: sizes of speculation, which a verification needs.
        embedding: extends read and write no cache.

    Raises:
        BatchError: fields that are missing, contradict each other, or would be ignored; named as SGLang does.
    """
    mode = mode_of(fb)
    refuse(fb)
    common = per_request(fb)
    if mode == "idle":
        return ForwardBatch(forward_mode=mode, num_tokens=0, **common)
    slots = fb.out_cache_loc
    if slots is None:
        raise BatchError("forward_batch.out_cache_loc", wanted=f"slots in mode {fb.forward_mode.name}", got=None)
    if mode == "decode":
        if fb.spec_info is not None:
            hint = "A draft model's steps are planned by the multi-step backend."
            got = type(fb.spec_info).__name__
            raise BatchError("forward_batch.spec_info", wanted="None when decoding", got=got, hint=hint)
        return ForwardBatch(forward_mode=mode, out_cache_loc=exactly(slots, fb.batch_size, "one per request"), **common)
    if mode == "target_verify":
        return ForwardBatch(forward_mode=mode, **verified(fb, slots, spec), **common)
    new = extended(fb, slots)
    if embedding and mode == "extend":
        del new["out_cache_loc"]
        tokens = fb.extend_num_tokens or slots.shape[0]
        return ForwardBatch(forward_mode="embedding", num_tokens=tokens, **new, **common)
    return ForwardBatch(forward_mode=mode, **new, **common)


def mode_of(fb: Any) -> str:
    """faback's name of the batch's mode.

    Raises:
        BatchError: a mode that faback does not have.
    """
    mode = MODES.get(fb.forward_mode)
    if mode is None:
        known = ", ".join(m.name for m in MODES)
        raise BatchError("forward_batch.forward_mode", wanted=f"one of {known}", got=fb.forward_mode.name)
    return mode


def translate_draft(fb: Any, branches: int, num_steps: int) -> ForwardBatch:
    """All steps of a round of drafting; `seq_lens` are the committed ones.

    Args:
        fb: SGLang's batch before its steps, with the slots of all of them.
        branches: per request.
        num_steps: drafted tokens per branch.
    """
    refuse(fb)
    if fb.out_cache_loc is None:
        raise BatchError("forward_batch.out_cache_loc", wanted="slots of all drafted tokens", got=None)
    wanted = f"{fb.batch_size} requests * topk {branches} * speculative_num_steps {num_steps}"
    slots = exactly(fb.out_cache_loc, fb.batch_size * branches * num_steps, wanted)
    return ForwardBatch(forward_mode="draft_decode", out_cache_loc=slots, **per_request(fb))


def refuse(fb: Any) -> None:
    """Raises for a field whose meaning would be lost."""
    for name in REFUSED:
        if getattr(fb, name, None) is not None:
            raise BatchError(f"forward_batch.{name}", wanted="None: faback does not honour it", got="a value")


def per_request(fb: Any) -> dict[str, Any]:
    """Fields that every mode has, cut to the batch: graph runners hand over whole buffers."""
    count = fb.batch_size
    found: dict[str, Any] = {}
    for name in ("req_pool_indices", "seq_lens"):
        value = getattr(fb, name)
        if value is None:
            raise BatchError(f"forward_batch.{name}", wanted=f"{count} values", got=None)
        found[name] = exactly(value, count, "forward_batch.batch_size of them", f"forward_batch.{name}")
    found["seq_lens_cpu"] = on_host(fb, "seq_lens_cpu", count)
    lens = getattr(fb, "encoder_lens", None)
    if lens is not None:
        found["encoder_lens"] = exactly(lens, count, "forward_batch.batch_size of them", "forward_batch.encoder_lens")
        found["encoder_lens_cpu"] = on_host(fb, "encoder_lens_cpu", count)
        found["encoder_out_cache_loc"] = getattr(fb, "encoder_out_cache_loc", None)
    return found


def extended(fb: Any, slots: Tensor) -> dict[str, Any]:
    """New tokens of each request, packed; tokens beyond them are padding and are left out."""
    count, lens = fb.batch_size, extend_lens(fb)
    if lens is None:
        what = "forward_batch.extend_seq_lens"
        raise BatchError(what, wanted=f"{count} values in mode {fb.forward_mode.name}", got=None)
    found: dict[str, Any] = {
        "extend_seq_lens": lens,
        "extend_seq_lens_cpu": on_host(fb, "extend_seq_lens_cpu", count),
        "extend_prefix_lens_cpu": on_host(fb, "extend_prefix_lens_cpu", count),
    }
    prefix = getattr(fb, "extend_prefix_lens", None)
    if prefix is not None:
        wanted = "forward_batch.batch_size of them"
        found["extend_prefix_lens"] = exactly(prefix, count, wanted, "forward_batch.extend_prefix_lens")
    total = getattr(fb, "extend_num_tokens", None)
    if found["extend_seq_lens_cpu"] is not None:
        told, total = total, int(found["extend_seq_lens_cpu"].sum())
        if told is not None and told != total:
            wanted = f"{total}, the sum of extend_seq_lens_cpu"
            raise BatchError("forward_batch.extend_num_tokens", wanted=wanted, got=told)
    found["out_cache_loc"] = slots if total is None else exactly(slots, total, "one per new token")
    return found


def extend_lens(fb: Any) -> Tensor | None:
    """New tokens of each request; views for replays have them in the input of speculation alone."""
    lens = getattr(fb, "extend_seq_lens", None)
    if lens is None:
        lens = getattr(fb.spec_info, "extend_seq_lens_tensor", None)
    if lens is None:
        return None
    return exactly(lens, fb.batch_size, "forward_batch.batch_size of them", "forward_batch.extend_seq_lens")


def verified(fb: Any, slots: Tensor, spec: SpeculativeConfig | None) -> dict[str, Any]:
    """Drafted tokens: as many for each request as configured, or fewer, or different numbers. Chains have no mask."""
    info, count = fb.spec_info, fb.batch_size
    if info is None:
        raise BatchError("forward_batch.spec_info", wanted="the input of a verification", got=None)
    if spec is None:
        what = "server_args.speculative_num_draft_tokens"
        raise BatchError(what, wanted="a number in mode TARGET_VERIFY", got=None)
    found: dict[str, Any] = {"custom_mask": info.custom_mask if spec.topk > 1 else None}
    layout = getattr(info, "ragged_verify_layout", None)
    if layout is not None:
        lens = layout.verify_lens
        told = layout.verify_lens_cpu
        found["verify_lens"] = exactly(lens, count, "one per request", "spec_info.ragged_verify_layout.verify_lens")
        found["verify_lens_cpu"] = None if told is None else torch.tensor(told[:count])
        total = layout.total_verify_tokens
        found["out_cache_loc"] = slots if total is None else exactly(slots, total, "one per token to verify")
        return found
    width, most = info.draft_token_num, spec.num_draft_tokens
    if width > most:
        wanted = f"at most {most}, as server_args.speculative_num_draft_tokens"
        raise BatchError("forward_batch.spec_info.draft_token_num", wanted=wanted, got=width)
    if width < most:
        found["verify_lens"] = torch.full_like(fb.seq_lens[:count], width)
        found["verify_lens_cpu"] = torch.full((count,), width)
    wanted = f"{count} requests * draft_token_num {width}"
    found["out_cache_loc"] = exactly(slots, count * width, wanted)
    return found


def exactly(tensor: Tensor, length: int, wanted: str, what: str = "forward_batch.out_cache_loc") -> Tensor:
    """The first entries of a tensor that has at least so many.

    Raises:
        BatchError: it has fewer.
    """
    if not isinstance(tensor, Tensor) or tensor.ndim != 1 or tensor.shape[0] < length:
        got = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        raise BatchError(what, wanted=f"a tensor of {length} entries ({wanted})", got=got)
    return tensor if tensor.shape[0] == length else tensor[:length]


def on_host(fb: Any, name: str, count: int) -> Tensor | None:
    """A host copy, which SGLang keeps as a list or as a tensor, where there is one."""
    value = getattr(fb, name, None)
    if value is None:
        return None
    value = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.int64)
    return exactly(value, count, "forward_batch.batch_size of them", f"forward_batch.{name}")


def check_offsets(fb: Any, batch: ForwardBatch) -> None:
    """Checked mode: prefix and new tokens add up to the whole, and offsets to the new ones. Reads the device.

    Raises:
        BatchError: they do not.
    """
    new, prefix = batch.extend_seq_lens, batch.extend_prefix_lens
    if new is None:
        return
    if prefix is not None and not torch.equal((prefix + new).long(), batch.seq_lens.long()):
        wanted = f"seq_lens {batch.seq_lens.tolist()} without extend_seq_lens {new.tolist()}"
        raise BatchError("forward_batch.extend_prefix_lens", wanted=wanted, got=prefix.tolist())
    starts = getattr(fb, "extend_start_loc", None)
    if starts is not None:
        wanted_starts = (new.cumsum(0) - new).long()
        if not torch.equal(starts[: batch.bs].long(), wanted_starts):
            wanted = f"{wanted_starts.tolist()}, the running sum of extend_seq_lens"
            raise BatchError("forward_batch.extend_start_loc", wanted=wanted, got=starts[: batch.bs].tolist())
