"""The built-in GPU kernel: any CUDA GPU from sm_80 on, nothing but torch and triton."""

from __future__ import annotations

import os
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import attrs
import torch

from faback.core.hooks import hookimpl
from faback.core.kernel import Capabilities, KernelProvider, KernelRequest, Rejection
from faback.core.layer import LayerKind
from faback.core.segment import FEATURES, KVView, KVWrite, Segment
from faback.core.workspace import Workspace
from faback.kernels.triton.launch import WIDEST, Grid, Kernel, Launch
from faback.kernels.triton.tiles import Shape, Tile, pick, power_of_two

Tensor = torch.Tensor

HALF = frozenset({torch.float16, torch.bfloat16})
FP8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
MAX_PLANNED_ROWS = 4096
"""Rows that a program can plan over; a segment with more is attended in several launches."""
FIXED_SPLIT_TILES = 64
"""Tiles of a split in deterministic mode, where a request's result may depend on nothing but itself."""
UNBOUNDED = 1 << 30
"""A distance beyond every key, with room to add positions to it in 32 bits."""
SMALLEST_BLOCK = 16
"""Packed query rows that every tile has room for."""
LIMITS = MappingProxyType({dtype: torch.finfo(dtype).max for dtype in FP8})
"""Where stored numbers saturate."""
DEFAULT_ARCH = 80
"""Whose tiles the interpreter takes."""


