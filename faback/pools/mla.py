"""The cache of absorbed multi-head latent attention: one latent and one rotary part per token, one head."""

from __future__ import annotations

from typing import ClassVar

import attrs

from faback.core.errors import ConfigError
from faback.pools.one_group import OneGroupPool


@attrs.define(eq=False, kw_only=True)
class MLAPool(OneGroupPool):
    """A `KVPool` with one buffer [slots, 1, latent + rope] per layer; values are its leading latent part.

    A layer says its sizes by `num_kv_heads=1`, `head_dim=latent + rope`, `v_head_dim=latent`. Attributes and errors are
    those of `OneGroupPool`.
    """

    fused: ClassVar[bool] = True

    def __attrs_post_init__(self) -> None:
        for layer in self.layers:
            if layer.num_kv_heads != 1 or layer.v_head_dim >= layer.head_dim:
                got = f"num_kv_heads={layer.num_kv_heads}, head_dim={layer.head_dim}, v_head_dim={layer.v_head_dim}"
                wanted = "num_kv_heads=1, head_dim=latent + rope, v_head_dim=latent"
                raise ConfigError(f"MLAPool layer {layer.layer_id}", wanted=wanted, got=got)
        super().__attrs_post_init__()
