"""Kernels that write new keys and values themselves: when they are asked to, and when it is done for them."""

import attrs
import pytest
import torch

from core.test_backend import Halves, Point
from faback import BatchError
from faback.kernels.reference import Reference
from faback.modes.decode import Decode


class Storing(Reference):
    """Writes new keys itself, and counts how often."""

    name, priority = "storing", 200

    def __init__(self):
        super().__init__()
        self.stored = []

    def prepare(self, segment, layer, request, ws):
        return super().prepare(segment, layer, request, ws), segment.write, ws.ops

    def stores(self, prepared):
        return prepared[1].slots is not None

    def run(self, prepared, q, k, v, out, *, new=None, k_scale=None, v_scale=None, **options):
        inner, write, ops = prepared
        if new is not None:
            self.stored.append(len(new[0]))
            ops.set_kv(*new, k, v, write, k_scale, v_scale)
        super().run(inner, q, k, v, out, k_scale=k_scale, v_scale=v_scale, **options)


def test_a_kernel_may_write_new_keys_itself(world, layer):
    kernel = Storing()
    made = world([layer()], [5, 7], [2, 3], page_size=4, points=[Point(faback_kernels=[kernel])])
    one = made.layers[0]
    wanted = world([layer()], [5, 7], [2, 3], page_size=4)
    out = made.run(one)
    assert kernel.stored == [5] and torch.equal(out, wanted.run(wanted.layers[0]))
    caches = zip(made.pool.buffers(one), wanted.pool.buffers(wanted.layers[0]), strict=True)
    assert all(torch.equal(a.nan_to_num(9), b.nan_to_num(9)) for a, b in caches)
    assert torch.equal(made.backend.forward(made.q[one.layer_id], None, None, one, save_kv_cache=False), out)
    assert kernel.stored == [5]


def test_write_kv_writes_whoever_attends(world, layer):
    kernel = Storing()
    made = world([layer()], [5], [2], points=[Point(faback_kernels=[kernel])])
    made.backend.plan(made.batch())
    made.backend.write_kv(*made.fresh(made.layers[0]), made.layers[0])
    slots = made.batch().out_cache_loc
    assert torch.equal(made.pool.buffers(made.layers[0])[0][slots], made.fresh(made.layers[0])[0])
    assert kernel.stored == []


def test_parts_do_not_write_new_keys(world, layer):
    """Each would, once for every part."""
    kernel = Storing()
    points = [Point(faback_modes=[Halves()], faback_kernels=[kernel])]
    made = world([layer()], [5, 9, 1], [1, 1, 1], points=points)
    made.backend.plan(made.batch("halves"))
    out = made.backend.forward(made.q[0], *made.fresh(made.layers[0]), made.layers[0])
    torch.testing.assert_close(out.double(), made.expected(made.layers[0])[0], atol=1e-5, rtol=0)
    assert kernel.stored == []


class Alone:
    """Ranks that tell each other nothing."""

    needs_lse = False

    def spread(self, tensor):
        return tensor

    def collect(self, out, lse, sinks):
        pass


class Shared(Decode):
    """Decode that ranks share: new keys are spread before they are written."""

    key = "shared"

    def build(self, batch, ws, ctx):
        return attrs.evolve(super().build(batch, ws, ctx), exchange=Alone())


def test_keys_that_ranks_spread_are_written_for_the_kernel(world, layer):
    kernel = Storing()
    made = world([layer()], [5, 9], [1, 1], points=[Point(faback_modes=[Shared()], faback_kernels=[kernel])])
    made.backend.plan(made.batch("shared"))
    out = made.backend.forward(made.q[0], *made.fresh(made.layers[0]), made.layers[0])
    torch.testing.assert_close(out.double(), made.expected(made.layers[0])[0], atol=1e-5, rtol=0)
    assert kernel.stored == []


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("storing", [False, True])
def test_new_keys_of_other_heads(world, layer, name, storing):
    points = [Point(faback_kernels=[Storing()])] if storing else []
    made = world([layer(6)], [4], [2], points=points)
    made.backend.plan(made.batch())
    new = dict(zip("kv", made.fresh(made.layers[0]), strict=True))
    new[name] = new[name][:, :1]
    before = [cache.clone() for cache in made.pool.buffers(made.layers[0])]
    with pytest.raises(BatchError, match=rf"{name} of layer 6: wanted \[tokens, 2, 8\], got \[2, 1, 8\]"):
        made.backend.forward(made.q[6], new["k"], new["v"], made.layers[0])
    for cache, old in zip(made.pool.buffers(made.layers[0]), before, strict=True):
        assert torch.equal(cache.nan_to_num(9), old.nan_to_num(9))
