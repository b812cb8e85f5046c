"""Backends that run everything on Triton: attention, KV writes and merges."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import torch

from faback import AttentionBackend, AttentionLayer, BackendConfig, Pools, hookimpl
from faback.builtins import BUILTINS
from faback.core.registry import Registry
from faback.kernels.torch_ops import TorchOps
from faback.kernels.triton.ops import TritonOps


class Operations:
    """A plugin that brings the operations of a device."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops

    @hookimpl
    def faback_device_ops(self) -> Any:
        return self._ops


def on_triton(
    config: BackendConfig, pools: Pools, layers: Iterable[AttentionLayer], **changes: Any
) -> AttentionBackend:
    """A backend whose kernel is "triton"; `changes` are to the configuration.

    Where the interpreter's casts are wrong (to bfloat16 and to 8-bit floats), KV writes stay in torch.
    """
    config = attrs.evolve(config, kernels="triton", **changes)
    exact = {torch.float16, torch.float32}
    layers = list(layers)
    stored = {pools.kv.dtype(layer.kind) for layer in layers if layer.cached} | {config.dtype}
    registry = Registry.load(config, BUILTINS, entry_points=[])
    registry.register(Operations(TritonOps() if stored <= exact else TorchOps()), "operations")
    return AttentionBackend(config, pools, layers, registry=registry)
