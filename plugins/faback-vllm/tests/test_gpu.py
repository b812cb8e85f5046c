"""On a GPU: Triton's kernel and real CUDA graphs, in every memory order, and plans that never wait for the device."""

import pytest
import torch
from test_graphs import layers
from vllm_static import Static, captured
from vllm_world import World, layer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
ORDERS = ["LBNHC", "LBHNC", "LHBNC", "apart"]


@pytest.fixture(autouse=True)
def _on_gpu(monkeypatch):
    monkeypatch.setattr("vllm_world.TOLERANCE", 1e-3)  # sums in another order, and exp2
    with torch.device("cuda"):
        yield


def made(**options):
    found = layers()
    for one in found:
        one.impl.sinks = None if one.impl.sinks is None else one.impl.sinks.cuda()
    return World(found, **options)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("block_size", [16, 3])
def test_a_life_of_requests(order, block_size):
    world = made(order=order, block_size=block_size)
    a, b, c = world.add(), world.add(), world.add()
    for new in ([(a, 20)], [(a, 1), (b, 7)], [(b, 17), (a, 1), (c, 33)], [(a, 1), (b, 1), (c, 1)], [(c, 4), (a, 4)]):
        world.step(new)
    world.step([(a, 1), (b, 1)], padded=(2, 2), extra=3)


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e5m2"])
def test_8_bit_caches(dtype):
    world = World([layer("a", kv_cache_dtype=dtype, scales=([0.5, 2.0], [4.0, 0.25]))], order="LBHNC")
    world.add(), world.add()
    world.step([(0, 20), (1, 3)])
    world.step([(0, 1), (1, 6)])


def test_a_prefix_in_common():
    world = made()
    a, b = world.add(), world.add()
    world.step([(a, 32)])
    world.tables[b], world.texts[b] = list(world.tables[a]), dict(world.texts[a])
    world.step([(a, 4), (b, 1)], prefix=32)


@pytest.mark.parametrize("order", ORDERS)
def test_plans_do_not_wait(order):
    world = made(order=order)
    a, b = world.add(), world.add()
    world.step([(a, 20), (b, 3)])
    common = world.common([(a, 1), (b, 4)])
    torch.cuda.set_sync_debug_mode("error")
    try:
        metadata = world.builder.build(0, common)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    world.attend(metadata, common, [(a, 1), (b, 4)])


@pytest.mark.parametrize("order", ORDERS)
def test_cuda_graphs(order):
    """Decoding and mixed batches, each layer's call recorded once."""
    world = made(order=order)
    static = Static(world)
    recorded = {size: Recorded(world, static, *size) for size in ((4, 24, 24), (4, 4, 1))}
    a, b, c = world.add(), world.add(), world.add()
    for new, size in [
        ([(a, 20), (b, 3)], (4, 24, 24)),
        ([(a, 1), (b, 1)], (4, 4, 1)),
        ([(c, 17), (a, 4), (b, 2)], (4, 24, 24)),
        ([(c, 1), (a, 1), (b, 1)], (4, 4, 1)),
    ]:
        common = static.common(new, size[0], size[1], max(count for _, count in new))
        world.builder.build(0, common)
        world.attend(None, common, new, run=recorded[size].replay)


class Recorded:
    """One graph for each layer, over static q, k, v and out."""

    def __init__(self, world, static, requests, tokens, most):
        metadata = captured(world, static, requests, tokens, most)
        self.held, self.graphs = {}, {}
        for one in world.layers:
            heads, kv_heads, dim = one.impl.num_heads, one.impl.num_kv_heads, one.impl.head_size
            held = self.held[one.layer_name] = [torch.zeros(tokens, n, dim) for n in (heads, kv_heads, kv_heads, heads)]
            q, k, v, out = held

            def call(one=one, q=q, k=k, v=v, out=out):
                one.impl.forward(one, q, k, v, one.kv_cache, metadata, out)

            call()  # compiles
            torch.cuda.synchronize()
            graph = self.graphs[one.layer_name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()

    def replay(self, one, q, k, v, out):
        held = self.held[one.layer_name]
        for mine, fresh in zip(held, (q, k, v), strict=False):
            mine.copy_(fresh)
        self.graphs[one.layer_name].replay()
        out.copy_(held[3])
