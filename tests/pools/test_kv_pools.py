"""What MHAPool, MLAPool and HybridPool have in common, and what each adds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from faback.core.errors import ConfigError, PoolError
from faback.core.layer import AttentionLayer
from faback.core.pools import KVPool, Pools
from faback.pools import HybridPool, MHAPool, MLAPool, ReqToTokenPool

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]


def layer(layer_id: int, heads: int = 2, dim: int = 8, v_dim: int = 8, group: str = "full") -> AttentionLayer:
    return AttentionLayer(
        layer_id=layer_id, num_q_heads=2 * heads, num_kv_heads=heads, head_dim=dim, v_head_dim=v_dim, kv_group=group
    )


PLAIN = [layer(0), layer(3, heads=1, dim=12, v_dim=4)]
LATENT = [layer(0, heads=1, dim=10, v_dim=8), layer(1, heads=1, dim=10, v_dim=8)]
MIXED = [layer(0), layer(1, heads=1, dim=12, v_dim=4, group="window")]


def mha(**changes: Any) -> MHAPool:
    return MHAPool(**{"num_pages": 5, "page_size": 4, "layers": PLAIN, "dtype": torch.float32, **changes})


def mla(**changes: Any) -> MLAPool:
    return MLAPool(**{"num_pages": 5, "page_size": 4, "layers": LATENT, "dtype": torch.float32, **changes})


def hybrid(**changes: Any) -> HybridPool:
    sizes = {"num_pages": 9, "num_window_pages": 5, "page_size": 4}
    return HybridPool(**{**sizes, "layers": MIXED, "dtype": torch.float32, **changes})


ALL = {"mha": mha, "mla": mla, "hybrid": hybrid}
every_pool = pytest.mark.parametrize("make", ALL.values(), ids=list(ALL))


def number(pool: Any) -> None:
    """Makes each slot hold its own number, in every layer's keys and, with a minus, values."""
    for item in pool.layers:
        k, v = pool.buffers(item)
        k.copy_(torch.arange(k.shape[0], device=k.device)[:, None, None].expand(k.shape).to(k.dtype))
        if not isinstance(pool, MLAPool):
            v.copy_((-k.float()[:, :1, :1]).to(v.dtype).expand(v.shape))


@every_pool
def test_pools_satisfy_the_protocol(make: Any) -> None:
    pool: KVPool = make()
    assert isinstance(pool, KVPool)
    assert Pools(req_to_token=ReqToTokenPool(2, 8).req_to_token, kv=pool).device == torch.device("cpu")
    assert pool.num_slots % pool.page_size == 0


@every_pool
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_storage_dtype_shapes_bytes_and_padding_page(make: Any, dtype: torch.dtype) -> None:
    pool = make(dtype=dtype)
    total = 0
    for item in pool.layers:
        k, v = pool.buffers(item)
        slots = 20 if item.kv_group == "window" else pool.num_slots
        assert k.dtype == v.dtype == pool.dtype(item.kind) == dtype
        assert k.shape == (slots, item.num_kv_heads, item.head_dim)
        assert v.shape == (slots, item.num_kv_heads, item.v_head_dim)
        assert k.stride(-1) == v.stride(-1) == 1
        assert not k[: pool.page_size].float().any()
        assert not v[: pool.page_size].float().any()
        elements = k.numel() if isinstance(pool, MLAPool) else k.numel() + v.numel()
        total += elements * dtype.itemsize
    assert pool.bytes == total


@every_pool
def test_buffers_are_the_storage_itself(make: Any) -> None:
    pool = make()
    first, second = pool.layers
    pool.buffers(first)[0].fill_(1)
    pool.buffers(second)[0].fill_(2)
    assert bool((pool.buffers(first)[0] == 1).all())
    assert bool((pool.buffers(second)[0] == 2).all())


@every_pool
def test_unknown_layers_groups_and_heads_are_refused(make: Any) -> None:
    pool = make()
    known = pool.layers[0]
    with pytest.raises(ConfigError, match=r"layer 7 in .*wanted a layer id among \[0"):
        pool.buffers(layer(7))
    with pytest.raises(ConfigError, match="num_kv_heads, head_dim, v_head_dim"):
        pool.buffers(layer(0, heads=known.num_kv_heads, dim=known.head_dim + 8, v_dim=known.v_head_dim))
    with pytest.raises(ConfigError, match="group: wanted 'full'"):
        pool.buffers(layer(0, group="chunks"))
    with pytest.raises(ConfigError, match="group: wanted 'full'"):
        pool.slot_map("chunks")
    assert pool.slot_map("full") is None


