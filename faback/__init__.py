"""faback: a modular paged flash-attention backend for LLM inference engines."""

from faback.core.backend import AttentionBackend
from faback.core.batch import ForwardBatch
from faback.core.config import BackendConfig, SpeculativeConfig
from faback.core.errors import (
    BatchError,
    CapacityError,
    ConfigError,
    FabackError,
    NoKernelError,
    PluginError,
    PoolError,
)
from faback.core.hooks import hookimpl
from faback.core.layer import AttentionLayer, LayerKind
from faback.core.multi_step import MultiStepDraft
from faback.core.pools import KVPool, Pools
from faback.graph_runner import GraphRunner

__version__ = "0.1.0"

__all__ = [
    "AttentionBackend",
    "AttentionLayer",
    "BackendConfig",
    "BatchError",
    "CapacityError",
    "ConfigError",
    "FabackError",
    "ForwardBatch",
    "GraphRunner",
    "KVPool",
    "LayerKind",
    "MultiStepDraft",
    "NoKernelError",
    "PluginError",
    "PoolError",
    "Pools",
    "SpeculativeConfig",
    "hookimpl",
]
