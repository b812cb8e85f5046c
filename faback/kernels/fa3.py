"""FlashAttention 3 (`flash_attn_interface`): Hopper's own instructions, without trees, tails and 8-bit caches.

Two builds are known: the official one, and the distribution tokenspeed-fa3, which adds sinks. What a build has been
compiled without is read off its flags: some of them accept what they cannot do and answer nonsense.

8-bit caches are refused: the kernel multiplies 8-bit keys with 8-bit queries only, and queries of three bits of
mantissa are not what a layer means by its cache's dtype.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
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

HEAD_DIMS = (64, 96, 128, 192, 256)
"""Sizes that kernels are compiled for; others run in the next larger one."""
OPERATOR = "flash_attn_3"
"""Namespace of the operators that both builds register."""


@attrs.frozen
class Build:
    """What an installed build can do.

    Attributes:
        flags: names of what it was compiled without.
        sinks: it takes a logit per head.
    """

    flags: frozenset[str]
    sinks: bool

    @classmethod
    def installed(cls) -> Build:
        """Reads the flags and the operator's arguments. Raises what importing raises."""
        import_module("flash_attn_interface")
        try:
            flags = import_module("flash_attn_config").CONFIG["build_flags"]
        except (ImportError, KeyError, AttributeError):
            flags = {}
        arguments = {argument.name for argument in getattr(torch.ops, OPERATOR).fwd.default._schema.arguments}
        off = {name.replace("FLASH_ATTENTION_", "FLASHATTENTION_") for name, value in flags.items() if value}
        return cls(frozenset(off), "sinks" in arguments)

    def lacks(self, part: str) -> bool:
        """Whether it was compiled without a part."""
        return f"FLASHATTENTION_DISABLE_{part}" in self.flags


