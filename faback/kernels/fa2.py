"""FlashAttention 2 (the distribution flash-attn): half precision on Ampere and later, in pages of a multiple of 256.

Rows of one number of queries go to `flash_attn_with_kvcache`, which splits long keys over the processors. Others go to
the operator behind `flash_attn_varlen_func`, because the function itself takes a row's number of keys from its offsets,
and rows of padding have none.

It knows no sinks: they enter at a merge, by its log-sum-exp. A query that sees nothing has a log-sum-exp of +inf here,
which becomes -inf.
"""

from __future__ import annotations

import re
from importlib import import_module, metadata
from inspect import signature
from typing import Any

import attrs
import torch

from faback.core.hooks import hookimpl
from faback.core.kernel import Capabilities, KernelProvider, KernelRequest, Rejection, arch_of
from faback.core.layer import LayerKind
from faback.core.segment import Segment
from faback.core.workspace import Workspace
from faback.kernels.paged import HALF, Paged, PagedKernel, Prepared

Tensor = torch.Tensor

DISTRIBUTION = "flash-attn"
MODULE = "flash_attn.flash_attn_interface"
OPERATOR = "flash_attn"
"""Namespace of the operators that the module registers."""
VERSIONS = re.compile(r"2\.([89]|[1-9]\d)\b")
"""2.8 and later, before 3."""
NEEDED = frozenset({"softmax_scale", "causal", "softcap", "block_table"})
OF_CACHE = NEEDED | {"cache_seqlens", "window_size", "num_splits", "return_softmax_lse"}
OF_VARLEN = NEEDED | {"cu_seqlens_q", "cu_seqlens_k", "seqused_k", "window_size_left", "window_size_right"}
HINTS = {
    "page size": "make the pools with pages of 256 tokens",
    "kv dtype": "the triton kernel reads 8-bit caches",
    "dtypes": "the triton kernel mixes dtypes",
    "head dim": "the triton kernel takes any dims",
}
"""What to do, by what a request is refused for."""


class FlashAttention2(PagedKernel):
    """`flash_attn_with_kvcache` and `torch.ops.flash_attn._flash_attn_varlen_forward`."""

    name = "fa2"
    priority = 40

    def probe(self, device: torch.device) -> str | None:
        try:
            version = metadata.version(DISTRIBUTION)
        except metadata.PackageNotFoundError:
            return f"the distribution {DISTRIBUTION} is not installed"
        if not VERSIONS.match(version):
            return f"knows {DISTRIBUTION} 2.8 and later 2.x, {version} is installed"
        if arch_of(device) < 80:
            return f"needs an Ampere GPU or a later one (sm_80), the pools are on {device} (sm_{arch_of(device)})"
        try:
            missing = _missing()
        except Exception as error:  # noqa: BLE001  whatever the package raises is the reason
            return f"{MODULE} cannot be used: {type(error).__name__}: {error}"
        return f"{DISTRIBUTION} {version} lacks the arguments {', '.join(missing)}" if missing else None

    def capabilities(self, device: torch.device) -> Capabilities:
        features = {
            "window", "window_right", "non_causal", "softcap", "lse", "raw_kv", "dense_table", "block_table",
            "slot_map", "graph",
        }  # fmt: skip
        return Capabilities(
            min_arch=80,
            q_dtypes=HALF,
            kv_dtypes=HALF,
            mixed_dtypes=False,
            max_head_dim=256,
            head_dim_multiple=8,
            unequal_head_dims=False,
            page_multiple=256,
            features=frozenset(features),
        )

    def reject(self, request: KernelRequest, device: torch.device) -> tuple[Rejection, ...]:
        return tuple(attrs.evolve(r, hint=HINTS.get(r.aspect, r.hint)) for r in super().reject(request, device))

    def prepare(self, segment: Segment, layer: LayerKind, request: KernelRequest, ws: Workspace) -> Prepared:
        paged = Paged.of(segment, ws)
        left, right = paged.window
        if paged.causal and left < 0:
            right = -1  # or it would take a decode step for one with a window
        arguments: dict[str, Any] = {"softmax_scale": layer.scale, "causal": paged.causal, "softcap": layer.softcap}
        if paged.uniform and paged.table is not None:
            arguments |= {"cache_seqlens": paged.lens, "block_table": paged.table, "window_size": (left, right)}
            return Prepared(paged, arguments, ws.ops)
        arguments |= {
            "cu_seqlens_q": paged.offsets,
            "cu_seqlens_k": paged.offsets if paged.offsets_k is None else paged.offsets_k,  # with pages not looked at
            "seqused_k": paged.lens,
            "max_seqlen_q": max(2, paged.max_seqlen_q),  # with 1 it would take token b for row b's query
            "max_seqlen_k": max(1, paged.max_seqlen_k),
            "block_table": paged.table,
            "window_size_left": left,
            "window_size_right": right,
            "dropout_p": 0.0,
        }
        return Prepared(paged, arguments, ws.ops)

    def attend(
        self, prepared: Prepared, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sinks: Tensor | None, wants_lse: bool
    ) -> Tensor | None:
        paged, arguments = prepared.paged, prepared.arguments
        if "cache_seqlens" in arguments:
            tokens = paged.rows * paged.max_seqlen_q
            rows = q[:tokens].view(paged.rows, paged.max_seqlen_q, *q.shape[1:])
            found, lse = _module().flash_attn_with_kvcache(rows, k, v, return_softmax_lse=True, **arguments)
            out[:tokens] = found.flatten(0, 1)
            lse = lse.transpose(0, 1).flatten(1)
        else:
            found, lse, *_ = _varlen()(q, k, v, **arguments)
            out.copy_(found)
        return torch.where(lse == torch.inf, -torch.inf, lse) if wants_lse else None


def _module() -> Any:
    return import_module(MODULE)


def _varlen() -> Any:
    return getattr(torch.ops, OPERATOR)._flash_attn_varlen_forward


def _missing() -> list[str]:
    """Arguments that are needed and not there. Raises what importing raises."""
    cache = set(signature(_module().flash_attn_with_kvcache).parameters)
    varlen = {argument.name for argument in _varlen().default._schema.arguments}
    return sorted((OF_CACHE - cache) | (OF_VARLEN - varlen))


@hookimpl
def faback_kernels(device: torch.device) -> list[KernelProvider]:
    return [FlashAttention2()]
