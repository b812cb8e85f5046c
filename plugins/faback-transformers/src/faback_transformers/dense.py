"""Plain attention of any Transformers model: padded batches, keys and values as they come with each call."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.weak import WeakTensorKeyDictionary

from faback import AttentionBackend, AttentionLayer, BackendConfig, BatchError, FabackError, ForwardBatch, Pools
from faback.core.layer import LayerKind
from faback.core.plan import Plan
from faback.core.registry import Registry
from faback_transformers import modes
from faback_transformers.layers import UNSUPPORTED
from faback_transformers.masks import Sight, recognised

Tensor = torch.Tensor

KEPT = 3
"""Plans of a kind of layers: a forward pass may alternate between masks, or between self- and cross-attention."""
ELSEWHERE = 'Use model.set_attn_implementation("sdpa") or "eager".'


@attrs.frozen(eq=False)
class NoPool:
    """A `faback.KVPool` of models whose keys and values come with each call: there is nothing in it.

    Attributes:
        kept: dtype of those keys and values.
    """

    kept: torch.dtype
    page_size: int = 1
    num_slots: int = 0

    def buffers(self, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
        raise BatchError(f"layer {layer.layer_id}", wanted="keys that come with the call", got="a cache")

    def dtype(self, kind: LayerKind) -> torch.dtype:
        return self.kept

    def slot_map(self, group: str) -> Tensor | None:
        return None


@attrs.frozen(eq=False)
class Server:
    """The backend of layers of one kind, and its last plans: the other layers of a forward pass want the same ones.

    Attributes:
        backend: knows the layer alone.
        layer: describes them all.
        plans: by what was asked for, the latest last.
    """

    backend: AttentionBackend
    layer: AttentionLayer
    plans: OrderedDict[tuple[Sight, int, int, int], Plan] = attrs.field(factory=OrderedDict)

    def planned(self, sight: Sight, rows: int, queries: int, step: int) -> Plan:
        """The plan of a batch, made where it is not among the last ones.

        Args:
            sight: who sees what.
            rows, queries: sizes of the batch.
            step: slots from a row's keys to those of the next row.
        """
        asked = sight, rows, queries, step
        if asked not in self.plans:
            self.plans[asked] = self.backend.plan(self._batch(*asked))
        self.plans.move_to_end(asked)
        if len(self.plans) > KEPT:
            self.plans.popitem(last=False)
        return self.plans[asked]

    def _batch(self, sight: Sight, rows: int, queries: int, step: int) -> ForwardBatch:
        each = torch.arange(rows + 1, dtype=torch.int32, device=self.backend.device)
        starts = each * step
        if sight.start is not None:
            starts[:-1] += sight.start
        return ForwardBatch(
            forward_mode=modes.DENSE,
            req_pool_indices=each[1:],
            seq_lens=torch.full_like(each[1:], sight.keys) if sight.length is None else sight.length,
            positions=sight.stands,
            num_tokens=rows * queries,
            token_stride=queries,
            bounds={"seq_lens": sight.keys},
            extras={"key_starts": starts, "seen": sight.seen},
        )


class DenseAttention:
    """Attends for models that are called without a generator. One plan per forward pass, mask and kind of layer.

    Args:
        kernels: as in `BackendConfig`.
    """

    def __init__(self, kernels: str | Mapping[str, str] = "auto") -> None:
        self._kernels = kernels
        self._registry: Registry | None = None
        self._servers: dict[tuple[AttentionLayer, torch.dtype, torch.device], Server] = {}
        self._sights = WeakTensorKeyDictionary()

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        options: Mapping[str, Any],
    ) -> Tensor:
        """One layer of one forward pass.

        Args:
            module: the model's attention module.
            query: [batch, num_q_heads, queries, head_dim].
            key: [batch, num_kv_heads, keys, head_dim], what was cached before included.
            value: [batch, num_kv_heads, keys, v_head_dim].
            mask: bool [batch, 1, queries, keys] or 1 in place of a size, True where the query sees the key. None:
                without causality all keys; with it (`is_causal` of the call, or else of the module) query j of several
                sees keys 0 to j. Masks by head and those that are added to the scores are left to PyTorch.
            options: "scaling", "softcap", "s_aux" ... A window is the mask's matter.

        Returns:
            [batch, queries, num_q_heads, v_head_dim].

        Raises:
            FabackError: an option that faback does not honour, a pass that wants gradients, a dtype or a device that no
                kernel serves.
        """
        refuse(query, key, value, options)
        _check_sizes(query, key, value, mask)
        if mask is not None and (mask.dtype != torch.bool or mask.shape[1] != 1):
            return _by_torch(query, key, value, mask, options)
        causal = options.get("is_causal")
        sight = self._sight(mask, query, key, getattr(module, "is_causal", True) if causal is None else causal)
        sinks = options.get("s_aux")
        server = self._server(_layer(query, key, value, sight, options, sinks is not None), query)
        k, v, step = _slots(key, value)
        rows, heads, queries, dim = query.shape
        plan = server.planned(sight, rows, queries, step)
        q = query.transpose(1, 2).reshape(rows * queries, heads, dim)
        out = server.backend.forward(q, k, v, server.layer, sinks=sinks, plan=plan)
        return out.view(rows, queries, heads, value.shape[3])  # type: ignore[union-attr]

    def _sight(self, mask: Tensor | None, query: Tensor, key: Tensor, causal: bool) -> Sight:
        """Who sees what; looked for once per mask, however many layers share it."""
        queries, keys = query.shape[2], key.shape[2]
        if mask is None:
            if queries == 1 or not causal:
                return Sight(keys=keys, causal=queries == 1)
            if keys >= queries:  # a static cache is longer than what is in it
                return Sight(keys=queries)
            return recognised(torch.ones((len(key), queries, keys), dtype=torch.bool, device=key.device).tril())
        found: Sight | None = self._sights.get(mask)  # type: ignore[no-untyped-call]
        if found is None:
            found = recognised(mask[:, 0].expand(query.shape[0], queries, keys))
            self._sights[mask] = found
        return found

    def _server(self, layer: AttentionLayer, query: Tensor) -> Server:
        known = layer, query.dtype, query.device
        if known not in self._servers:
            config = BackendConfig(context_len=1, dtype=query.dtype, kernels=self._kernels)  # bounds come with batches
            if self._registry is None:
                self._registry = modes.registry(config)
            table = torch.zeros((1, 1), dtype=torch.int32, device=query.device)
            pools = Pools(req_to_token=table, kv=NoPool(query.dtype))
            self._servers[known] = Server(AttentionBackend(config, pools, (layer,), registry=self._registry), layer)
        return self._servers[known]


def refuse(query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]) -> None:
    """Raises for what would be ignored, or fail later."""
    if options.get("dropout"):
        hint = f"Call model.eval(). {ELSEWHERE}"
        raise FabackError("dropout of the attention function", wanted="0", got=options["dropout"], hint=hint)
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        hint = "Record graphs with PagedGenerator(model, graphs=True); use_cuda_graph=False leaves them out elsewhere."
        raise FabackError(
            "attention of Transformers", wanted="an eager pass", got="a CUDA graph's recording", hint=hint
        )
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value)):
        hint = f"Run the model under torch.inference_mode() or torch.no_grad(). To train: {ELSEWHERE}"
        what = "attn_implementation='faback', which computes no gradients"
        raise FabackError(what, wanted="a pass without gradients", got="tensors that require them", hint=hint)
    for name in UNSUPPORTED:
        if options.get(name) is not None:
            raise FabackError(f"option {name!r} of the attention function", wanted=None, got="a value", hint=ELSEWHERE)
    if options.get("output_attentions"):
        hint = 'Weights are never written down: use model.set_attn_implementation("eager").'
        raise FabackError("output_attentions", wanted=False, got=True, hint=hint)


def _check_sizes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    rows, _, queries, _ = query.shape
    if key.shape[0] != rows or key.shape[:3] != value.shape[:3]:
        got = f"{list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
        raise BatchError("query, key and value", wanted="one batch, and as many keys as values", got=got)
    if mask is None:
        return
    wanted = [rows, query.shape[1], queries, key.shape[2]]
    if mask.ndim != 4 or any(size not in (1, full) for size, full in zip(mask.shape, wanted, strict=True)):
        sizes = f"{wanted}, or 1 in place of some"
        raise BatchError("attention_mask of the attention function", wanted=sizes, got=list(mask.shape))


def _layer(
    query: Tensor, key: Tensor, value: Tensor, sight: Sight, options: Mapping[str, Any], sinks: bool
) -> AttentionLayer:
    """A layer as the kernel sees it: what it computes, and the rule of its mask."""
    scaling = options.get("scaling")
    return AttentionLayer(
        layer_id=0,
        num_q_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[3],
        v_head_dim=value.shape[3],
        scale=query.shape[3] ** -0.5 if scaling is None else float(scaling),
        softcap=float(options.get("softcap") or 0.0),
        window=sight.window,
        chunk=sight.chunk,
        causal=sight.causal,
        sinks=sinks,
        kv_group="none",
    )


def _slots(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, int]:
    """Keys and values [batch, heads, keys, dim] as [slots, heads, dim], in place wherever rows lie a whole number of
    slots apart, which they do in caches.

    Returns:
        k, v, and slots from a row to the next one.
    """
    steps = _step(key), _step(value)
    if steps[0] is None or steps[0] != steps[1]:
        key, value = key.contiguous(), value.contiguous()
    step = _step(key)
    assert step is not None
    return _flat(key, step), _flat(value, step), step


def _step(tensor: Tensor) -> int | None:
    """Slots from a row of [batch, heads, keys, dim] to the next one, None where that is no whole number."""
    row, _, slot, element = tensor.stride()
    if tensor.shape[0] == 1:
        return tensor.shape[2] if element == 1 else None
    return row // slot if element == 1 and slot > 0 and row % slot == 0 else None


def _flat(tensor: Tensor, step: int) -> Tensor:
    rows, heads, keys, dim = tensor.shape
    _, head, slot, _ = tensor.stride()
    return tensor.as_strided(((rows - 1) * step + keys, heads, dim), (slot, head, 1))


def _by_torch(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Masks that have a value for each head, or numbers that are added to the scores."""
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            got = f"{mask.dtype} {list(mask.shape)}"
            hint = f"With {name!r}, only masks that say yes or no for all heads alike are served. {ELSEWHERE}"
            raise BatchError("attention_mask of the attention function", wanted="bool [b, 1, q, k]", got=got, hint=hint)
    grouped = query.shape[1] != key.shape[1]
    found = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=options.get("scaling"), enable_gqa=grouped
    )
    return found.transpose(1, 2).contiguous()
