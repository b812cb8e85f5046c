"""What is fixed for the life of a backend, read off SGLang's model runner once."""

from __future__ import annotations

import os
from typing import Any

import attrs
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.runtime_context import get_exec, get_memory, get_model, get_parallel, get_schedule, get_spec

from faback import AttentionLayer, BackendConfig, BatchError, ConfigError, Pools, SpeculativeConfig
from faback_sglang.layers import Layers, describe
from faback_sglang.pools import engine_pools


@attrs.frozen(eq=False)
class Setup:
    """Configuration, layers and pools in faback's terms.

    Attributes:
        config: faback's.
        layers: those with a place in the pool.
        pools: SGLang's, in place.
        keeps_no_cache: SGLang embeds only: keys of a pass are not read again, and need not be written.
    """

    config: BackendConfig
    layers: Layers
    pools: Pools
    keeps_no_cache: bool

    @classmethod
    def of(cls, model_runner: Any, *, topk: int | None = None, num_steps: int | None = None) -> Setup:
        """Reads a model runner.

        Args:
            model_runner: SGLang's, its model loaded and its pools made.
            topk, num_steps: of speculation, where they are not the configuration's.

        Raises:
            ConfigError: what faback cannot honour, by SGLang's name.
        """
        refuse_shared_sequences()
        layers = describe(model_runner)
        config = BackendConfig(
            context_len=model_runner.req_to_token_pool.req_to_token.shape[1],
            dtype=model_runner.dtype,
            kernels=os.environ.get("FABACK_SGLANG_KERNELS", "auto"),
            deterministic=get_exec().deterministic.enable_deterministic_inference,
            speculative=speculative(topk, num_steps),
            options=prefill_aware(model_runner),
        )
        keeps_no_cache = (
            get_model().is_embedding
            and get_schedule().chunked_prefill_size == -1
            and get_memory().disable_radix_cache
            and not model_runner.use_mla_backend
        )
        return cls(config, layers, engine_pools(model_runner, layers.slots_of), keeps_no_cache)

    def layer(self, module: RadixAttention) -> AttentionLayer:
        """Our description of one of the engine's layers."""
        return known(self.layers, module)


def known(layers: Layers, module: RadixAttention) -> AttentionLayer:
    found = layers.ours.get(module)
    if found is None:
        hint = "Layers are looked for in model_runner.model when the backend is made."
        raise BatchError("layer", wanted="an attention layer of the runner's model", got=module.layer_id, hint=hint)
    return found


def speculative(topk: int | None, num_steps: int | None) -> SpeculativeConfig | None:
    """Sizes of speculation, None where the server does not speculate."""
    spec = get_spec()
    drafts = spec.speculative_num_draft_tokens
    if spec.speculative_algorithm is None or not drafts:
        return None
    return SpeculativeConfig(
        topk=topk or spec.speculative_eagle_topk or 1,
        num_steps=num_steps or spec.speculative_num_steps or 1,
        num_draft_tokens=drafts,
    )


def prefill_aware(model_runner: Any) -> dict[str, dict[str, Any]]:
    """The options of the prefill-aware window, where the model has one."""
    if not getattr(model_runner, "prefill_aware_swa", False):
        return {}
    if get_schedule().enable_mixed_chunk:
        hint = "A row with one token can be a prompt's last or a text's next one, and the batch does not say which."
        what = "server_args.enable_mixed_chunk"
        raise ConfigError(what, wanted="False with a prefill-aware window", got=True, hint=hint)
    return {"prefill_aware_swa": {"inclusive": False}}


def refuse_shared_sequences() -> None:
    """Raises where ranks share sequences by SGLang's own context parallelism, which goes through other batches."""
    parallel = get_parallel()
    for name in ("attn_cp_size", "attn_dcp_size"):
        size = getattr(parallel, name)
        if size > 1:
            raise ConfigError(f"server_args.{name}", wanted="1", got=size)
