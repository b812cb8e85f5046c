"""The hooks of a faback plugin.

A plugin is any object, often a module, with functions of these names marked `@faback.hookimpl`, announced by an entry
point of group `faback`. Hooks are called when a backend is built, never while it runs (`faback_planned` excepted). A
hook may take fewer arguments than are listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pluggy
import torch

if TYPE_CHECKING:
    from faback.core.config import BackendConfig
    from faback.core.contracts import Lowering, Mode, Overlay
    from faback.core.kernel import KernelProvider, KernelRequest
    from faback.core.workspace import DeviceOps

CONTRACT = 1
"""Version of the contract between core and plugins. A plugin built for another says so by `faback_contract = ...`."""
PROJECT = "faback"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function of a plugin, named like a hook, as its implementation."""


class HookSpecs:
    """The specifications; each docstring is the contract."""

    @hookspec
    def faback_modes(self, config: BackendConfig) -> Iterable[Mode]:  # type: ignore[empty-body]
        """Forward modes that this plugin adds.

        Two modes with one key are an error, unless one says `replaces`.
        """

    @hookspec
    def faback_overlays(self, config: BackendConfig) -> Iterable[Overlay]:  # type: ignore[empty-body]
        """Variations of layers. Their order follows `after`, then `priority`, then `key`."""

    @hookspec
    def faback_kernels(self, device: torch.device, config: BackendConfig) -> Iterable[KernelProvider]:  # type: ignore[empty-body]
        """Kernel providers, whether or not they can run here: `probe` finds out."""

    @hookspec
    def faback_lowerings(self, config: BackendConfig) -> Iterable[Lowering]:  # type: ignore[empty-body]
        """Rewritings of segments that some kernel cannot do."""

    @hookspec(firstresult=True)
    def faback_device_ops(self, device: torch.device) -> DeviceOps | None:
        """Metadata fills, KV writes and merges for this device, None to leave it to others."""

    @hookspec(firstresult=True)
    def faback_rank(
        self, request: KernelRequest, candidates: Sequence[KernelProvider], config: BackendConfig
    ) -> Sequence[KernelProvider] | None:
        """A reordered, possibly shorter list of candidates, best first; None to leave it to others. Never adds."""

    @hookspec
    def faback_planned(self, plan: Any) -> None:
        """Called after each plan, for metrics and tracing. Must not change it."""
