"""Choosing kernels: the route from a request to the kernels that serve it, with every reason along the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from faback.core.config import BackendConfig
from faback.core.contracts import Lowering
from faback.core.errors import ConfigError, NoKernelError
from faback.core.kernel import KernelProvider, KernelRequest, Rejection, arch_of
from faback.core.measured import load
from faback.core.registry import Contribution, Registry


@attrs.frozen(eq=False)
class Route:
    """How a request is served: by a kernel, or by a lowering and the routes of its parts.

    Attributes:
        request: what is asked at this point.
        kernel: the provider, in a leaf.
        has_lse: it can return its log-sum-exp.
        lowering: the rewriting, otherwise.
        parts: routes of the lowering's parts.
    """

    request: KernelRequest
    kernel: KernelProvider | None = None
    has_lse: bool = False
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
        self._absent: dict[str, str] = {}
        self._owners: dict[int, Contribution[Any]] = {}
        self._lowerings: list[Lowering] = []
        self.kernels: list[KernelProvider] = []
        for lowering in registry.lowerings(config):
            self._owners[id(lowering.value)] = lowering
            self._lowerings.append(lowering.value)
        for kernel in registry.kernels(device, config):
            self._owners[id(kernel.value)] = kernel
            reason = kernel.guard(kernel.value.probe, device)
            if reason is None:
                self.kernels.append(kernel.value)
            else:
                self._absent[kernel.value.name] = reason
        self.measured = load(arch_of(device))
        self._routes: dict[KernelRequest, Route] = {}
        for name in {config.kernels} if isinstance(config.kernels, str) else set(config.kernels.values()):
            self._pinned(name)

    def guard(self, owner: object, call: Callable[..., Any], *args: Any) -> Any:
        """Calls a method of a kernel or lowering; an exception names the plugin that brought it."""
        return self._owners[id(owner)].guard(call, *args)

    def fault(self, owner: object, call: Callable[..., Any], error: Exception) -> Exception:
        """What to raise for an exception of a method of a kernel or lowering: see `Contribution.fault`."""
        return self._owners[id(owner)].fault(call, error)

    @property
    def absent(self) -> dict[str, str]:
        """Kernels that cannot run here, and why."""
        return dict(self._absent)

    def route(self, request: KernelRequest) -> Route:
        """The route for a request.

        Raises:
            NoKernelError: with every kernel and every reason.
        """
        if request not in self._routes:
            candidates = self._candidates(request)
            found = self._solve(request, candidates, {})
            if found is None:
                raise self._failure(request, candidates)
            self._routes[request] = found
        return self._routes[request]

    def evidence(self, request: KernelRequest) -> str:
        """The measured figures that the choice went by, "" where it did not go by any."""
        point = self.measured.nearest(request) if self._chosen(request) == "auto" else None
        return "" if point is None else f"{point} ({self.measured.source})"

    def rejections(self, request: KernelRequest) -> tuple[Rejection, ...]:
        """Every reason of every kernel that runs here against a request."""
        return tuple(reason for kernel in self.kernels for reason in self._reject(kernel, request))

    def _reject(self, kernel: KernelProvider, request: KernelRequest) -> tuple[Rejection, ...]:
        found: tuple[Rejection, ...] = self.guard(kernel, kernel.reject, request, self._device)
        return found

    def _pinned(self, name: str) -> list[KernelProvider]:
        """The kernel of that name; all of them for "auto"."""
        pinned = [kernel for kernel in self.kernels if name in (kernel.name, "auto")]
        if not pinned and name != "auto":
            absent = [f"{n} (not here: {r})" for n, r in self._absent.items()]
            known = ", ".join([kernel.name for kernel in self.kernels] + absent)
            raise ConfigError("kernels", wanted=f"'auto' or one of: {known}", got=name)
        return pinned

    def _chosen(self, request: KernelRequest) -> str:
        """The kernel that the layer or the configuration names, or "auto"."""
        return request.kernel or self._config.kernel_for(request.forward_mode)

    def _candidates(self, request: KernelRequest) -> list[KernelProvider]:
        name = self._chosen(request)
        pinned = self._pinned(name)
        if name != "auto":
            return pinned
        return self._registry.rank(request, self.measured.order(request, pinned), self._config)

    def _solve(
        self, request: KernelRequest, candidates: Sequence[KernelProvider], known: dict[KernelRequest, Route | None]
    ) -> Route | None:
        """A kernel that does it as it is; else the best kernel's missing features lowered away, one by one."""
        if request in known:
            return known[request]
        known[request] = None  # lowerings that lead back here lead nowhere
        missing: list[frozenset[str]] = []
        for kernel in candidates:
            able = self.guard(kernel, kernel.capabilities, self._device).features
            if not self._reject(kernel, request):
                known[request] = Route(request, kernel=kernel, has_lse="lse" in able)
                return known[request]
            missing.append(request.features - able)
        for lacking in missing:
            for lowering in self._lowerings:
                if not lowering.removes & lacking:
                    continue
                asked = self.guard(lowering, lowering.becomes, request)
                parts = [self._solve(part, candidates, known) for part in asked]
                solved = tuple(part for part in parts if part is not None)
                if asked and len(solved) == len(asked):
                    known[request] = Route(request, lowering=lowering, parts=solved)
                    return known[request]
        return None

    def _failure(self, request: KernelRequest, candidates: Sequence[KernelProvider]) -> NoKernelError:
        reasons = [str(reason) for kernel in candidates for reason in self._reject(kernel, request)]
        pinned = self._chosen(request) != "auto"
        if not pinned:
            dropped = [kernel.name for kernel in self.kernels if kernel not in candidates]
            reasons += [f"{name}: dropped by a plugin's faback_rank" for name in dropped]
            reasons += [f"{name}: not available here: {reason}" for name, reason in self._absent.items()]
        hint = "config.kernels pins this kernel; 'auto' would consider the others." if pinned else None
        return NoKernelError(str(request), reasons, hint=hint)