@every_pool
@pytest.mark.parametrize(
    "changes",
    [
        {"num_pages": 1},
        {"page_size": 0},
        {"page_size": 2.0},
        {"dtype": torch.int8},
        {"dtype": "float16"},
        {"layers": []},
        {"layers": [LATENT[0], LATENT[0]]},
        {"layers": [layer(0, heads=1, dim=10, v_dim=8, group="chunks")]},
        {"num_pages": 2**29},
    ],
    ids=str,
)
def test_what_cannot_be_a_pool_is_refused(make: Any, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make(**changes)


def test_only_the_hybrid_pool_has_a_window_group() -> None:
    for make in (mha, mla):
        with pytest.raises(ConfigError, match="HybridPool"):
            make().slot_map("window")
        with pytest.raises(ConfigError, match="HybridPool"):
            make(layers=[layer(0, heads=1, dim=10, v_dim=8, group="window")])
    with pytest.raises(ConfigError, match="num_window_pages"):
        hybrid(num_window_pages=1)
    with pytest.raises(ConfigError, match="a layer id among"):
        hybrid().buffers(layer(0, group="window"))


@pytest.mark.parametrize("sizes", [(2, 10, 8), (1, 10, 10), (1, 8, 10)])
def test_mla_takes_absorbed_layers_only(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="MLAPool layer 0: wanted num_kv_heads=1, head_dim=latent"):
        mla(layers=[layer(0, *sizes)])


def test_mla_values_are_the_leading_part_of_the_keys() -> None:
    pool = mla()
    k, v = pool.buffers(LATENT[1])
    assert v.data_ptr() == k.data_ptr()
    v.fill_(5)
    k[..., 8:] = 7
    assert bool((k[..., :8] == 5).all())
    assert bool((v == 5).all())


@pytest.mark.parametrize("make", [mha, mla], ids=["mha", "mla"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index", [list, torch.int32, torch.int64], ids=str)
def test_copy_slots_reads_all_before_it_writes(make: Any, dtype: torch.dtype, index: Any) -> None:
    pool = make(dtype=dtype)
    number(pool)
    src, dst = [5, 6, 7, 5], [6, 7, 5, 12]
    args = (src, dst) if index is list else (torch.tensor(src, dtype=index), torch.tensor(dst, dtype=index))
    pool.copy_slots(*args)
    expected = list(range(20))
    for a, b in zip(src, dst, strict=True):
        expected[b] = a
    wanted = torch.tensor(expected, dtype=torch.float32)[:, None, None].to(dtype)
    for item in pool.layers:
        k, v = pool.buffers(item)
        assert torch.equal(k.float(), wanted.float().expand(k.shape))
        assert torch.equal(v.float().abs(), wanted.float().expand(v.shape))


@every_pool
@pytest.mark.parametrize(
    ("src", "dst"), [([4], [5, 6]), ([4], [99]), ([99], [4]), ([-1], [4]), ([4], [-1]), ([4, 5], [6, 6]), ([4.0], [5])]
)
def test_wrong_copies_raise_and_change_nothing(make: Any, src: list[int], dst: list[int]) -> None:
    pool = make()
    number(pool)
    before = [buffer.clone() for item in pool.layers for buffer in pool.buffers(item)]
    with pytest.raises(PoolError, match="copy_slots"):
        pool.copy_slots(src, dst)
    after = [buffer for item in pool.layers for buffer in pool.buffers(item)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_copy_reaches_past_two_billion_elements() -> None:
    """One buffer of more than 2^31 elements; untouched memory costs nothing on the CPU."""
    slots = 2**31 // 576 + 1000
    wide = AttentionLayer(layer_id=0, num_q_heads=1, num_kv_heads=1, head_dim=576, v_head_dim=512)
    pool = MLAPool(num_pages=slots, layers=[wide], dtype=torch.float8_e4m3fn)
    k, _ = pool.buffers(wide)
    assert k.numel() > 2**31
    first = torch.linspace(-2, 2, 576).to(k.dtype)
    k[1, 0] = first
    pool.copy_slots([1, slots - 1 - 7], [slots - 1, 2])
    pool.copy_slots([slots - 1], [3])
    assert torch.equal(k[slots - 1, 0].view(torch.uint8), first.view(torch.uint8))
    assert torch.equal(k[3, 0].view(torch.uint8), first.view(torch.uint8))
