"""FlashAttention 4 (`flash_attn.cute`): kernels that are compiled when they are first called.

On Hopper it has neither splits nor 8-bit caches, so it is for prompts rather than for decoding. A kernel that loads
whole pages at once also loads what lies behind a row's last token, and multiplies it by 0: pages of such sizes are
refused, for NaN there would spread.

Kernels are compiled per dtypes, dims, rule and presence of arguments, some seconds each: before a CUDA graph is
recorded, a pass has to have run once, as `GraphRunner` does. They are kept on disk from then on.
"""

from __future__ import annotations

import os
from importlib import import_module, metadata

import torch

from faback.core.hooks import hookimpl
from faback.core.kernel import Capabilities, KernelProvider, KernelRequest, Rejection, arch_of
from faback.core.layer import LayerKind
from faback.core.segment import Segment
from faback.core.workspace import Workspace
from faback.kernels.paged import HALF, Paged, PagedKernel, Prepared

Tensor = torch.Tensor

DISTRIBUTION = "flash-attn-4"
KEPT = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
"""Environment variable that has compiled kernels kept on disk."""
HOPPER = frozenset({90})


class FlashAttention4(PagedKernel):
    """`flash_attn.cute.flash_attn_varlen_func` over page tables or the keys of the batch, on Hopper."""

    name = "fa4"
    priority = 60

    def probe(self, device: torch.device) -> str | None:
        try:
            metadata.version(DISTRIBUTION)
        except metadata.PackageNotFoundError:
            return f"the distribution {DISTRIBUTION} is not installed"
        if arch_of(device) not in HOPPER:
            return f"its adapter knows Hopper (sm_90) alone, the pools are on {device} (sm_{arch_of(device)})"
        os.environ.setdefault(KEPT, "1")
        try:
            import_module("flash_attn.cute")
        except Exception as error:  # noqa: BLE001  whatever the package raises is the reason
            return f"flash_attn.cute cannot be imported: {type(error).__name__}: {error}"
        return None

    def capabilities(self, device: torch.device) -> Capabilities:
        features = {
            "window", "window_right", "non_causal", "softcap", "sinks", "lse", "raw_kv", "dense_table", "block_table",
            "slot_map", "graph",
        }  # fmt: skip
        return Capabilities(
            min_arch=min(HOPPER),
            max_arch=max(HOPPER),
            q_dtypes=HALF,
            kv_dtypes=HALF,
            mixed_dtypes=False,
            max_head_dim=256,
            head_dim_multiple=16,
            features=frozenset(features),
        )

    def reject(self, request: KernelRequest, device: torch.device) -> tuple[Rejection, ...]:
        found, paged = list(super().reject(request, device)), "raw_kv" not in request.features
        whole = [tile for tile in _tiles(request.head_dim) if request.page_size % tile == 0]
        if paged and whole:
            hint = "use pages of 16 or 64 tokens" if request.head_dim <= 192 else "use pages of 16 tokens"
            wanted, supported = f"pages of {request.page_size}", f"pages that are no multiple of {whole[0]}"
            found.append(Rejection(self.name, "page size", wanted, supported, hint))
        return tuple(found)

    def prepare(self, segment: Segment, layer: LayerKind, request: KernelRequest, ws: Workspace) -> Prepared:
        paged = Paged.of(segment, ws)
        left, right = (None if bound < 0 else bound for bound in paged.window)
        arguments = {
            "cu_seqlens_q": paged.offsets,
            "cu_seqlens_k": paged.offsets_k,
            "seqused_k": paged.lens,
            "max_seqlen_q": max(1, paged.max_seqlen_q),
            "max_seqlen_k": max(1, paged.max_seqlen_k),
            "page_table": paged.table,
            "softmax_scale": layer.scale,
            "causal": paged.causal,
            "window_size": (left, None if paged.causal and left is None else right),
            "softcap": layer.softcap,
        }
        return Prepared(paged, arguments, ws.ops)

    def attend(
        self, prepared: Prepared, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sinks: Tensor | None, wants_lse: bool
    ) -> Tensor | None:
        from flash_attn.cute import flash_attn_varlen_func

        inside = None if wants_lse else sinks  # the package's log-sum-exp would count them
        options = {"learnable_sink": inside, "return_lse": wants_lse, **prepared.arguments}
        found, lse = flash_attn_varlen_func(q.contiguous(), k, v, **options)
        out.copy_(found)
        if wants_lse and sinks is not None:
            prepared.add_sinks(out, lse, sinks)
        return lse  # type: ignore[no-any-return]


def _tiles(head_dim: int) -> tuple[int, ...]:
    """Keys of a tile, with and without a window; pages of whole tiles are loaded at once."""
    if head_dim <= 128:
        return (128,)
    return (128, 96) if head_dim <= 192 else (80, 64)


@hookimpl
def faback_kernels(device: torch.device) -> list[KernelProvider]:
    return [FlashAttention4()]
