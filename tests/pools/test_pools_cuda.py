"""The same pools on an accelerator: same slots, no waiting where lengths are on the CPU, 64-bit copies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from faback.core.errors import PoolError
from faback.core.layer import AttentionLayer
from faback.pools import HybridAllocator, HybridPool, MHAPool, MLAPool, PageAllocator, ReqToTokenPool

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_equal_those_of_the_cpu_without_waiting(dtype: torch.dtype) -> None:
    here = HybridAllocator(40, 4, num_window_pages=30)
    there = HybridAllocator(40, 4, "cuda", num_window_pages=30)
    torch.empty(1, device="cuda")
    last = here.alloc_extend([0, 0, 0], [6, 3, 8])[[5, 8, 16]]
    with no_waiting():
        first = there.alloc_extend([0, 0, 0], [6, 3, 8])
    on_device = last.to("cuda", dtype)
    with no_waiting():
        grown = there.alloc_extend([6, 3, 8], [11, 4, 8], on_device)
        decoded = there.alloc_decode([7, 9], on_device[::2])
        branches = there.alloc_branches([6, 3], on_device[:2], topk=2, num_steps=3)
        there.alloc_pages(1)
    assert first.device.type == grown.device.type == "cuda"
    assert grown.tolist() == here.alloc_extend([6, 3, 8], [11, 4, 8], last).tolist()
    assert decoded.tolist() == here.alloc_decode([7, 9], last[::2]).tolist()
    expected = here.alloc_branches([6, 3], last[:2], topk=2, num_steps=3)
    here.alloc_pages(1)
    assert branches.slots.tolist() == expected.slots.tolist()
    assert branches.copy_src.tolist() == expected.copy_src.tolist()
    assert branches.copy_dst.tolist() == expected.copy_dst.tolist()
    assert branches.copy_src.dtype == torch.int64
    assert torch.equal(there.full_to_window.cpu(), here.full_to_window)
    there.check()
    assert there.evict(first[:4]) == 4
    there.free(branches.slots)
    there.check()
    with pytest.raises(PoolError, match="double free"):
        there.free(branches.slots)


def test_checks_look_at_last_slots_on_the_device() -> None:
    wrong = torch.tensor([8], device="cuda")
    for checks in (False, True):
        pool = PageAllocator(8, 4, "cuda", checks=checks)
        pool.alloc_extend([0], [6])
        if checks:
            with pytest.raises(PoolError, match="offset 1"):
                pool.alloc_decode([7], wrong)
        else:
            pool.alloc_decode([7], wrong)


def test_request_rows_take_slots_from_either_side() -> None:
    pool = ReqToTokenPool(2, 5, "cuda")
    (row,) = pool.alloc()
    pool.write(row, 0, torch.tensor([7, 8], device="cuda"))
    pool.write(row, 2, [9])
    pool.write_tokens([row], [4], torch.tensor([11], device="cuda"))
    assert pool.req_to_token[row].tolist() == [7, 8, 9, 0, 11]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_reach_both_groups(dtype: torch.dtype) -> None:
    layers = [
        AttentionLayer(layer_id=i, num_q_heads=2, num_kv_heads=1, head_dim=8, v_head_dim=4, kv_group=group)
        for i, group in enumerate(("full", "window"))
    ]
    pool = HybridPool(num_pages=8, num_window_pages=6, page_size=2, layers=layers, dtype=dtype, device="cuda")
    spare = pool.allocator.alloc_pages(1)
    pool.allocator.evict(spare)
    src, dst = pool.allocator.alloc_pages(1), pool.allocator.alloc_pages(1)
    window = pool.slot_map("window")
    assert window is not None
    assert src.tolist() != window[src].tolist()
    for layer, translate in zip(layers, (torch.arange(16, device="cuda"), window), strict=True):
        for buffer in pool.buffers(layer):
            buffer.zero_()
            buffer[translate[src[0]]], buffer[translate[src[1]]] = 1.0, 2.0
    pool.copy_slots(src, dst)
    for layer, translate in zip(layers, (torch.arange(16, device="cuda"), window), strict=True):
        for buffer in pool.buffers(layer):
            assert buffer.float()[translate[dst], 0, -1].tolist() == [1.0, 2.0]
            assert buffer.float().sum() == 6 * buffer.shape[-1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_copy_reaches_past_two_billion_elements(kind: str, dtype: torch.dtype) -> None:
    slots = 2**31 // 576 + 1000
    wide = AttentionLayer(layer_id=0, num_q_heads=1, num_kv_heads=1, head_dim=576, v_head_dim=512)
    pool: MHAPool | MLAPool = (MHAPool if kind == "mha" else MLAPool)(
        num_pages=slots, layers=[wide], dtype=dtype, device="cuda"
    )
    k, _ = pool.buffers(wide)
    k.view(torch.uint8).zero_()
    row = torch.linspace(-2, 2, 576, device="cuda").to(dtype)
    k[1, 0] = row
    pool.copy_slots([1, slots - 8], [slots - 1, 2])
    pool.copy_slots([slots - 1], [3])
    for slot in (1, 3, slots - 1):
        assert torch.equal(k[slot, 0].float(), row.float())
    assert not k[2].float().any()
    assert int(k.view(torch.uint8)[:, 0, :80].any(-1).sum()) == 3, "a write went astray"
