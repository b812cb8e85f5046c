"""What stands in for a CUDA graph where there is no GPU: kernels that look at the device only when they run.

A captured plan's host integers are bounds that stay, and its tensors change their contents between two runs. A kernel
that reads lengths when it prepares would see those of the capture. `Late` prepares when it runs, as a GPU kernel reads
its lengths when it runs, and so shows whether everything else of a plan is up to date. `Replayed` is a backend that
captures once and replays ever after.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import torch

from faback.core.backend import AttentionBackend
from faback.core.batch import ForwardBatch
from faback.core.config import BackendConfig
from faback.core.graphs import signature, tensors_of
from faback.core.kernel import Capabilities, KernelProvider, KernelRequest
from faback.core.layer import AttentionLayer, LayerKind
from faback.core.plan import Plan
from faback.core.pools import Pools
from faback.core.registry import Registry
from faback.core.segment import Segment
from faback.core.workspace import Workspace
from faback.testing.host_reads import HostReads

Tensor = torch.Tensor


class Late(KernelProvider):
    """Another kernel whose `prepare` waits until it runs; it must not ask the workspace for anything.

    Args:
        kernel: the other one; `late` and its name is this one's.
    """

    priority = -200

    def __init__(self, kernel: KernelProvider) -> None:
        self.name = f"late {kernel.name}"
        self._kernel = kernel

    def probe(self, device: torch.device) -> str | None:
        return self._kernel.probe(device)

    def capabilities(self, device: torch.device) -> Capabilities:
        able = self._kernel.capabilities(device)
        return attrs.evolve(able, features=able.features | {"graph"})

    def prepare(self, segment: Segment, layer: LayerKind, request: KernelRequest, ws: Workspace) -> Any:
        return segment, layer, request, ws

    def run(self, prepared: Any, *args: Tensor, **options: Any) -> None:
        self._kernel.run(self._kernel.prepare(*prepared), *args, **options)


class Replayed:
    """A backend for `run_scenario` that never plans: each size of batch is captured when it first comes, on zeros.

    Args:
        config, pools, layers, registry: as for `AttentionBackend`; the kernel must be able to be captured.
    """

    def __init__(
        self, config: BackendConfig, pools: Pools, layers: Iterable[AttentionLayer], registry: Registry
    ) -> None:
        self.backend = AttentionBackend(config, pools, layers, registry=registry)
        self.replays = 0
        self._seen: set[Any] = set()

    def plan(self, batch: ForwardBatch) -> Plan:
        """Captures a batch of this size if there is none yet, then replays the batch itself."""
        if signature(batch) not in self._seen:
            empty = blank(batch, self.backend.config)
            with HostReads(tensors_of(empty).values()):
                self.backend.capture(empty)
            self._seen.add(signature(batch))
        self.replays += 1
        return self.backend.replay(batch)

    def forward(self, *args: Any, **options: Any) -> Any:
        """`AttentionBackend.forward`."""
        return self.backend.forward(*args, **options)


def blank(batch: ForwardBatch, config: BackendConfig) -> ForwardBatch:
    """A batch of the same sizes in which every request is padding and every length 0."""
    tensors: dict[str, Any] = {name: torch.zeros_like(tensor) for name, tensor in tensors_of(batch).items()}
    if batch.custom_mask is not None:
        assert config.speculative is not None
        drafts = config.speculative.num_draft_tokens
        room = batch.bs * drafts * (config.context_len + drafts)
        tensors["custom_mask"] = torch.zeros(room, dtype=torch.bool, device=batch.custom_mask.device)
    extras = {name: tensors.pop(name, value) for name, value in batch.extras.items()}
    return attrs.evolve(batch, extras=extras, **tensors)