def interpreting() -> bool:
    """Whether Triton runs its kernels in Python, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@attrs.frozen(eq=False)
class Prepared:
    """Launches, but for the layer's own tensors.

    Attributes:
        launches: usually one: its grid, work items * KV heads, and `attend` with the arguments that all layers share.
        tokens: of the segment; q may have more.
        stores: new keys and values are written by the launch.
    """

    launches: tuple[tuple[Grid, Launch], ...]
    tokens: int
    stores: bool


class TritonAttention(KernelProvider):
    """One kernel for every `Segment`: `faback.kernels.triton.attend`."""

    name = "triton"
    priority = 100

    def __init__(self) -> None:
        self._kernels: dict[Any, Kernel] = {}

    def probe(self, device: torch.device) -> str | None:
        if find_spec("triton") is None:
            return "the package triton is not installed"
        if device.type != "cuda" and not interpreting():
            return f"needs a CUDA device, the pools are on {device.type}"
        return None

    def capabilities(self, device: torch.device) -> Capabilities:
        return Capabilities(
            devices=frozenset({"cuda", "cpu"} if interpreting() else {"cuda"}),
            min_arch=None if interpreting() else 80,
            q_dtypes=HALF | {torch.float32},
            kv_dtypes=HALF | FP8 | {torch.float32},
            max_head_dim=576,
            features=frozenset(FEATURES),
        )

    def reject(self, request: KernelRequest, device: torch.device) -> tuple[Rejection, ...]:
        found = list(super().reject(request, device))
        wide = torch.float32
        if request.kv_dtype == wide and request.q_dtype != wide:
            found.append(Rejection(self.name, "dtypes", f"{request.q_dtype} queries on float32 keys", "equal dtypes"))
        if request.arch and request.arch < 89 and request.kv_dtype == torch.float8_e4m3fn:
            found.append(Rejection(self.name, "kv dtype", "float8_e4m3fn", "e4m3 from sm_89 on", "e5m2 runs on sm_80"))
        return tuple(found)

    def prepare(self, segment: Segment, layer: LayerKind, request: KernelRequest, ws: Workspace) -> Prepared:
        parts = _parts(segment)
        rounds = request.kv_dtype in FP8 and interpreting()  # the interpreter casts to 8 bits in a way of its own
        stores = len(parts) == 1 and not rounds and _stores(segment, layer)
        write = segment.write if stores else KVWrite()  # or launches would be told apart by slots that they ignore
        launches = tuple(self._launch(part, layer, request, ws, part is parts[-1], write) for part in parts)
        return Prepared(launches, segment.tokens, stores)

    def stores(self, prepared: Prepared) -> bool:
        return prepared.stores

    def _launch(
        self, segment: Segment, layer: LayerKind, request: KernelRequest, ws: Workspace, last: bool, write: KVWrite
    ) -> tuple[Grid, Launch]:
        """Grid and launch of some rows, new keys going where `write` says; the last bring the tokens behind them."""
        heads, reach = layer.num_kv_heads, _reach(segment)
        deterministic = "deterministic" in request.features
        shape = Shape(
            packed_rows=segment.max_seqlen_q * layer.group_size,
            head_dim=layer.head_dim,
            v_head_dim=layer.v_head_dim,
            itemsize=request.q_dtype.itemsize,
            kv_itemsize=request.kv_dtype.itemsize,
            pairs=segment.rows * heads,
            processors=ws.processors(),
            max_kv_len=min(segment.max_kv_len, segment.max_seqlen_q + reach),
            deterministic=deterministic,
        )
        tile = pick(shape, request.arch or DEFAULT_ARCH)
        items, target, fixed = _sizes(segment, layer, tile, deterministic, ws)
        args = _segment_args(segment, ws)
        tokens = segment.tokens if last else 0
        args |= {"rows": segment.rows, "tokens": tokens, "target": target, "reach": reach}
        args |= {"scale": layer.scale, "softcap": layer.softcap}
        args |= {"write_slots": write.slots, "write_map": write.slot_map}
        v_block = power_of_two(layer.v_head_dim)
        splittable = items > _blocks(segment, layer, tile)
        # Only splits leave something behind, and a block has two from 1.5 times its share of `target` on: rounding adds
        # a third at most.
        held = items if fixed else min(items, 4 * target // 3 + 1)
        slots = held * heads if splittable else 1
        lines = _lines(segment, layer, tile)
        args["partial_acc"] = ws.scratch("partial_acc", slots * lines * v_block, torch.float32)
        args["partial_ml"] = ws.scratch("partial_ml", slots * lines * 2, torch.float32)
        args["arrivals"] = ws.scratch("arrivals", slots, torch.int32)
        kernel = self._kernel(layer, request, tile, _traits(segment, fixed, lines))
        return (items * heads, 1, 1), kernel.bound(args)

    def _kernel(self, layer: LayerKind, request: KernelRequest, tile: Tile, traits: dict[str, Any]) -> Kernel:
        """`attend` with its constants, which many plans share."""
        from faback.kernels.triton.attend import attend

        key = layer, request.q_dtype, request.kv_dtype, tile, *traits.values()
        found = self._kernels.get(key)
        if found is None:
            constants = _constants(layer, request, tile, traits)
            options = {"num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": tile.registers}
            found = self._kernels[key] = Kernel(attend, constants, options)
        return found

    def run(
        self,
        prepared: Prepared,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        *,
        lse: Tensor | None = None,
        sinks: Tensor | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        new: tuple[Tensor, Tensor | None] | None = None,
    ) -> None:
        (q, q_strides), (k, k_strides), (v, v_strides) = by_token(q), by_token(k), by_token(v)
        scales, flags, factors = scale_args(k_scale, v_scale)
        strides = (*q_strides, *k_strides, *v_strides, *out.stride()[:2])
        # Where it is not needed, 64-bit arithmetic costs instructions, a quarter of the loop that decodes one request.
        (tokens, heads), (k_token, k_head), (v_token, v_head) = k.shape[:2], k_strides, v_strides
        far = max(tokens * k_token + heads * k_head, tokens * v_token + heads * v_head) > WIDEST
        new_k, new_v, new_strides = (None, None, (0, 0, 0, 0)) if new is None else pair_by_token(*new)
        numbers = (*flags, far, *strides, *new_strides, 0 if lse is None else lse.stride(0))
        for grid, launch in prepared.launches:
            launch(grid, (q, k, v, out, lse, sinks, *scales, new_k, new_v), numbers, factors)
        if out.shape[0] > prepared.tokens:
            out[prepared.tokens :].zero_()
            if lse is not None:
                lse[prepared.tokens :].fill_(-torch.inf)


def _stores(segment: Segment, layer: LayerKind) -> bool:
    """Whether each new token is a row's only query and last key, so that one program of a head has to do with it."""
    view, slots = segment.kv, segment.write.slots
    if view is None or view.dense or view.shard is not None or slots is None or not slots.is_contiguous():
        return False
    decoding = segment.max_seqlen_q == 1 and segment.rows == segment.tokens == slots.shape[0] and segment.q_len is None
    return decoding and segment.tail is None and segment.visibility.causal and layer.group_size <= SMALLEST_BLOCK


def _parts(segment: Segment) -> list[Segment]:
    """The segment, a few thousand rows at a time; queries stay where they are."""
    most = MAX_PLANNED_ROWS - 1  # besides the tokens behind the last row
    if segment.rows <= most:
        return [segment]
    return [_rows(segment, first, min(most, segment.rows - first)) for first in range(0, segment.rows, most)]


