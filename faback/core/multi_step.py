"""All steps of a draft from one build."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import torch

from faback.core.backend import AttentionBackend
from faback.core.batch import ForwardBatch
from faback.core.config import BackendConfig
from faback.core.errors import BatchError, ConfigError
from faback.core.layer import AttentionLayer
from faback.core.plan import Plan
from faback.core.pools import Pools
from faback.core.registry import Registry
from faback.core.workspace import Workspace

Tensor = torch.Tensor


class MultiStepDraft:
    """The draft model's attention over all steps of a round.

    The last of `speculative.num_steps` drafted tokens is not attended from, so a round has one step less. All steps
    share one workspace, in which each fill covers every step: planning them launches what planning one does.

    Args:
        config: with `speculative`.
        pools: the draft model's pools.
        layers: the draft model's layers.
        num_steps: steps to plan; `speculative.num_steps - 1` unless given.
        forward_mode: the mode whose `draft_step` counts the steps.
        registry: plugins, as for `AttentionBackend`.

    Raises:
        ConfigError: no speculation configured, or more steps than it has.
    """

    def __init__(
        self,
        config: BackendConfig,
        pools: Pools,
        layers: Iterable[AttentionLayer],
        num_steps: int | None = None,
        *,
        forward_mode: str = "draft_decode",
        registry: Registry | None = None,
    ) -> None:
        if config.speculative is None:
            raise ConfigError("config.speculative", wanted="a SpeculativeConfig", got=None)
        self.num_steps = config.speculative.num_steps - 1 if num_steps is None else num_steps
        if not 0 <= self.num_steps <= config.speculative.num_steps:
            raise ConfigError("num_steps", wanted=f"0 to {config.speculative.num_steps}", got=self.num_steps)
        self.backend = AttentionBackend(config, pools, layers, registry=registry)
        self._forward_mode = forward_mode
        self._plans: tuple[Plan, ...] = ()
        self._graphs = self.backend.graphs(self._build)

    def plan(self, batch: ForwardBatch) -> tuple[Plan, ...]:
        """Plans every step of one batch.

        Args:
            batch: committed `seq_lens`, `out_cache_loc` [bs * topk * steps]; its mode and step are ignored, its tensors
                are not changed.

        Returns:
            One plan per step.
        """
        self._plans = ()
        self._plans = self._build(batch, self.backend.workspace())
        return self._plans

    def reserve(self, batches: Iterable[ForwardBatch], bounds: Mapping[str, int] | None = None) -> int:
        """`AttentionBackend.reserve` for all steps of the largest rounds; returns bytes."""
        return self._graphs.reserve(batches, bounds or {})

    def capture(self, batch: ForwardBatch, bounds: Mapping[str, int] | None = None) -> tuple[Plan, ...]:
        """`AttentionBackend.capture` for all steps of a round; `forward` then uses its plans."""
        self._plans = ()
        self._plans = self._graphs.capture(batch, bounds or {})
        return self._plans

    def replay(self, batch: ForwardBatch) -> tuple[Plan, ...]:
        """`AttentionBackend.replay` for all steps of a round; each fill serves every step and is issued once."""
        self._plans = ()
        self._plans = self._graphs.replay(batch)
        return self._plans

    def _build(self, batch: ForwardBatch, ws: Workspace) -> tuple[Plan, ...]:
        steps = (attrs.evolve(batch, forward_mode=self._forward_mode, draft_step=s) for s in range(self.num_steps))
        return tuple(self.backend.build(step, ws) for step in steps)

    def forward(
        self, step: int, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, **options: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`AttentionBackend.forward` in one of the planned steps.

        Args:
            step: index of the step, from 0.
            q, k, v, layer, options: as there.

        Raises:
            BatchError: the step was not planned.
        """
        if not 0 <= step < len(self._plans):
            raise BatchError("draft step", wanted=f"one of {len(self._plans)} planned steps", got=step)
        return self.backend.forward(q, k, v, layer, plan=self._plans[step], **options)
