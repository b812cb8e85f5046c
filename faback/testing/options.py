"""What a scenario can be asked to be."""

from __future__ import annotations

from typing import Any

import attrs
import torch

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

MODES = ("decode", "extend", "mixed", "idle", "draft_decode", "target_verify", "draft_extend", "embedding")
OVERLAYS = ("full", "window", "local", "prefill_aware", "cross", "mla", "encoder_only")


@attrs.frozen(kw_only=True)
class Options:
    """Everything that decides a scenario; equal options give equal scenarios, bit by bit.

    None means: drawn from the seed.

    Attributes:
        mode: one of `MODES`, the forward mode under test.
        overlay: one of `OVERLAYS`: which layers the model has.
        page_size: tokens per page.
        seed: decides all that is left open.
        batch_size: requests, padding not counted.
        lengths: (cached, new) tokens per request, instead of drawn ones; for drafting and verification `cached` is
            the committed length and `new` is ignored.
        encoder_lengths: encoder tokens per request (overlay "cross").
        max_len: longest drawn text.
        num_q_heads, num_kv_heads, head_dim, v_head_dim: of every layer; overlay "mla" has one KV head, whose value is
            the leading part of its key.
        dtype: of q and of the output.
        kv_dtype: of the pool, `dtype` if None.
        kv_scales: layers have k and v scales, per head or per layer, never equal.
        sinks: layers have sinks.
        softcap: the layers' scores are capped, each layer at another value.
        scale: factor on the scores of the first layer; head_dim ** -0.5 if None.
        hybrid: sliding and local layers live in a smaller pool.
        evict: with `hybrid`, pages that nobody will see again are freed.
        windows: distances of the sliding layers.
        chunk: of the local layers.
        inclusive: prefill-aware windows count W tokens besides the query.
        topk, num_steps, num_draft_tokens: of speculation.
        draft_step: step of draft decode.
        ragged: verify different numbers of tokens per request (topk 1).
        strided_rows: draft extend with rows padded to one length.
        padded_rows: rows of padding behind the requests.
        padded_tokens: tokens of padding behind the last row, in modes whose rows have lengths of their own.
        tails: flavour of poisoned table entries, see `faback.testing.poison.TABLE_FLAVOURS`.
        index_dtype: of every index tensor; drawn per tensor if None.
    """

    mode: str = attrs.field(validator=attrs.validators.in_(MODES))
    overlay: str = attrs.field(default="full", validator=attrs.validators.in_(OVERLAYS))
    page_size: int = 1
    seed: int = 0
    batch_size: int | None = None
    lengths: tuple[tuple[int, int], ...] | None = None
    encoder_lengths: tuple[int, ...] | None = None
    max_len: int = 24
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    v_head_dim: int | None = None
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    kv_scales: bool = False
    sinks: bool = False
    softcap: bool = False
    scale: float | None = None
    hybrid: bool = False
    evict: bool = True
    windows: tuple[int, ...] | None = None
    chunk: int | None = None
    inclusive: bool = False
    topk: int = 1
    num_steps: int = 3
    num_draft_tokens: int = 4
    draft_step: int | None = None
    ragged: bool = False
    strided_rows: bool = False
    padded_rows: int = 0
    padded_tokens: int = 0
    tails: str | None = None
    index_dtype: torch.dtype | None = None

    @property
    def storage_dtype(self) -> torch.dtype:
        """dtype of the pool."""
        return self.dtype if self.kv_dtype is None else self.kv_dtype

    @property
    def rule(self) -> str:
        """The predicate (a key of `faback.testing.visibility.MODES`) that judges the mode under test."""
        if self.mode == "draft_decode":
            return "draft_chain" if self.topk == 1 else "draft_branches"
        if self.mode == "target_verify":
            return "verify_chain" if self.topk == 1 else "verify_tree"
        return "extend" if self.mode == "idle" else self.mode

    def __str__(self) -> str:
        """The arguments that make it again."""
        changed: list[str] = []
        for field in attrs.fields(Options):
            value: Any = getattr(self, field.name)
            if field.default is attrs.NOTHING or value != field.default:
                changed.append(f"{field.name}={value!r}")
        return f"Scenario.make({', '.join(changed)})"


def impossible(options: Options) -> str | None:
    """Why a combination means nothing, None where it means something. Not a limit of any backend."""
    speculative = options.mode in ("draft_decode", "target_verify")
    reasons = {
        "drafts follow text, and bidirectional layers have none": options.overlay == "encoder_only"
        and (speculative or options.mode == "draft_extend"),
        "nothing is cached, so there is nothing to remember": options.mode == "embedding"
        and (options.overlay in ("prefill_aware", "cross") or options.hybrid),
        "no layer that could live in the window pool": options.hybrid
        and options.overlay not in ("window", "local", "prefill_aware"),
        "a window that counts the token itself has at least that one": options.overlay == "prefill_aware"
        and not options.inclusive
        and 0 in (options.windows or ()),
        "ragged trees have no layout": options.ragged and (options.mode != "target_verify" or options.topk > 1),
        "only speculation has branches": options.topk > 1 and not speculative,
        "only draft extend has strided rows": options.strided_rows and options.mode != "draft_extend",
    }
    return next((reason for reason, applies in reasons.items() if applies), None)
