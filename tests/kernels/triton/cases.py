"""One call of a kernel, and how near to float64 its result must be."""

from __future__ import annotations

import math
from typing import Any

import attrs
import torch

from faback import LayerKind
from faback.core.kernel import KernelProvider, KernelRequest
from faback.core.segment import Segment
from faback.core.workspace import EagerWorkspace
from faback.kernels.reference import Reference
from faback.kernels.torch_ops import TorchOps
from faback.testing.checks import FACTOR, FLOOR

Tensor = torch.Tensor


class Processors(EagerWorkspace):
    """A device with a number of processors of its own."""

    def __init__(self, *args: Any) -> None:
        *args, self._count = args
        super().__init__(*args)

    def processors(self) -> int:
        return self._count


@attrs.frozen(kw_only=True, eq=False)
class Case:
    """One call of a kernel.

    Attributes:
        name: what makes it again.
        segment, layer: what is attended to.
        q, k, v, sinks, k_scale, v_scale: as for `KernelProvider.run`.
        page: tokens per page.
    """

    name: str
    segment: Segment
    layer: LayerKind
    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    k_scale: Any
    v_scale: Any
    page: int

    def request(self, *, deterministic: bool = False) -> KernelRequest:
        """What a backend would ask of the kernel."""
        device, layer = self.q.device, self.layer
        major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        features = self.segment.features() | layer.features() | {"lse"}
        return KernelRequest(
            forward_mode="test",
            device=device.type,
            arch=10 * major + minor,
            q_dtype=self.q.dtype,
            kv_dtype=self.k.dtype,
            num_q_heads=layer.num_q_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            v_head_dim=layer.v_head_dim,
            page_size=self.page,
            features=features | ({"deterministic"} if deterministic else set()),
        )

    def run(
        self,
        kernel: KernelProvider,
        ws: EagerWorkspace | None = None,
        *,
        deterministic: bool = False,
        dtype: torch.dtype | None = None,
        new: tuple[Tensor, Tensor | None] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Out and LSE. `dtype` is the output's, that of q unless given; `new` are keys that the kernel is to write."""
        request = self.request(deterministic=deterministic)
        refused = kernel.reject(request, self.q.device)
        assert not refused, "; ".join(map(str, refused))
        ws = ws or EagerWorkspace(TorchOps(), self.q.device, {})
        shape = (self.q.shape[0], self.layer.num_q_heads, self.layer.v_head_dim)
        around = torch.full((shape[0] + 2, shape[1] + 1, shape[2] + 3), math.nan, device=self.q.device)
        around = around.to(dtype or self.q.dtype)
        out, lse = around[1:-1, :-1, :-3], torch.full(shape[:2], math.nan, device=self.q.device)
        prepared = kernel.prepare(self.segment, self.layer, request, ws)
        options: dict[str, Any] = {"k_scale": self.k_scale, "v_scale": self.v_scale}
        if new is not None:
            assert kernel.stores(prepared)
            options["new"] = new
        kernel.run(prepared, self.q, self.k, self.v, out, lse=lse, sinks=self.sinks, **options)
        out = out.clone()
        around[1:-1, :-1, :-3] = math.nan
        assert around.isnan().all(), "memory around out was written"
        return out, lse

    def check(self, kernel: KernelProvider, ws: EagerWorkspace | None = None, *, deterministic: bool = False) -> None:
        """The kernel is as near to float64 as plain torch in q's dtype is, times a small factor."""
        self.judge(*self.run(kernel, ws, deterministic=deterministic))

    def judge(self, *found: Tensor) -> None:
        """Likewise of an out and an LSE."""
        wanted = self.run(Reference(torch.float64), dtype=torch.float64)
        plain = self.run(Reference(self.q.dtype))
        for name, got, exact, rough in zip(("out", "lse"), found, wanted, plain, strict=True):
            finite = exact.isfinite()
            assert torch.equal(got.isfinite(), finite), f"{name} is finite where it must not be, or not: {self.name}"
            allowed = FACTOR * largest(rough, exact, finite) + FLOOR[self.q.dtype] * size(exact, finite)
            error = largest(got, exact, finite)
            assert error <= allowed, f"{name} off by {error:.3g}, allowed {allowed:.3g}: {self.name}"

    def on_cpu(self) -> Case:
        """The same call of copies on the CPU."""
        found: Case = _on_cpu(self)
        return found

    def alone(self, row: int) -> Case:
        """A row without tail as the only one."""
        segment, (start, end) = self.segment, self.segment.cu_seqlens_q[row : row + 2].tolist()
        view, rule = segment.kv, segment.visibility
        assert view is not None and segment.tail is None and segment.positions is None and segment.q_len is None

        def mine(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[row : row + 1]

        only = Segment(
            rows=1,
            tokens=end - start,
            cu_seqlens_q=torch.tensor([0, end - start], dtype=torch.int32, device=self.q.device),
            max_seqlen_q=end - start,
            kv_len=segment.kv_len[row : row + 1],
            max_kv_len=int(segment.kv_len[row]),
            kv=attrs.evolve(view, req_pool_indices=mine(view.req_pool_indices), start=mine(view.start)),
            visibility=attrs.evolve(rule, keep=mine(rule.keep), row_window=mine(rule.row_window)),
        )
        return attrs.evolve(self, segment=only, q=self.q[start:end])


def _on_cpu(value: Any) -> Any:
    """A copy, tensors within attrs classes included."""
    if isinstance(value, Tensor):
        return value.cpu()
    if not attrs.has(type(value)):
        return value
    return attrs.evolve(value, **{f.name: _on_cpu(getattr(value, f.name)) for f in attrs.fields(type(value)) if f.init})


def size(exact: Tensor, finite: Tensor) -> float:
    """The largest finite number, 1 at least."""
    return max(1.0, float(exact[finite].abs().max())) if bool(finite.any()) else 1.0


def largest(got: Tensor, exact: Tensor, finite: Tensor) -> float:
    """The largest difference where the exact number is finite."""
    return float((got.double() - exact.double())[finite].abs().max()) if bool(finite.any()) else 0.0
