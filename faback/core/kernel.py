"""The contract of a kernel provider, and the data by which one is chosen."""

from __future__ import annotations

import abc
from typing import Any

import attrs
import torch

from faback.core.layer import LayerKind
from faback.core.segment import FEATURES, Segment
from faback.core.workspace import Workspace

Tensor = torch.Tensor


@attrs.frozen(kw_only=True, cache_hash=True)
class KernelRequest:
    """What one call asks of a kernel, as plain data.

    Attributes:
        forward_mode: key of the mode, for ranking and for pinned kernels.
        device: "cpu", "cuda".
        arch: compute capability as two digits (90 for sm_90), 0 without one.
        q_dtype: dtype of q and of the output.
        kv_dtype: storage dtype of keys and values.
        num_q_heads, num_kv_heads, head_dim, v_head_dim: of the layer.
        page_size: tokens per page of the keys' view.
        features: names from `FEATURES`, or a plugin's own.
        rows, queries, keys: sizes, for ranking alone: sequences, the most queries of one and the most keys that a query
            may reach, each rounded up to a power of two; 0 where they are not known yet.
        kernel: the kernel that the layer asks for by name; None leaves it to the configuration.
    """

    forward_mode: str
    device: str
    arch: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    page_size: int
    features: frozenset[str]
    rows: int = 0
    queries: int = 0
    keys: int = 0
    kernel: str | None = None

    def __str__(self) -> str:
        dims = f"{self.num_q_heads}/{self.num_kv_heads} heads, dims {self.head_dim}/{self.v_head_dim}"
        dtypes = f"{self.q_dtype} on {self.kv_dtype}".replace("torch.", "")
        wants = ", ".join(sorted(self.features)) or "plain causal"
        place = self.device if self.arch == 0 else f"{self.device} sm_{self.arch}"
        return f"{self.forward_mode} ({wants}; {dims}, {dtypes}, page {self.page_size}, {place})"


@attrs.frozen
class Rejection:
    """One reason why a kernel cannot serve a request.

    Attributes:
        kernel: the provider's name.
        aspect: what it is about.
        wanted: what the request wants.
        supported: what the kernel has.
        hint: what the user can do.
    """

    kernel: str
    aspect: str
    wanted: str
    supported: str
    hint: str = ""

    def __str__(self) -> str:
        hint = f" ({self.hint})" if self.hint else ""
        return f"{self.kernel}: {self.aspect}: wanted {self.wanted}, supports {self.supported}{hint}"