class FlashAttention3(PagedKernel):
    """`torch.ops.flash_attn_3.fwd` over page tables or the keys of the batch."""

    name = "fa3"
    priority = 80

    def __init__(self) -> None:
        self._build: Build | None = None
        self._metadata_sizes: dict[Any, int] = {}

    def probe(self, device: torch.device) -> str | None:
        if find_spec("flash_attn_interface") is None:
            return "the module flash_attn_interface (FlashAttention 3) is not installed"
        if arch_of(device) // 10 != 9:
            return f"needs a Hopper GPU (sm_90), the pools are on {device} (sm_{arch_of(device)})"
        try:
            self._build = Build.installed()
        except Exception as error:  # noqa: BLE001  whatever the package raises is the reason
            return f"flash_attn_interface cannot be used: {type(error).__name__}: {error}"
        return None

    def capabilities(self, device: torch.device) -> Capabilities:
        build = self._build
        assert build is not None
        parts = {
            "window": "LOCAL", "window_right": "LOCAL", "softcap": "SOFTCAP", "raw_kv": "VARLEN",
            "dense_table": "PAGEDKV", "block_table": "PAGEDKV", "slot_map": "PAGEDKV",
        }  # fmt: skip
        features = {feature for feature, part in parts.items() if not build.lacks(part)}
        features |= {"non_causal", "lse", "graph"} | ({"sinks"} if build.sinks else set())
        dtypes = HALF - ({torch.float16} if build.lacks("FP16") else set())
        return Capabilities(
            min_arch=90,
            max_arch=90,
            q_dtypes=dtypes,
            kv_dtypes=dtypes,
            mixed_dtypes=False,
            max_head_dim=256,
            head_dim_multiple=8,
            features=frozenset(features),
        )

    def reject(self, request: KernelRequest, device: torch.device) -> tuple[Rejection, ...]:
        found, build = list(super().reject(request, device)), self._build
        assert build is not None
        k, v = request.head_dim, request.v_head_dim
        # Builds without these kernels still accept such dims, and compute with equal ones.
        unequal = 128 < k <= 192 and 96 < v <= 128 and not build.lacks("HDIMDIFF192")
        if k != v and not unequal:
            hint = "the triton kernel takes any dims"
            found.append(Rejection(self.name, "head dim", f"{k}/{v}", "equal dims of k and v in this build", hint))
        if k == v and all(build.lacks(f"HDIM{size}") for size in HEAD_DIMS if size >= k):
            found.append(Rejection(self.name, "head dim", str(k), "smaller ones in this build"))
        if "raw_kv" not in request.features and build.lacks("PAGEDKV"):
            found.append(Rejection(self.name, "cache", "pages", "none in this build"))
        return tuple(found)

    def prepare(self, segment: Segment, layer: LayerKind, request: KernelRequest, ws: Workspace) -> Prepared:
        paged = Paged.of(segment, ws)
        arguments = {
            "cu_seqlens_q": paged.offsets,
            "cu_seqlens_k": paged.offsets_k,
            "seqused_k": paged.lens,
            "max_seqlen_q": paged.max_seqlen_q,
            "max_seqlen_k": None if paged.offsets_k is None else max(1, paged.max_seqlen_k),
            "page_table": paged.table,
            "softmax_scale": layer.scale,
            "is_causal": paged.causal,
            "window_size_left": paged.window[0],
            "window_size_right": paged.window[1],
            "softcap": layer.softcap,
            "num_splits": 0 if paged.table is not None else 1,
        }
        if paged.table is not None and paged.rows > 0:
            arguments["scheduler_metadata"] = self._schedule(paged, layer, request.q_dtype, ws)
        return Prepared(paged, arguments, ws.ops)

    def attend(
        self, prepared: Prepared, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sinks: Tensor | None, wants_lse: bool
    ) -> Tensor:
        own = sinks is not None and sinks.dtype == torch.bfloat16  # others would be rounded
        _, lse, *_ = getattr(torch.ops, OPERATOR).fwd(
            q=q, k=k, v=v, out=out, **prepared.arguments, **({"sinks": sinks} if own else {})
        )
        found: Tensor = lse
        if sinks is not None and not own:
            prepared.add_sinks(out, found, sinks)
        return found

    def _schedule(self, paged: Paged, layer: LayerKind, dtype: torch.dtype, ws: Workspace) -> Tensor:
        """The kernel's own plan from device lengths, once for all layers."""
        sizes: dict[str, Any] = {
            "batch_size": paged.rows,
            "max_seqlen_q": paged.max_seqlen_q,
            "max_seqlen_k": paged.table.shape[1] * paged.page_size if paged.table is not None else 0,
            "num_heads": layer.num_q_heads,
            "num_heads_k": layer.num_kv_heads,
            "headdim": layer.head_dim,
            "headdim_v": layer.v_head_dim,
            "qkv_dtype": dtype,
            "page_size": paged.page_size,
            "is_causal": paged.causal,
            "window_size_left": paged.window[0],
            "window_size_right": paged.window[1],
            "has_softcap": layer.softcap > 0,
        }
        key = tuple(sizes.values())
        if key not in self._metadata_sizes:
            probe = getattr(torch.ops, OPERATOR).get_scheduler_metadata(
                **sizes, seqused_k=paged.lens, cu_seqlens_q=paged.offsets
            )
            self._metadata_sizes[key] = probe.shape[0]
        size = self._metadata_sizes[key]
        return ws.fill("scheduler_metadata", (size,), _scheduled, paged.lens, paged.offsets, **sizes)


def _scheduled(out: Tensor, lens: Tensor, offsets: Tensor, **sizes: Any) -> None:
    """out = FlashAttention's scheduler metadata for these lengths."""
    out.copy_(getattr(torch.ops, OPERATOR).get_scheduler_metadata(**sizes, seqused_k=lens, cu_seqlens_q=offsets))


@hookimpl
def faback_kernels(device: torch.device) -> list[KernelProvider]:
    return [FlashAttention3()]
