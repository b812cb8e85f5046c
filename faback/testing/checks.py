"""Runs a scenario on a backend and says of every cell: equal, refused, or wrong and where."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import attrs
import torch

from faback.core.batch import ForwardBatch
from faback.core.config import BackendConfig
from faback.core.errors import FabackError, PluginError
from faback.core.layer import AttentionLayer
from faback.core.pools import Pools
from faback.testing.engine import SimulatedPool
from faback.testing.layers import as_bits
from faback.testing.scenario import LayerCall, Scenario, Step

Tensor = torch.Tensor

FACTOR = 3.0
"""A result may be this many times as far from the oracle as plain torch in the same dtype is."""

FLOOR: Mapping[torch.dtype, float] = MappingProxyType({torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3})
"""And this much besides, absolute: about one rounding of an output of size 1."""

EQUAL, REFUSED, WRONG = "equal", "refused", "wrong"
PADDING_SLOTS = 1
"""Slot 0 may receive anything."""


class Backend(Protocol):
    """What the checks need of a backend; `faback.AttentionBackend` has it."""

    def plan(self, batch: ForwardBatch) -> Any: ...

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        *,
        out: Tensor | None = None,
        sinks: Tensor | None = None,
        save_kv_cache: bool = True,
        return_lse: bool = False,
    ) -> Any: ...


MakeBackend = Callable[[BackendConfig, Pools, tuple[AttentionLayer, ...]], Backend]


@attrs.frozen(kw_only=True)
class CellResult:
    """The verdict on one layer of one forward pass, or on a whole scenario that was refused or broke.

    Attributes:
        status: "equal", "refused" or "wrong".
        scenario: the call that makes the scenario again.
        step: index of the forward pass, None for construction.
        layer_id: None where no layer was reached.
        reason: why it was refused, or what is wrong, with the first offending token.
        error: largest difference from the oracle.
        tolerance: what was allowed.
    """

    status: str
    scenario: str
    step: int | None = None
    layer_id: int | None = None
    reason: str = ""
    error: float = 0.0
    tolerance: float = 0.0

    def __str__(self) -> str:
        where = "" if self.step is None else f" step {self.step}"
        where += "" if self.layer_id is None else f" layer {self.layer_id}"
        return f"{self.status}{where}: {self.reason or 'ok'} [{self.scenario}]"


def run_scenario(
    scenario: Scenario,
    make_backend: MakeBackend | None = None,
    *,
    device: torch.device | str = "cpu",
    lse: bool = True,
) -> list[CellResult]:
    """Runs all passes of a scenario, one cell per pass and layer.

    Args:
        scenario: what to run; it is not changed and can be run again.
        make_backend: builds the backend under test; `faback.AttentionBackend` if None.
        device: where the scenario runs.
        lse: ask for the log-sum-exp as well; kernels that have none cannot give it.
    """
    name = str(scenario)
    if torch.device(device).type != "cpu":
        scenario = scenario.to(device)
    pools = scenario.pools()
    try:
        backend = (make_backend or _default_backend)(scenario.config, pools, scenario.layers)
    except Exception as error:  # noqa: BLE001  whatever a backend raises is a verdict on it
        return [_raised(error, "construction", name)]
    results: list[CellResult] = []
    for number, step in enumerate(scenario.steps):
        step.enter(pools)
        found = [attrs.evolve(result, scenario=name, step=number) for result in _run_step(backend, step, pools, lse)]
        results += found
        if any(result.status != EQUAL for result in found):
            break
    return results


def outputs(
    scenario: Scenario, make_backend: MakeBackend | None = None, *, device: torch.device | str = "cpu"
) -> list[Tensor]:
    """What a backend answers, pass by pass and layer by layer, [tokens, heads, v_dim] each.

    For properties that compare two scenarios with each other, bit by bit, instead of with the oracle.
    """
    scenario = scenario.to(device)
    pools = scenario.pools()
    backend = (make_backend or _default_backend)(scenario.config, pools, scenario.layers)
    found = []
    for step in scenario.steps:
        step.enter(pools)
        backend.plan(step.batch)
        found += [backend.forward(call.q, call.k, call.v, call.layer, sinks=call.sinks) for call in step.calls]
    return found


def wrong(results: Iterable[CellResult]) -> list[CellResult]:
    """Those cells that are wrong."""
    return [result for result in results if result.status == WRONG]


def _default_backend(config: BackendConfig, pools: Pools, layers: tuple[AttentionLayer, ...]) -> Backend:
    from faback import AttentionBackend

    return AttentionBackend(config, pools, layers)


def _run_step(backend: Backend, step: Step, pools: Pools, lse: bool) -> list[CellResult]:
    inputs = _Inputs(step, pools)
    try:
        backend.plan(step.batch)
    except Exception as error:  # noqa: BLE001
        return [_raised(error, "plan")]
    results = []
    for call in step.calls:
        try:
            result = _run_call(backend, step, call, pools, lse)
        except Exception as error:  # noqa: BLE001
            reason = f"forward raised {type(error).__name__}: {error}"
            result = CellResult(status=WRONG, scenario="", reason=reason)
        changed = inputs.changed()
        if changed:
            reason = f"plan or forward changed {changed}" + (f"; {result.reason}" if result.reason else "")
            result = attrs.evolve(result, status=WRONG, reason=reason)
        results.append(attrs.evolve(result, layer_id=call.layer.layer_id))
    return results


def _raised(error: Exception, where: str, scenario: str = "") -> CellResult:
    """A refusal is an error that faback raises on purpose; a plugin's own crash, though wrapped in one, is not."""
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, FabackError) and not isinstance(error, PluginError):
        return CellResult(status=REFUSED, scenario=scenario, reason=reason)
    return CellResult(status=WRONG, scenario=scenario, reason=f"{where} raised {reason}")


def _run_call(backend: Backend, step: Step, call: LayerCall, pools: Pools, with_lse: bool) -> CellResult:
    """Forward twice: into a guarded buffer with LSE, then plainly with the keys already written."""
    assert isinstance(pools.kv, SimulatedPool)
    before = [tuple(as_bits(t).clone() for t in pair) for pair in pools.kv.storage.values()]
    guard = _Guard(call)
    tensors = (call.q, call.k, call.v, call.layer)
    answer = backend.forward(*tensors, out=guard.out, sinks=call.sinks, return_lse=with_lse)
    out, lse = answer if with_lse else (answer, None)
    complaint = guard.complaint(out) or _misplaced(before, call, pools.kv)
    verdict = _compared(step, call, out, lse)
    if complaint is not None:
        return attrs.evolve(verdict, status=WRONG, reason=complaint)
    if verdict.status != EQUAL:
        return verdict
    again = backend.forward(*tensors, sinks=call.sinks, save_kv_cache=False)
    if isinstance(again, tuple):
        return attrs.evolve(verdict, status=WRONG, reason="forward returned an LSE that nobody asked for")
    second = _compared(step, call, again, None)
    return attrs.evolve(second, reason=f"without out=: {second.reason}") if second.status != EQUAL else verdict


class _Inputs:
    """The bits of everything that a backend may only read."""

    def __init__(self, step: Step, pools: Pools) -> None:
        batch, kv = step.batch, pools.kv
        assert isinstance(kv, SimulatedPool)
        self._tensors: dict[str, Tensor] = {"req_to_token": pools.req_to_token}
        self._tensors.update({f"slot_map of {group}": slot_map for group, slot_map in kv.maps.items()})
        self._tensors.update({f"batch.{f.name}": getattr(batch, f.name) for f in attrs.fields(ForwardBatch)})
        self._tensors.update({f"batch.extras[{name!r}]": value for name, value in batch.extras.items()})
        for call in step.calls:
            owner = f"of layer {call.layer.layer_id}"
            self._tensors.update({f"{name} {owner}": getattr(call, name) for name in ("q", "k", "v", "sinks")})
            scales = {f"{name} {owner}": getattr(call.layer, name) for name in ("k_scale", "v_scale")}
            self._tensors.update(scales)
        self._tensors = {name: value for name, value in self._tensors.items() if isinstance(value, Tensor)}
        self._copies = {name: as_bits(value).clone() for name, value in self._tensors.items()}

    def changed(self) -> str:
        """Names of what is no longer bit-identical."""
        return ", ".join(n for n, value in self._tensors.items() if not torch.equal(as_bits(value), self._copies[n]))


class _Guard:
    """An output buffer of NaN inside a larger one, with rows and lanes around it that nobody may touch."""

    def __init__(self, call: LayerCall) -> None:
        tokens, heads, dim = call.out.shape
        self._whole = torch.full((tokens + 2, heads + 1, dim + 3), torch.nan, dtype=call.q.dtype, device=call.q.device)
        self.out = self._whole[1:-1, :heads, :dim]

    def complaint(self, returned: Tensor) -> str | None:
        """What is wrong with the buffer after the call, None if nothing."""
        if returned.data_ptr() != self.out.data_ptr() and self.out.numel():
            return "forward did not return the tensor given as out"
        around = self._whole.clone()
        around[1:-1, : self.out.shape[1], : self.out.shape[2]] = torch.nan
        return None if bool(around.isnan().all()) else "memory around out was written"


def _misplaced(before: list[tuple[Tensor, ...]], call: LayerCall, pool: SimulatedPool) -> str | None:
    """What is wrong with the pool after a write, None if every slot holds what it must."""
    for (layer_id, buffers), old in zip(pool.storage.items(), before, strict=True):
        mine = layer_id == call.layer.layer_id
        for name, buffer, kept, stored in zip("kv", buffers, old, (call.stored_k, call.stored_v), strict=True):
            expected = kept.clone()
            if mine and stored.shape[0]:
                expected[call.write_slots.to(buffer.device)] = as_bits(stored).to(buffer.device)
            differs = (as_bits(buffer) != expected).flatten(1).any(1)
            differs[:PADDING_SLOTS] = False
            if bool(differs.any()):
                slots = differs.nonzero().flatten().tolist()
                wanted = [slot for slot in slots if mine and slot in call.write_slots.tolist()]
                what = f"{name} of layer {layer_id}"
                return f"{what} not stored right in slots {wanted}" if wanted else f"{what} written in slots {slots}"
    return None


def _compared(step: Step, call: LayerCall, out: Tensor, lse: Tensor | None) -> CellResult:
    """Out, and LSE where it was asked for, against the oracle."""
    pairs = [("out", out, call.out, call.out_error)]
    if lse is not None:
        pairs.append(("lse", lse, call.lse, call.lse_error))
    worst = CellResult(status=EQUAL, scenario="")
    for name, got, wanted, plain in pairs:
        dtype = torch.float32 if name == "lse" else call.q.dtype
        if got.shape != wanted.shape or got.dtype != dtype:
            reason = f"{name} is {got.dtype} {list(got.shape)}, wanted {dtype} {list(wanted.shape)}"
            return CellResult(status=WRONG, scenario="", reason=reason)
        tolerance = FACTOR * plain + FLOOR[call.q.dtype]
        gaps = _gaps(got.detach().cpu().double(), wanted)
        error = float(gaps.max()) if gaps.numel() else 0.0
        if error > tolerance:
            reason = f"{name} off by {error:.3g} (allowed {tolerance:.3g}): {_culprit(step, call, gaps, tolerance)}"
            return CellResult(status=WRONG, scenario="", reason=reason, error=error, tolerance=tolerance)
        if error >= worst.error:
            worst = attrs.evolve(worst, error=error, tolerance=tolerance)
    return worst


def _gaps(got: Tensor, wanted: Tensor) -> Tensor:
    """|got - wanted| per element; infinities must agree, and NaN is infinitely far from everything."""
    gaps = (got - wanted).abs()
    gaps = torch.where(got == wanted, 0.0, gaps)
    return torch.where(gaps.isnan(), torch.inf, gaps)


def _culprit(step: Step, call: LayerCall, gaps: Tensor, tolerance: float) -> str:
    """The first token that is off, and whom it should have seen."""
    row = int((gaps.flatten(1).max(1).values > tolerance).nonzero()[0])
    query = step.queries[row]
    if query is None:
        return f"row {row} of q is padding and must be 0 with LSE -inf"
    seen = call.keys[row]
    names = ", ".join(f"{key.kind} {key.position}" for key in seen[:12])
    return f"row {row} of q, {query}, must see {len(seen)} tokens: {names}{', ...' if len(seen) > 12 else ''}"
