"""SGLang's pools behind faback's pool protocol: in place, nothing is copied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from faback import AttentionLayer, ConfigError, LayerKind, Pools

Tensor = torch.Tensor

STORED = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)


@attrs.frozen(eq=False)
class EnginePool:
    """A `faback.KVPool` over SGLang's `token_to_kv_pool`: `MHATokenToKVPool`, `MLATokenToKVPool`, the hybrid
    `SWAKVPool`, or another with `get_kv_buffer` and token slots along the first axis.

    Attributes:
        pool: SGLang's.
        page_size: tokens per page.
        slots_of: the pool's layer id of each of our layers.
        num_slots: slots of the full group, the padding page included.
    """

    pool: Any
    page_size: int
    slots_of: Mapping[int, int]
    num_slots: int

    def buffers(self, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
        """Waits, like SGLang's own backends, for a layer that is still being loaded from the host."""
        k, v = self.pool.get_kv_buffer(self.slots_of[layer.layer_id])
        return k, k[..., : layer.v_head_dim] if layer.latent else v

    def dtype(self, kind: LayerKind) -> torch.dtype:
        return self.pool.dtype

    def slot_map(self, group: str) -> Tensor | None:
        if group == "full":
            return None
        found = getattr(self.pool, "full_to_swa_index_mapping", None)
        if group != "window" or found is None:
            what = "model_runner.token_to_kv_pool.full_to_swa_index_mapping"
            raise ConfigError(what, wanted=f"the slots of group {group!r}", got=None)
        return found


def engine_pools(model_runner: Any, slots_of: Mapping[int, int]) -> Pools:
    """The runner's pools.

    Raises:
        ConfigError: a layout in which slots do not lie along the first axis, or slots that have to be translated.
    """
    pool = model_runner.token_to_kv_pool
    translator = model_runner.kv_index_translator
    if model_runner.kv_cache_dtype_str == "mxfp8":
        wanted = "a dtype without scales in the pool"
        raise ConfigError("server_args.kv_cache_dtype", wanted=wanted, got="mxfp8")
    if translator is not None and translator.is_translating:
        hint = "Start without --enable-unified-memory."
        got = "virtual slots"
        raise ConfigError("model_runner.kv_index_translator", wanted="slots of the pool itself", got=got, hint=hint)
    parts = [pool, getattr(pool, "full_kv_pool", None), getattr(pool, "swa_kv_pool", None)]
    for part in (part for part in parts if part is not None):
        check_layout(part)
    num_slots = pool.size + pool.page_size
    kv = EnginePool(pool, model_runner.page_size, slots_of, num_slots)
    return Pools(req_to_token=model_runner.req_to_token_pool.req_to_token, kv=kv)


def check_layout(pool: Any) -> None:
    layout = getattr(pool, "kv_cache_layout", "nhd")
    if layout != "nhd":
        hint = "Unset SGLANG_USE_HND_KVCACHE and SGLANG_AITER_KV_CACHE_LAYOUT."
        raise ConfigError("model_runner.token_to_kv_pool.kv_cache_layout", wanted="'nhd'", got=layout, hint=hint)
    if pool.dtype not in STORED or getattr(pool, "is_quantized_kv_cache", False):
        wanted = f"one of {', '.join(map(str, STORED))}, without scales in the pool"
        got = f"{pool.dtype} in a {type(pool).__name__}"
        raise ConfigError("server_args.kv_cache_dtype", wanted=wanted, got=got)