@attrs.frozen(kw_only=True)
class Capabilities:
    """What a kernel can do, as data. None means no limit.

    Attributes:
        devices: device types.
        min_arch, max_arch: compute capabilities, inclusive.
        q_dtypes, kv_dtypes: dtypes of q and of the cache.
        mixed_dtypes: q and cache may differ.
        max_head_dim: largest of both head dims.
        head_dim_multiple: both head dims are multiples of it.
        unequal_head_dims: v's head dim may differ from k's.
        page_multiple: page sizes are multiples of it.
        features: the `FEATURES` it honours.
    """

    devices: frozenset[str] = frozenset({"cuda"})
    min_arch: int | None = None
    max_arch: int | None = None
    q_dtypes: frozenset[torch.dtype] = frozenset({torch.float16, torch.bfloat16})
    kv_dtypes: frozenset[torch.dtype] = frozenset({torch.float16, torch.bfloat16})
    mixed_dtypes: bool = True
    max_head_dim: int | None = None
    head_dim_multiple: int = 1
    unequal_head_dims: bool = True
    page_multiple: int = 1
    features: frozenset[str] = frozenset()

    def reject(self, kernel: str, request: KernelRequest) -> tuple[Rejection, ...]:
        """All the reasons why this is not enough for the request; empty if it is."""
        reasons = [*self._limits(request), *self._features(request)]
        return tuple(Rejection(kernel, *reason) for reason in reasons)

    def _features(self, request: KernelRequest) -> list[tuple[str, str, str]]:
        missing = sorted(request.features - self.features)
        have = ", ".join(sorted(self.features)) or "none"
        return [("feature", f"{name} ({FEATURES.get(name, 'a plugin feature')})", have) for name in missing]

    def _limits(self, request: KernelRequest) -> list[tuple[str, str, str]]:
        def names(values: frozenset[Any]) -> str:
            return ", ".join(sorted(str(v).removeprefix("torch.") for v in values))

        dims = (request.head_dim, request.v_head_dim)
        arch_range = f"{self.min_arch or 'any'} to {self.max_arch or 'any'}"
        arch_fits = (self.min_arch or 0) <= request.arch <= (self.max_arch or 10**9)
        checks = [
            (request.device in self.devices, "device", request.device, names(self.devices)),
            (arch_fits, "architecture", f"sm_{request.arch}", arch_range),
            (request.q_dtype in self.q_dtypes, "q dtype", str(request.q_dtype), names(self.q_dtypes)),
            (request.kv_dtype in self.kv_dtypes, "kv dtype", str(request.kv_dtype), names(self.kv_dtypes)),
            (
                self.mixed_dtypes or request.q_dtype == request.kv_dtype,
                "dtypes",
                f"{request.q_dtype} queries on {request.kv_dtype} keys",
                "equal dtypes",
            ),
            (
                self.max_head_dim is None or max(dims) <= self.max_head_dim,
                "head dim",
                str(max(dims)),
                f"up to {self.max_head_dim}",
            ),
            (
                all(d % self.head_dim_multiple == 0 for d in dims),
                "head dim",
                f"{dims[0]}/{dims[1]}",
                f"multiples of {self.head_dim_multiple}",
            ),
            (self.unequal_head_dims or dims[0] == dims[1], "head dim", f"{dims[0]}/{dims[1]}", "equal dims of k and v"),
            (
                request.page_size % self.page_multiple == 0 or "raw_kv" in request.features,
                "page size",
                str(request.page_size),
                f"multiples of {self.page_multiple}",
            ),
        ]
        return [(aspect, wanted, supported) for fits, aspect, wanted, supported in checks if not fits]


class KernelProvider(abc.ABC):
    """A kernel, or a family of them, behind two verbs.

    Attributes:
        name: unique; what `BackendConfig.kernels` and `faback doctor` call it.
        priority: default rank, the highest first.
        replaces: key of another provider that this one takes the place of.
    """

    name: str
    priority: int = 0
    replaces: str | None = None

    def probe(self, device: torch.device) -> str | None:
        """Why the kernel cannot run here (package missing, wrong GPU), None if it can. Imports lazily."""
        return None

    @abc.abstractmethod
    def capabilities(self, device: torch.device) -> Capabilities:
        """What it can do on this device; called only after a `probe` that found nothing wrong."""

    def reject(self, request: KernelRequest, device: torch.device) -> tuple[Rejection, ...]:
        """All the reasons against a request. Overriders add to what the capabilities say."""
        return self.capabilities(device).reject(self.name, request)

    @abc.abstractmethod
    def prepare(self, segment: Segment, layer: LayerKind, request: KernelRequest, ws: Workspace) -> Any:
        """Once per plan and layer kind: whatever all layers of the kind can share. The result goes to `run`."""

    def stores(self, prepared: Any) -> bool:
        """Whether `run` can be given the new keys and values, and writes them to the cache itself before it attends."""
        return False

    @abc.abstractmethod
    def run(
        self,
        prepared: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        *,
        lse: Tensor | None = None,
        sinks: Tensor | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
    ) -> None:
        """Attends, once per layer.

        Args:
            prepared: what `prepare` returned.
            q: [tokens, num_q_heads, head_dim], any strides with the last 1.
            k: [slots, num_kv_heads, head_dim], or [tokens, ...] for "raw_kv".
            v: [slots, num_kv_heads, v_head_dim] likewise.
            out: [tokens, num_q_heads, v_head_dim], every element is written (0 where a query sees nothing or no row
                owns the token).
            lse: float32 [tokens, num_q_heads] to write, natural log, sinks not included.
            sinks: [num_q_heads] logits.
            k_scale, v_scale: de-quantisation factors, a float or float32 [num_kv_heads].

        A kernel that `stores` also takes `new`: k [tokens, num_kv_heads, head_dim] and v, None for a latent layer, to
        write where `Segment.write` says, as `DeviceOps.set_kv` does. None if they are in the cache already.
        """


def arch_of(device: torch.device) -> int:
    """Compute capability as two digits, 90 for sm_90; 0 where there is none."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor
