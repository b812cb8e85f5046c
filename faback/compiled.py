"""Attention within `torch.compile`: one opaque operator per layer, and no graph break around it.

    attention = CompiledAttention(backend)

    class Block(torch.nn.Module):
        def forward(self, x):
            ...
            x = attention.forward(q, k, v, self.layer)      # as AttentionBackend.forward

    model = torch.compile(model, fullgraph=True)
    backend.plan(batch)                                     # outside, as ever
    model(...)

What a plan holds is never part of the compiled graph. An operator takes tensors and numbers, so it is given the number
of its `CompiledAttention`, and finds there the backend, the layer and the plan of the moment. Passes of other lengths,
modes or plans therefore need no new compilation, and those that `replay` or `GraphRunner` prepares none either.

The operator declares that it changes `out` and `lse`, and `order`, a tensor of one element that nobody reads. The
caches are not among its arguments: keys and values are often views of one memory, and Inductor (of torch 2.13) copies
such memory as a whole, there and back, around an operator that changes two of its views. `order` stands for the caches.
As every operator of a backend changes it, the compiler keeps them all, in their order, and merges none. Within a
compiled function nothing else may read or write the caches.

CUDA graphs are made by `GraphRunner` around the compiled model. Those of `torch.compile(mode="reduce-overhead")` would
repeat the plan that they were recorded with, so the operators are marked as unsafe for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch

from faback.core.backend import AttentionBackend
from faback.core.errors import BatchError
from faback.core.layer import AttentionLayer
from faback.core.plan import Plan

Tensor = torch.Tensor

UNSAFE: dict[str, Any] = {"tags": (torch.Tag.cudagraph_unsafe,)} if hasattr(torch.Tag, "cudagraph_unsafe") else {}
"""What keeps the operators out of CUDA graphs of the compiler's, where torch knows such a mark."""


class CompiledAttention:
    """A backend as a compiled model calls it. Outside of `torch.compile` its methods are those of the backend.

    Args:
        backend: whose plans are used.
    """

    def __init__(self, backend: AttentionBackend) -> None:
        self.backend = backend
        self._plan: Plan | None = None
        self._order = torch.zeros(1, dtype=torch.int32, device=backend.device)
        self._number = NUMBERED.add(self)

    @contextmanager
    def using(self, plan: Plan) -> Iterator[None]:
        """A block within which `plan` takes the place of the backend's current one, for passes that interleave several.

        Args:
            plan: of this backend, for example a step of a `MultiStepDraft`.
        """
        before, self._plan = self._plan, plan
        try:
            yield
        finally:
            self._plan = before

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        *,
        out: Tensor | None = None,
        sinks: Tensor | None = None,
        q_rope: Tensor | None = None,
        k_rope: Tensor | None = None,
        save_kv_cache: bool = True,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`AttentionBackend.forward`; arguments, results and errors are the same.

        Within a compiled function a `BatchError` for an unknown layer comes when it is compiled, as an error of the
        compiler's, and every other one when it runs.
        """
        if not torch.compiler.is_compiling():
            return self.backend.forward(
                q, k, v, layer, out=out, sinks=sinks, q_rope=q_rope, k_rope=k_rope, save_kv_cache=save_kv_cache,
                return_lse=return_lse, plan=self._plan,
            )  # fmt: skip
        self.backend.check_layer(layer)  # the operator is told no more than its id
        tokens, heads = q.shape[0], layer.num_q_heads
        if out is None:
            out = q.new_empty(tokens, heads, layer.v_head_dim)
        lse = q.new_empty(tokens, heads, dtype=torch.float32) if return_lse else None
        torch.ops.faback.attend(
            self._order, out, lse, q, k, v, sinks, q_rope, k_rope, self._number, layer.layer_id, save_kv_cache
        )
        return out if lse is None else (out, lse)

    def write_kv(self, k: Tensor, v: Tensor | None, layer: AttentionLayer, *, k_rope: Tensor | None = None) -> None:
        """`AttentionBackend.write_kv`; arguments and errors are the same."""
        if not torch.compiler.is_compiling():
            self.backend.write_kv(k, v, layer, k_rope=k_rope, plan=self._plan)
            return
        self.backend.check_layer(layer)  # the operator is told no more than its id
        torch.ops.faback.write_kv(self._order, k, v, k_rope, self._number, layer.layer_id)

    @property
    def plan(self) -> Plan | None:
        """The plan that is used: that of `using`, or None for the backend's current one."""
        return self._plan


class Numbered:
    """The objects that operators reach by number.

    Operators belong to the process, and a compiled graph can hold nothing but a number for an object; so whoever looks
    it up belongs to the process as well. Nothing is kept alive here, and no number is given twice.
    """

    def __init__(self) -> None:
        self._numbers = count(1)
        self._known: WeakValueDictionary[int, CompiledAttention] = WeakValueDictionary()

    def add(self, attention: CompiledAttention) -> int:
        """Its number from now on."""
        number = next(self._numbers)
        self._known[number] = attention
        return number

    def get(self, number: int) -> CompiledAttention:
        """The object of that number.

        Raises:
            BatchError: it is gone.
        """
        found = self._known.get(number)
        if found is None:
            hint = (
                "Keep the CompiledAttention for as long as the compiled model, and compile in the process that runs it."
            )
            raise BatchError("compiled attention", wanted="one that is still there", got=f"number {number}", hint=hint)
        return found


NUMBERED = Numbered()


@torch.library.custom_op(
    "faback::attend",
    mutates_args=("order", "out", "lse"),
    schema="(Tensor(a!) order, Tensor(b!) out, Tensor(c!)? lse, Tensor q, Tensor? k, Tensor? v, Tensor? sinks, "
    "Tensor? q_rope, Tensor? k_rope, int number, int layer_id, bool save_kv_cache) -> ()",
    **UNSAFE,
)
def attend(
    order: Tensor,
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    sinks: Tensor | None,
    q_rope: Tensor | None,
    k_rope: Tensor | None,
    number: int,
    layer_id: int,
    save_kv_cache: bool,
) -> None:
    """`AttentionBackend.forward` as an operator."""
    attention = NUMBERED.get(number)
    found = attention.backend.forward(
        q, k, v, attention.backend.layers[layer_id], out=out, sinks=sinks, q_rope=q_rope, k_rope=k_rope,
        save_kv_cache=save_kv_cache, return_lse=lse is not None, plan=attention.plan,
    )  # fmt: skip
    if lse is not None:
        lse.copy_(found[1])


@torch.library.custom_op(
    "faback::write_kv",
    mutates_args=("order",),
    schema="(Tensor(a!) order, Tensor k, Tensor? v, Tensor? k_rope, int number, int layer_id) -> ()",
    **UNSAFE,
)
def write_kv(order: Tensor, k: Tensor, v: Tensor | None, k_rope: Tensor | None, number: int, layer_id: int) -> None:
    """`AttentionBackend.write_kv` as an operator."""
    attention = NUMBERED.get(number)
    attention.backend.write_kv(k, v, attention.backend.layers[layer_id], k_rope=k_rope, plan=attention.plan)


@attend.register_fake
@write_kv.register_fake
def _no_result(*args: object) -> None:
    """Both only change their arguments."""
