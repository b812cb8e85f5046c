"""faback's errors in SGLang's terms: the field that the engine knows, not the one that it was handed on as."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from faback import BatchError, CapacityError, ConfigError, FabackError, PoolError

FIELDS = {
    "batch.custom_mask": "forward_batch.spec_info.custom_mask",
    "batch.verify_lens": "forward_batch.spec_info.ragged_verify_layout.verify_lens",
    "batch.extras['chunk_lens']": "forward_batch.prefix_chunk_seq_lens",
    "batch.extras['chunk_starts']": "forward_batch.prefix_chunk_starts",
    "config.speculative": "server_args.speculative_num_draft_tokens",
    "layer.window": "layer.sliding_window_size",
    "layer.softcap": "layer.logit_cap",
    "layer.scale": "layer.scaling",
    "layer.num_q_heads": "layer.tp_q_head_num",
    "layer.num_kv_heads": "layer.tp_k_head_num",
    "layer.head_dim": "layer.qk_head_dim",
    "pools.req_to_token": "model_runner.req_to_token_pool.req_to_token",
    "pools.kv": "model_runner.token_to_kv_pool",
    "BackendConfig.dtype": "model_runner.dtype",
    "BackendConfig.kernels": "FABACK_SGLANG_KERNELS",
    "config.kernels": "FABACK_SGLANG_KERNELS",
}
TRANSLATED = (BatchError, CapacityError, ConfigError, PoolError)


@contextmanager
def engine_terms() -> Iterator[None]:
    """A block whose errors of faback name SGLang's fields."""
    try:
        yield
    except FabackError as error:
        what = engine_name(error.what)
        if what == error.what or type(error) not in TRANSLATED:
            raise
        raise type(error)(what, wanted=error.wanted, got=error.got, hint=error.hint) from error


def engine_name(what: str) -> str:
    """The engine's name of what an error is about; the same where it has none."""
    for ours, theirs in FIELDS.items():
        if what == ours or what.startswith((f"{ours} ", f"{ours}_cpu")):
            return theirs + what[len(ours) :]
    if "KV buffers of layer" in what:
        return what.replace("KV buffers", "model_runner.token_to_kv_pool.get_kv_buffer")
    return re.sub(r"^batch\.", "forward_batch.", what)
