"""Choosing kernels: the route from a request to the kernels that serve it, with every reason along the way."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from faback.core.config import BackendConfig
from faback.core.contracts import Lowering
from faback.core.errors import ConfigError, NoKernelError
from faback.core.kernel import KernelProvider, KernelRequest, Rejection
from faback.core.registry import Registry

MAX_LOWERINGS = 6


@attrs.frozen(eq=False)
class Route:
    """How a request is served: by a kernel, or by a lowering and the routes of its parts.

    Attributes:
        request: what is asked at this point.
        kernel: the provider, in a leaf.
        lowering: the rewriting, otherwise.
        parts: routes of the lowering's parts.
    """

    request: KernelRequest
    kernel: KernelProvider | None = None
    lowering: Lowering | None = None
    parts: tuple[Route, ...] = ()

    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels in the leaves, in order."""
        if self.kernel is not None:
            return (self.kernel.name,)
        return tuple(name for part in self.parts for name in part.kernels())

    def __str__(self) -> str:
        if self.kernel is not None:
            return self.kernel.name
        assert self.lowering is not None
        return f"{self.lowering.key}({', '.join(str(part) for part in self.parts)})"


class Selector:
    """Finds routes and remembers them; a route depends on the request alone.

    Args:
        config: names the kernels that are pinned.
        registry: the providers, lowerings and the rank hook.
        device: where everything runs.
    """

    def __init__(self, config: BackendConfig, registry: Registry, device: torch.device) -> None:
        self._config = config
        self._registry = registry
        self._device = device
        self._lowerings = [c.value for c in registry.lowerings(config)]
        self._absent: dict[str, str] = {}
        self.kernels: list[KernelProvider] = []
        for contribution in registry.kernels(device):
            reason = contribution.guard(contribution.value.probe, device)
            if reason is None:
                self.kernels.append(contribution.value)
            else:
                self._absent[contribution.value.name] = reason
        self._routes: dict[KernelRequest, Route] = {}

    @property
    def absent(self) -> dict[str, str]:
        """Kernels that cannot run here, and why."""
        return dict(self._absent)

    def route(self, request: KernelRequest) -> Route:
        """The route for a request.

        Raises:
            NoKernelError: with every kernel and every reason.
            ConfigError: a pinned kernel does not exist.
        """
        if request not in self._routes:
            candidates = self._candidates(request)
            found = self._solve(request, candidates, MAX_LOWERINGS)
            if found is None:
                raise self._failure(request, candidates)
            self._routes[request] = found
        return self._routes[request]

    def rejections(self, request: KernelRequest) -> tuple[Rejection, ...]:
        """Every reason of every kernel that runs here against a request."""
        return tuple(reason for kernel in self.kernels for reason in kernel.reject(request, self._device))

    def _candidates(self, request: KernelRequest) -> list[KernelProvider]:
        name = self._config.kernel_for(request.forward_mode)
        if name == "auto":
            return self._registry.rank(request, self.kernels)
        pinned = [kernel for kernel in self.kernels if kernel.name == name]
        if not pinned:
            known = ", ".join(
                [k.name for k in self.kernels] + [f"{n} (not here: {r})" for n, r in self._absent.items()]
            )
            raise ConfigError(f"config.kernels for {request.forward_mode!r}", wanted=f"one of: {known}", got=name)
        return pinned

    def _solve(self, request: KernelRequest, candidates: Sequence[KernelProvider], depth: int) -> Route | None:
        """A kernel that does it as it is; else the best kernel's missing features lowered away, one by one."""
        missing: list[frozenset[str]] = []
        for kernel in candidates:
            rejections = kernel.reject(request, self._device)
            if not rejections:
                return Route(request, kernel=kernel)
            missing.append(request.features - kernel.capabilities(self._device).features)
        if depth == 0:
            return None
        for lacking in missing:
            for lowering in self._lowerings:
                if not lowering.removes & lacking:
                    continue
                asked = lowering.becomes(request)
                parts = [self._solve(part, candidates, depth - 1) for part in asked]
                solved = tuple(part for part in parts if part is not None)
                if asked and len(solved) == len(asked):
                    return Route(request, lowering=lowering, parts=solved)
        return None

    def _failure(self, request: KernelRequest, candidates: Sequence[KernelProvider]) -> NoKernelError:
        reasons = [str(reason) for kernel in candidates for reason in kernel.reject(request, self._device)]
        pinned = self._config.kernel_for(request.forward_mode) != "auto"
        if not pinned:
            reasons += [f"{name}: not available here: {reason}" for name, reason in self._absent.items()]
        hint = "config.kernels pins this kernel; 'auto' would consider the others." if pinned else None
        return NoKernelError(str(request), reasons, hint=hint)
