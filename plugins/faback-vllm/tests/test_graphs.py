"""Full CUDA graphs, played on a CPU: what a recorded kernel reads must be up to date after vLLM's next `build`.

vLLM plans for static tensors once (`build_for_cudagraph_capture`), records the layers' calls, and later writes the next
batch into the same tensors, calls `build`, and replays. Here the calls are made again, with the metadata of the capture
and kernels that look at the device only when they run (`faback.testing.late`).
"""

import late_kernels
import pytest
import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm_static import Static, captured
from vllm_world import World, layer

from faback.builtins import BUILTINS
from faback_vllm.backend import FabackAttentionBackend

SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])


@pytest.fixture(autouse=True)
def _capturable(monkeypatch):
    for module in ("faback.core.backend", "faback_vllm.builder"):
        monkeypatch.setattr(f"{module}.BUILTINS", (*BUILTINS, late_kernels.__name__))


def layers():
    return [
        layer("plain"),
        layer("window", sliding_window=5),
        layer("all", sliding_window=9, sinks=SINKS, logits_soft_cap=3.0),
    ]


@pytest.mark.parametrize("kernel", late_kernels.NAMES)
@pytest.mark.parametrize("order", ["LBNHC", "LBHNC", "apart"])
def test_replays(kernel, order):
    """Decoding, verification of drafts, and mixed batches, each in a graph of its size, padded or not."""
    world = World(layers(), order=order, kernels=kernel)
    static = Static(world)
    decode = captured(world, static, 4, 4, 1)
    verify = captured(world, static, 3, 12, 4)
    mixed = captured(world, static, 4, 24, 24)
    a, b, c = world.add(), world.add(), world.add()

    def replay(metadata, new, requests, tokens, most):
        common = static.common(new, requests, tokens, most)
        world.builder.build(0, common)
        world.attend(metadata, common, new)

    replay(mixed, [(a, 20), (b, 3)], 4, 24, 20)
    replay(decode, [(b, 1), (a, 1)], 4, 4, 1)
    replay(mixed, [(a, 1), (c, 17), (b, 2)], 4, 24, 17)
    replay(verify, [(c, 4), (a, 4), (b, 4)], 3, 12, 4)
    replay(verify, [(c, 2), (b, 4)], 3, 12, 4)
    replay(decode, [(a, 1), (b, 1), (c, 1)], 4, 4, 1)
    replay(decode, [], 4, 4, 0)


def test_metadata_that_is_not_filled_again_is_noticed(monkeypatch):
    """The test above can fail."""
    from faback.core.graphs import Captured

    world = World(layers(), kernels="poor")
    static = Static(world)
    decode = captured(world, static, 4, 4, 1)
    a = world.add()
    world.step([(a, 20)])
    monkeypatch.setattr(Captured, "load", lambda self, batch: None)
    common = static.common([(a, 1)], 4, 4, 1)
    world.builder.build(0, common)
    with pytest.raises(AssertionError):
        world.attend(decode, common, [(a, 1)])


def test_one_size_may_have_two_graphs():
    """Four decoding requests, and any mixture of four tokens: both are kept up to date."""
    world = World(layers(), kernels="poor")
    static = Static(world)
    mixed = captured(world, static, 4, 4, 4)
    decode = captured(world, static, 4, 4, 1)
    a, b = world.add(), world.add()
    for metadata, new in [
        (mixed, [(a, 3), (b, 1)]),
        (decode, [(a, 1), (b, 1)]),
        (mixed, [(a, 1), (b, 1)]),
        (mixed, [(b, 4)]),
    ]:
        common = static.common(new, 4, 4, max(count for _, count in new))
        found = world.builder.build(0, common)
        assert found.plan is (decode if common.max_query_len == 1 else mixed).plan
        world.attend(metadata, common, new)


def test_two_graphs_of_one_size_share_no_memory():
    """One build brings both up to date; vLLM replays either."""
    world = World(layers(), kernels="poor")
    static = Static(world)
    plans = [captured(world, static, 4, 4, most).plan for most in (4, 1)]
    mixed, decode = ({made.data_ptr() for made, _ in plan.ws._filled.values()} for plan in plans)
    assert mixed and decode and mixed.isdisjoint(decode)
    again = captured(world, static, 4, 4, 1).plan
    other = captured(world, static, 2, 3, 3).plan
    found = [{made.data_ptr() for made, _ in plan.ws._filled.values()} for plan in (again, other)]
    assert found[0] == decode, "captured anew, in the same memory"
    assert found[1] & mixed, "sizes share their memory"


def test_a_batch_in_other_tensors_leaves_the_captured_ones_alone():
    world = World(layers(), kernels="poor")
    static = Static(world)
    decode = captured(world, static, 2, 2, 1)
    before = {name: tensor.clone() for name, tensor in static.tensors.items()}
    world.add(), world.add()
    world.step([(0, 3), (1, 4)])
    common = world.common([(0, 1), (1, 1)])
    found = world.builder.build(0, common)
    assert found.plan is not decode.plan
    world.attend(found, common, [(0, 1), (1, 1)])
    assert all(torch.equal(before[name], tensor) for name, tensor in static.tensors.items())


def test_what_vllm_is_told():
    cls = FabackAttentionBackend.get_builder_cls()
    world = World([layer("a")])
    config = world.vllm_config
    config.additional_config = {"faback": {"kernels": "late reference"}}
    assert cls.get_cudagraph_support(config, None) == AttentionCGSupport.ALWAYS
    config.additional_config = {"faback": {"kernels": "reference"}}
    assert cls.get_cudagraph_support(config, None) == AttentionCGSupport.NEVER
    config.additional_config = {}
    assert cls.get_cudagraph_support(config, None) == AttentionCGSupport.ALWAYS
