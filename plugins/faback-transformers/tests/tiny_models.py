"""Small random models with the variations of attention that there are, and prompts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import (
    AutoModel,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertModel,
    PreTrainedModel,
    T5Config,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

SIZES = {"vocab_size": 97, "intermediate_size": 64, "num_hidden_layers": 3, "initializer_range": 0.3}
HYBRID = {
    **SIZES,
    "hidden_size": 48,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "tie_word_embeddings": False,  # else a random model repeats its last token
}


def llama(heads: int = 6, kv_heads: int = 2) -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(**SIZES, hidden_size=8 * heads, num_attention_heads=heads, num_key_value_heads=kv_heads)
    )


def repetitive(vocab_size: int = 97) -> PreTrainedModel:
    """Soon repeats itself: what comes out is close to what went in."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        sizes = {**SIZES, "vocab_size": vocab_size, "initializer_range": 0.02, "tie_word_embeddings": True}
        config = LlamaConfig(**sizes, hidden_size=48, num_attention_heads=6, num_key_value_heads=2)
        return LlamaForCausalLM(config).eval()


def gemma3() -> PreTrainedModel:
    return Gemma3ForCausalLM(Gemma3TextConfig(**{**HYBRID, "num_key_value_heads": 1}, query_pre_attn_scalar=24))


def gemma2() -> PreTrainedModel:
    return Gemma2ForCausalLM(Gemma2Config(**HYBRID, attn_logit_softcapping=2.0))


def gpt_oss() -> PreTrainedModel:
    model = GptOssForCausalLM(GptOssConfig(**HYBRID, num_local_experts=2, num_experts_per_tok=1))
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def llama4() -> PreTrainedModel:
    """Chunked layers, and full ones without rotary embeddings."""
    return Llama4ForCausalLM(
        Llama4TextConfig(
            **{**SIZES, "num_hidden_layers": 4},
            hidden_size=48,
            head_dim=8,
            num_attention_heads=6,
            num_key_value_heads=2,
            intermediate_size_mlp=64,
            num_local_experts=2,
            num_experts_per_tok=1,
            attention_chunk_size=8,
            pad_token_id=0,
        )
    )


def bert() -> PreTrainedModel:
    return BertModel(BertConfig(**SIZES, hidden_size=48, num_attention_heads=4))


def modern_bert() -> PreTrainedModel:
    """An encoder with windows to both sides."""
    sizes = {**SIZES, "num_hidden_layers": 4, "pad_token_id": 0}
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1)
    return ModernBertModel(
        ModernBertConfig(**sizes, **special, hidden_size=48, num_attention_heads=4, local_attention=8)
    )


def whisper() -> PreTrainedModel:
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "decoder_start_token_id"), 1)
    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=97,
            d_model=48,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            num_mel_bins=8,
            max_source_positions=20,
            max_target_positions=40,
            init_std=0.3,
            pad_token_id=0,
            suppress_tokens=None,
            begin_suppress_tokens=None,
            **special,
        )
    )


def bart() -> PreTrainedModel:
    sizes = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 2), ("ffn_dim", 64))}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "decoder_start_token_id", "forced_eos_token_id"), 1)
    return BartForConditionalGeneration(
        BartConfig(vocab_size=97, d_model=48, init_std=0.3, pad_token_id=0, **sizes, **heads, **special)
    )


def t5(attn_implementation: str) -> PreTrainedModel:
    """Adds a bias by distance to its scores."""
    sizes = {"vocab_size": 97, "d_model": 48, "d_kv": 12, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return AutoModel.from_config(T5Config(**sizes), attn_implementation=attn_implementation)


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "five_to_one": lambda: llama(10, 2),
    "seven_to_one": lambda: llama(7, 1),
    "gemma3": gemma3,
    "gemma2": gemma2,
    "gpt_oss": gpt_oss,
}

DENSE: dict[str, Callable[[], PreTrainedModel]] = {
    **MODELS,
    "llama4": llama4,
    "bert": bert,
    "modern_bert": modern_bert,
    "whisper": whisper,
    "bart": bart,
}
"""Those that are called without a generator, too."""

PROMPTS: tuple[tuple[int, ...], ...] = (
    (1, 2, 3),
    tuple(5 + 7 * i % 80 for i in range(40)),
    (3,),
    tuple(11 + 5 * i % 60 for i in range(17)),
    tuple(2 + i for i in range(16)),
)
