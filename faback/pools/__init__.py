"""Pools: request rows, slot allocators and KV storage. An engine may bring its own (`faback.core.pools.KVPool`)."""

from faback.pools.allocator import Branches, PageAllocator, SlotAllocator, TokenAllocator
from faback.pools.hybrid import HybridPool
from faback.pools.hybrid_allocator import HybridAllocator
from faback.pools.mha import MHAPool
from faback.pools.mla import MLAPool
from faback.pools.requests import ReqToTokenPool

__all__ = [
    "Branches",
    "HybridAllocator",
    "HybridPool",
    "MHAPool",
    "MLAPool",
    "PageAllocator",
    "ReqToTokenPool",
    "SlotAllocator",
    "TokenAllocator",
]
