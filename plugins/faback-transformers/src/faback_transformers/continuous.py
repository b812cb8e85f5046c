"""Continuous batching of Transformers itself, by faback: packed requests, their keys in Transformers' own pages.

Version 5.17 lets the attention function of another package take part: it stores the new keys and values where it is
told to, and attends. Full-attention layers are read in place. What a sliding layer keeps is a ring that new tokens
overwrite, so its cache gathers for itself what the pass sees, before it stores what is new.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import torch
import transformers
from transformers import PreTrainedModel

from faback import AttentionBackend, AttentionLayer, BackendConfig, BatchError, FabackError, ForwardBatch, Pools
from faback.core.layer import LayerKind
from faback.core.plan import Plan
from faback_transformers import modes
from faback_transformers.dense import refuse
from faback_transformers.layers import describe

Tensor = torch.Tensor

PAGED = "paged|faback"
"""What `attn_implementation` calls it."""
FULL, SLIDING = "full_attention", "sliding_attention"


@attrs.frozen(eq=False)
class CachePool:
    """A `faback.KVPool` over the tensors of a `PagedAttentionCache`, in place.

    Attributes:
        tensors: keys and values [slots, num_kv_heads, head_dim] by `layer_idx`.
        page_size: tokens of a block.
    """

    tensors: Mapping[int, tuple[Tensor, Tensor]]
    page_size: int

    @classmethod
    def of(cls, cache: Any) -> CachePool:
        """The tensors, but not the cache: it may go when Transformers has done with it."""
        places = cache.layer_index_to_group_indices
        tensors = {index: (cache.key_cache[at], cache.value_cache[at]) for index, (_, at) in places.items()}
        return cls(tensors, cache.block_size)

    @property
    def _keys(self) -> Tensor:
        return next(iter(self.tensors.values()))[0]

    @property
    def num_slots(self) -> int:
        return self._keys.shape[0]

    @property
    def device(self) -> torch.device:
        return self._keys.device

    def buffers(self, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
        return self.tensors[layer.layer_id]

    def dtype(self, kind: LayerKind) -> torch.dtype:
        return self._keys.dtype

    def slot_map(self, group: str) -> Tensor | None:
        return None


@attrs.define(eq=False)
class CacheServer:
    """The backend of a cache's layers of one kind, and the plans of the pass that runs.

    Attributes:
        backend: knows every layer of the cache as if it were of this kind.
        indices: the pass's lists of indices, which are made for it alone.
        plans: of that pass, by group; None for keys that come with the call, which are the same for all groups.
    """

    backend: AttentionBackend
    indices: Any = None
    plans: dict[int | None, Plan] = attrs.field(factory=dict)

    @classmethod
    def of(cls, cache: Any, layer: AttentionLayer, dtype: torch.dtype, kernels: str | Mapping[str, str]) -> CacheServer:
        """A backend over the cache's own tensors."""
        pool = CachePool.of(cache)
        config = BackendConfig(context_len=pool.num_slots, dtype=dtype, kernels=kernels)
        table = torch.zeros((1, 1), dtype=torch.int32, device=pool.device)  # each pass brings its own
        layers = [attrs.evolve(layer, layer_id=index) for index in pool.tensors]
        pools = Pools(req_to_token=table, kv=pool)
        return cls(AttentionBackend(config, pools, layers, registry=modes.registry(config)))

    def planned(self, options: Mapping[str, Any], group: int | None, tokens: int, kind: str) -> Plan:
        """The plan of the pass that these options belong to.

        Args:
            options: what continuous batching hands to every layer.
            group: whose keys are read from the cache; None where they come with the call.
            tokens: queries.
            kind: `FULL` or `SLIDING`.
        """
        if self.indices is not options["read_index"]:
            self.indices, self.plans = options["read_index"], {}
        if group not in self.plans:
            self.plans[group] = self.backend.plan(self._batch(options, group, tokens, kind))
        return self.plans[group]

    def _batch(self, options: Mapping[str, Any], group: int | None, tokens: int, kind: str) -> ForwardBatch:
        query_starts, key_starts = options["cu_seq_lens_q"], _of_kind(options["cu_seq_lens_k"], kind)
        longest, pages = int(_of_kind(options["max_seqlen_k"], kind)), None
        if group is not None:
            size, slots = self.backend.pools.kv.page_size, options["read_index"][group]
            first = torch.arange(0, longest, size, device=slots.device)
            at = (key_starts[:-1, None] + first).clamp(max=slots.shape[0] - 1)
            pages = (slots[at] // size).int()  # what lies behind a row's last page is another row's and not read
        return ForwardBatch(
            forward_mode=modes.CONTINUOUS,
            req_pool_indices=torch.zeros_like(query_starts[:-1]),
            seq_lens=key_starts.diff(),
            num_tokens=tokens,
            bounds={"seq_lens": longest, "query_lens": int(options["max_seqlen_q"])},
            extras={"query_starts": query_starts.int(), "key_starts": key_starts.int(), "pages": pages},
        )


class ContinuousAttention:
    """The attention function "paged|faback".

    Args:
        kernels: as in `BackendConfig`.
    """

    def __init__(self, kernels: str | Mapping[str, str] = "auto") -> None:
        self._kernels = kernels
        self._layers: WeakKeyDictionary[torch.nn.Module, AttentionLayer] = WeakKeyDictionary()
        self._servers: WeakKeyDictionary[Any, dict[LayerKind, CacheServer]] = WeakKeyDictionary()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        cache: Any = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Stores new keys and values, then attends.

        Args:
            module: the model's attention module.
            query: [1, num_q_heads, tokens, head_dim], requests packed one after another.
            key: [1, num_kv_heads, tokens, head_dim], the new tokens only.
            value: likewise.
            attention_mask: not looked at: every query sees what is before it in its request.
            cache: the manager's `PagedAttentionCache`.
            options: "read_index" and "write_index" by group of layers, "cu_seq_lens_q", "cu_seq_lens_k",
                "max_seqlen_q", "max_seqlen_k", and what the model says: "scaling", "sliding_window" ...

        Returns:
            [1, tokens, num_q_heads, head_dim], and no weights.

        Raises:
            FabackError: called by other than continuous batching, or an option that faback does not honour.
            BatchError: the fused decode step of flash packages is asked for.
        """
        if cache is None:
            hint = 'Call model.generate_batch(...), or model.set_attn_implementation("faback") for a plain pass.'
            raise FabackError(f"{PAGED!r} outside continuous batching", wanted="its cache", got=None, hint=hint)
        if options.get("block_table") is not None:
            raise BatchError("block_table", wanted="read_index and write_index", got="a table for flash packages")
        refuse(query, key, value, options)
        q, *new = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        layer = self._layers.get(module)
        if layer is None:
            layer = self._layers[module] = describe(module, q, new[0], new[1], options)
        server = self._server(cache, layer, query.dtype)
        index = layer.layer_id
        group, _ = cache.layer_index_to_group_indices[index]
        kind = SLIDING if cache.sliding_windows[index] != 1 else FULL
        in_place = kind == FULL and options["read_index"][group].numel() > 0
        plan = server.planned(options, group if in_place else None, q.shape[0], kind)
        k = v = None
        if in_place:
            for stored, fresh in zip(server.backend.pools.kv.buffers(layer), new, strict=True):
                stored.index_copy_(0, options["write_index"][group], fresh)
        else:
            places = {name: options[name] for name in ("read_index", "write_index")}
            k, v = cache.update(key_states=key, value_states=value, layer_idx=index, **places)
        sinks = options.get("s_aux")
        out = server.backend.forward(q, k, v, layer, sinks=sinks, save_kv_cache=False, plan=plan)
        return out.unsqueeze(0), None  # type: ignore[union-attr]

    def _server(self, cache: Any, layer: AttentionLayer, dtype: torch.dtype) -> CacheServer:
        servers = self._servers.setdefault(cache, {})
        if layer.kind not in servers:
            servers[layer.kind] = CacheServer.of(cache, layer, dtype, self._kernels)
        return servers[layer.kind]


def offered() -> bool:
    """Whether continuous batching of the installed Transformers lets attention functions of other packages take part.

    5.17 does. 5.18 keeps what they are given in another form, and from 5.19 on they are refused by name.
    """
    return transformers.__version__.split(".")[:2] == ["5", "17"]


@contextmanager
def continuous_batching(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Has faback attend in `model.generate_batch` and `model.init_continuous_batching`, until the block ends.

    Raises:
        FabackError: the installed version of Transformers does not let others attend there.
    """
    if not offered():
        hint = "Use faback_transformers.PagedGenerator, which batches continuously with any version, or that one."
        wanted = "transformers 5.17"
        what = "continuous batching of Transformers with another package's attention"
        raise FabackError(what, wanted=wanted, got=transformers.__version__, hint=hint)
    before = model.config._attn_implementation
    model.set_attn_implementation(PAGED)
    try:
        yield model
    finally:
        model.set_attn_implementation(before)


def _of_kind(value: Any, kind: str) -> Any:
    """A value that models with layers of several kinds get one of for each."""
    return value[kind] if isinstance(value, Mapping) else value
