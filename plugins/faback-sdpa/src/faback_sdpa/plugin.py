"""What faback finds by the entry point: a kernel, and no settings."""

from __future__ import annotations

import torch

from faback import hookimpl
from faback.core.config import BackendConfig
from faback.core.contracts import Overlay
from faback.core.errors import ConfigError
from faback.core.kernel import KernelProvider
from faback_sdpa.kernel import NAME, Sdpa


@hookimpl
def faback_kernels(device: torch.device) -> list[KernelProvider]:
    return [Sdpa()]


@hookimpl
def faback_overlays(config: BackendConfig) -> list[Overlay]:
    """None. The hook is here for its configuration: settings that nobody reads are refused."""
    if NAME in config.options:
        hint = f"Say kernels={NAME!r} to choose the kernel; `faback_sdpa.Ranking` has settings."
        raise ConfigError(f"config.options[{NAME!r}]", wanted=None, got=config.options[NAME], hint=hint)
    return []
