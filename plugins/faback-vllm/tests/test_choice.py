"""What vLLM's selector is told about the backend."""

import pytest
import torch
import vllm_here
from vllm.v1.attention.backend import AttentionType

from faback_vllm.backend import FabackAttentionBackend as Backend

QUESTION = {
    "head_size": 128,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "block_size": 16,
    "use_mla": False,
    "has_sink": False,
    "use_sparse": False,
    "use_mm_prefix": False,
    "device_capability": None,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head_size": 80, "block_size": 17, "dtype": torch.float32},
        {"has_sink": True, "kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "fp8_e5m2", "block_size": None, "head_size": 576},
    ],
)
def test_served(changes):
    assert Backend.supports_combination(**QUESTION | changes) is None


def test_reasons_are_those_of_the_kernels(monkeypatch):
    """Everything that faback says against a layer reaches vLLM's log."""
    monkeypatch.setattr("faback_vllm.backend.BUILTINS", ())  # neither kernels nor lowerings
    reason = Backend.supports_combination(**QUESTION)
    assert reason is not None and "vllm (block_table, dense_table; 1/1 heads, dims 128/128" in reason


@pytest.mark.skipif(not vllm_here.REAL, reason="vLLM is not installed here: `validate_configuration` is its own")
@pytest.mark.parametrize("attn_type", [one.value for one in AttentionType])
def test_vllm_accepts_what_is_supported_and_nothing_else(attn_type):
    question = {**QUESTION, "use_per_head_quant_scales": True, "attn_type": attn_type, "has_sliding_window": True}
    question |= {"use_non_causal": True, "use_batch_invariant": True, "has_sink": True, "kv_cache_dtype": "fp8"}
    assert Backend.validate_configuration(**question) == []
    for refused, words in [
        ({"use_mla": True}, "MLA not supported"),
        ({"use_sparse": True}, "sparse not supported"),
        ({"use_mm_prefix": True}, "partial multimodal token full attention not supported"),
        ({"use_rswa": True}, "R-SWA not supported"),
        ({"use_dcp": True}, "DCP not supported"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype not supported"),
    ]:
        assert words in Backend.validate_configuration(**question | refused)
