"""The facade's own time on the host: what a layer costs when its kernel and its KV write do nothing."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from time import perf_counter
from typing import Any

import attrs
import torch

from faback import AttentionBackend, AttentionLayer, BackendConfig, ForwardBatch, LayerKind, Pools, hookimpl
from faback.builtins import BUILTINS
from faback.core.kernel import Capabilities, KernelProvider, KernelRequest
from faback.core.registry import Registry
from faback.core.segment import FEATURES, Segment
from faback.core.workspace import DeviceOps, Workspace
from faback.pools import MHAPool, PageAllocator, ReqToTokenPool
from faback_transformers.attention import PagedContext, attention

Tensor = torch.Tensor

PAGE_SIZE = 16


@attrs.frozen(kw_only=True)
class Overhead:
    """Medians over many decode steps, in microseconds of host time.

    Attributes:
        forward_us: `backend.forward`, per layer.
        attention_us: the attention function as Transformers calls it, `backend.forward` within, per layer.
        plan_us: `backend.plan`, per step, for all layers together.
    """

    forward_us: float
    attention_us: float
    plan_us: float


class _NoKernel(KernelProvider):
    """Attends to nothing; can do everything."""

    name = "none"

    def capabilities(self, device: torch.device) -> Capabilities:
        dtypes = frozenset({torch.float16, torch.bfloat16, torch.float32})
        return Capabilities(
            devices=frozenset({device.type}), q_dtypes=dtypes, kv_dtypes=dtypes, features=frozenset(FEATURES)
        )

    def prepare(self, segment: Segment, layer: LayerKind, request: KernelRequest, ws: Workspace) -> None:
        return None

    def run(self, prepared: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, **options: Any) -> None:
        return None


class _NoWrites:
    """A device's operations, without the KV write."""

    def __init__(self, ops: DeviceOps) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def set_kv(self, *args: Any, **options: Any) -> None:
        """Writes nothing."""


class _Nothing:
    """A plugin that brings both."""

    def __init__(self, ops: DeviceOps) -> None:
        self._ops = _NoWrites(ops)

    @hookimpl
    def faback_kernels(self, device: torch.device) -> list[KernelProvider]:
        return [_NoKernel()]

    @hookimpl(tryfirst=True)
    def faback_device_ops(self, device: torch.device) -> Any:
        return self._ops


@attrs.frozen
class _Module:
    """As much of an attention module as the attention function looks at."""

    layer_idx: int


@torch.inference_mode()
def host_overhead(
    layers: Mapping[int, AttentionLayer],
    *,
    requests: int = 8,
    seq_len: int = 64,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    steps: int = 100,
) -> Overhead:
    """Measures the facade in the decode steps of a model.

    Args:
        layers: the model's, as `layers_of` gives them.
        requests: batch size.
        seq_len: tokens of each request.
        dtype: of the model.
        device: where it runs.
        steps: how many steps are timed.
    """
    target = torch.device(device)
    backend, batch = _backend(tuple(layers.values()), requests, seq_len, dtype, target)
    plain = {index: attrs.evolve(layer, sinks=False) for index, layer in layers.items()}
    given = [(_Module(index), layer, _inputs(layer, requests, dtype, target)) for index, layer in plain.items()]
    packed = [(layer, [x[0].transpose(0, 1) for x in inputs]) for _, layer, inputs in given]
    context = PagedContext(backend, plain)
    plans, forwards, attentions = [], [], []
    for _ in range(steps):
        start = perf_counter()
        backend.plan(batch)
        planned = perf_counter()
        for layer, (q, k, v) in packed:
            backend.forward(q, k, v, layer)
        done = perf_counter()
        for module, _, (q, k, v) in given:
            attention(module, q, k, v, None, faback_context=context)  # type: ignore[arg-type]
        plans.append(planned - start)
        forwards.append((done - planned) / len(layers))
        attentions.append((perf_counter() - done) / len(layers))
    return Overhead(
        forward_us=median(forwards) * 1e6, attention_us=median(attentions) * 1e6, plan_us=median(plans) * 1e6
    )


def _backend(
    layers: tuple[AttentionLayer, ...], requests: int, seq_len: int, dtype: torch.dtype, device: torch.device
) -> tuple[AttentionBackend, ForwardBatch]:
    layers = tuple(attrs.evolve(layer, sinks=False) for layer in layers)
    num_pages = requests * -(-seq_len // PAGE_SIZE) + 1
    rows = ReqToTokenPool(requests, seq_len, device)
    slots = PageAllocator(num_pages, PAGE_SIZE).alloc_extend([0] * requests, [seq_len] * requests)
    owners = rows.alloc(requests)
    for index, row in enumerate(owners):
        rows.write(row, 0, slots[index * seq_len : (index + 1) * seq_len])
    kv = MHAPool(num_pages=num_pages, page_size=PAGE_SIZE, layers=layers, dtype=dtype, device=device)
    config = BackendConfig(context_len=seq_len, dtype=dtype, kernels="none")
    registry = Registry.load(config, BUILTINS)
    registry.register(_Nothing(registry.device_ops(device)), "nothing")
    backend = AttentionBackend(config, Pools(req_to_token=rows.req_to_token, kv=kv), layers, registry=registry)
    lens = torch.full((requests,), seq_len)
    batch = ForwardBatch(
        forward_mode="decode",
        req_pool_indices=torch.tensor(owners, device=device),
        seq_lens=lens.to(device),
        seq_lens_cpu=lens,
        out_cache_loc=slots.view(requests, seq_len)[:, -1].to(device),
    )
    return backend, batch


def _inputs(
    layer: AttentionLayer, requests: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as a Transformers layer makes them: [1, heads, requests, dim]."""

    def made(heads: int, dim: int) -> Tensor:
        return torch.zeros((1, requests, heads, dim), dtype=dtype, device=device).transpose(1, 2)

    return (
        made(layer.num_q_heads, layer.head_dim),
        made(layer.num_kv_heads, layer.head_dim),
        made(layer.num_kv_heads, layer.v_head_dim),
    )