def _rows(segment: Segment, first: int, count: int) -> Segment:
    """Some rows of a segment."""

    def cut(tensor: Tensor | None, more: int = 0) -> Any:
        return None if tensor is None else tensor[first : first + count + more]

    view, tail, rule = segment.kv, segment.tail, segment.visibility
    if view is not None:
        view = attrs.evolve(view, req_pool_indices=cut(view.req_pool_indices), start=cut(view.start))
    if tail is not None:
        tail = attrs.evolve(tail, lens=cut(tail.lens), slots=tail.slots if tail.per_query else cut(tail.slots))
    return attrs.evolve(
        segment,
        rows=count,
        cu_seqlens_q=cut(segment.cu_seqlens_q, 1),
        cu_seqlens_k=cut(segment.cu_seqlens_k, 1),
        kv_len=cut(segment.kv_len),
        q_len=cut(segment.q_len),
        kv=view,
        tail=tail,
        visibility=attrs.evolve(rule, keep=cut(rule.keep), row_window=cut(rule.row_window)),
    )


def _sizes(segment: Segment, layer: LayerKind, tile: Tile, deterministic: bool, ws: Workspace) -> tuple[int, int, int]:
    """Bound of the work items of one KV head, how many the plan aims at, and tiles per split if that is fixed."""
    blocks = _blocks(segment, layer, tile)
    if deterministic:
        tiles = -(-max(1, segment.max_kv_len) // tile.block_n)
        return blocks * -(-tiles // FIXED_SPLIT_TILES), 1, FIXED_SPLIT_TILES
    processors = ws.processors()
    target = max(1, -(-processors * tile.waves // layer.num_kv_heads))
    longest = -(-max(1, segment.max_kv_len) // (2 * tile.block_n))
    return min(blocks + target, blocks * longest), target, 0


def _blocks(segment: Segment, layer: LayerKind, tile: Tile) -> int:
    """Bound of the blocks of queries, those of the tokens behind the last row included."""
    return -(-segment.tokens * layer.group_size // tile.block_m) + segment.rows + 1


def _lines(segment: Segment, layer: LayerKind, tile: Tile) -> int:
    """Rows of a block that can hold queries."""
    return min(tile.block_m, power_of_two(segment.max_seqlen_q * layer.group_size, least=1))


def _reach(segment: Segment) -> int:
    """How many keys besides its own queries a row can see at most."""
    rule = segment.visibility
    if rule.keep is not None:
        return UNBOUNDED
    return min(_bounded(rule.window[0]), _bounded(rule.chunk)) if rule.causal else UNBOUNDED


def _bounded(distance: int | None) -> int:
    """A distance to which positions can be added in 32 bits."""
    return UNBOUNDED if distance is None else min(distance, UNBOUNDED)


def _segment_args(segment: Segment, ws: Workspace) -> dict[str, Any]:
    """The segment's tensors and numbers, as the kernel names them; None for what it has not."""
    view, tail, rule = segment.kv, segment.tail, segment.visibility
    shard, shards = (0, 1) if view is None or view.shard is None else view.shard
    offsets = segment.cu_seqlens_q if segment.cu_seqlens_k is None else segment.cu_seqlens_k
    tails = None if tail is None else tail.slots
    bits = None if tail is None or tail.mask is None else tail.bits
    if tail is not None and tail.mask is not None and bits is None:
        shape = (segment.tokens, -(-tail.size // 32))
        bits = ws.fill("tail_bits", shape, ws.ops.pack, tail.mask)
    return {
        "cu_seqlens_q": segment.cu_seqlens_q,
        "q_len": segment.q_len,
        "kv_len": segment.kv_len,
        "positions": segment.positions,
        "req_to_token": None if view is None else view.req_to_token,
        "req_pool_indices": None if view is None else view.req_pool_indices,
        "start": None if view is None else view.start,
        "slot_map": None if view is None else view.slot_map,
        "cu_seqlens_k": offsets if view is None else None,
        "keep": rule.keep,
        "row_window": rule.row_window,
        "tail_lens": None if tail is None else tail.lens,
        "tail_slots": tails,
        "tail_bits": bits,
        "tail_positions": None if tail is None else tail.positions,
        "table_row": 0 if view is None else view.req_to_token.stride(0),
        "tail_row": 0 if tails is None else tails.stride(0),
        "words": 0 if bits is None else bits.shape[1],
        "left": _bounded(rule.window[0]),
        "right": _bounded(rule.window[1]),
        "chunk": _bounded(rule.chunk),
        "shard": shard,
        "shards": shards,
    }


def _traits(segment: Segment, fixed: int, lines: int) -> dict[str, Any]:
    """The constants of `attend` that depend on the segment."""
    rule, tail, view = segment.visibility, segment.tail, segment.kv
    return {
        "ROWS": power_of_two(segment.rows + 1),
        "FIXED_SPLIT": fixed,
        "LINES": lines,
        "KEY_ROWS": view is not None and not view.dense,
        **page_constants(view),
        "CAUSAL": rule.causal,
        "HAS_LEFT": rule.window[0] is not None or rule.row_window is not None,
        "HAS_RIGHT": rule.window[1] is not None,
        "HAS_CHUNK": rule.chunk is not None,
        "COMMITTED": segment.committed,
        "HAS_TAIL": tail is not None,
        "PER_QUERY": tail is not None and tail.per_query,
    }


def _constants(layer: LayerKind, request: KernelRequest, tile: Tile, traits: dict[str, Any]) -> dict[str, Any]:
    """All constants of `attend`."""
    main = max(16, power_of_two(layer.head_dim + 1) // 2)
    rest = max(0, layer.head_dim - main)
    v_block = power_of_two(layer.v_head_dim)
    # Splits are merged one at a time where the sum must not depend on how many lie before a request's own.
    merge = 1 if traits["FIXED_SPLIT"] else min(64, max(1, 2048 * tile.warps // (traits["LINES"] * v_block)))
    return traits | {
        "GROUP": layer.group_size,
        "DK": layer.head_dim,
        "DR": rest,
        "DV": layer.v_head_dim,
        "K_MAIN": main,
        "K_REST": power_of_two(rest),
        "V_BLOCK": v_block,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "MERGE": merge,
        "HEADS": layer.num_kv_heads,
        "HEADS_FIRST": tile.heads_first,
        "SPREAD": tile.block_m <= 32 and tile.warps > 1 and not traits["PER_QUERY"],
        "HAS_SOFTCAP": layer.softcap > 0,
        "SHARE_KV": layer.latent and layer.v_head_dim == main == v_block,
        "FP32": request.q_dtype == torch.float32,
        "UPCAST": interpreting(),
        "FP8": request.kv_dtype in FP8 and request.q_dtype != torch.float32,
        "LIMIT": LIMITS.get(request.kv_dtype, 0.0),
    }


def page_constants(view: KVView | None) -> dict[str, int]:
    """How `rules.slots_of` reads a table: pages of a block table, or slots."""
    if view is None or view.page_stride is None:
        return {"PAGE": 1, "STRIDE": 0}
    return {"PAGE": view.page_size, "STRIDE": view.page_stride}


def by_token(x: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """A tensor [tokens, heads, dim] whose dims lie together, copied if need be, and its other strides."""
    token, head, one = x.stride()
    if one != 1:
        x = x.contiguous()
        token, head, _ = x.stride()
    return x, (token, head)


def pair_by_token(k: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor | None, tuple[int, int, int, int]]:
    """New keys and values `by_token`, and the strides of both."""
    k, k_strides = by_token(k)
    if v is None:
        return k, None, (*k_strides, 0, 0)
    v, v_strides = by_token(v)
    return k, v, (*k_strides, *v_strides)


Scales = tuple[tuple[Tensor | None, Tensor | None], tuple[int, int], tuple[float, float]]


def scale_args(k_scale: float | Tensor | None, v_scale: float | Tensor | None) -> Scales:
    """Two scales as the kernels take them: tensors, whether these have a value for each head, and plain factors."""
    if k_scale is None and v_scale is None:
        return (None, None), (0, 0), (1.0, 1.0)
    tensors, flags, factors = zip(*(_scale(scale) for scale in (k_scale, v_scale)), strict=True)
    return tensors, flags, factors


def _scale(scale: float | Tensor | None) -> tuple[Tensor | None, int, float]:
    if isinstance(scale, Tensor):
        return scale, int(scale.numel() > 1), 1.0
    return None, 0, 1.0 if scale is None else float(scale)


@hookimpl
def faback_kernels(device: torch.device) -> list[KernelProvider]:
    return [TritonAttention()]
