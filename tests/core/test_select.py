"""Which kernel serves a request, which lowerings it takes, and every reason against the others."""

import attrs
import pytest
import torch

from faback import BackendConfig, ConfigError, NoKernelError, hookimpl
from faback.core.contracts import Lowering
from faback.core.kernel import Capabilities, KernelProvider, KernelRequest
from faback.core.registry import Registry
from faback.core.select import Selector

CPU = torch.device("cpu")


class Kernel(KernelProvider):
    """A kernel with the given features that runs nothing."""

    def __init__(self, name, *features, priority=0, absent=None, **limits):
        self.name, self.priority, self._absent = name, priority, absent
        dtypes = {"q_dtypes": frozenset({torch.float32}), "kv_dtypes": frozenset({torch.float32})}
        fields = {"devices": frozenset({"cpu"}), **dtypes, **limits}
        self._can = Capabilities(features=frozenset(features), **fields)
        self.asked = 0

    def probe(self, device):
        return self._absent

    def capabilities(self, device):
        return self._can

    def reject(self, request, device):
        self.asked += 1
        return super().reject(request, device)

    def prepare(self, segment, layer, request, ws):
        raise AssertionError

    run = prepare


class Drop(Lowering):
    """Takes one feature away and leaves the given ones; in as many parts as there are tuples of them."""

    def __init__(self, feature, *parts, priority=0, key=None):
        self.key, self.removes, self.priority = key or f"drop_{feature}", frozenset({feature}), priority
        self._parts = parts or ((),)
        self.merges = len(self._parts) > 1
        self.calls = 0

    def becomes(self, request):
        self.calls += 1
        left = request.features - self.removes
        return tuple(attrs.evolve(request, features=left | frozenset(new)) for new in self._parts)

    def lower(self, segment, ws, ctx):
        raise AssertionError


class Plugin:
    def __init__(self, hooks):
        vars(self).update(hooks)


def selector(providers, lowerings=(), rank=None, **options):
    hooks = {
        "faback_kernels": hookimpl(lambda: providers),
        "faback_lowerings": hookimpl(lambda: lowerings),
        **({} if rank is None else {"faback_rank": hookimpl(rank)}),
    }
    config = BackendConfig(context_len=8, dtype=torch.float32, **options)
    registry = Registry.load(config, (), ())
    registry.register(Plugin(hooks), "test")
    return Selector(config, registry, CPU)


def ask(*features, **changes):
    base = {"forward_mode": "decode", "device": "cpu", "arch": 0, "q_dtype": torch.float32, "kv_dtype": torch.float32}
    sizes = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "v_head_dim": 64, "page_size": 1}
    return KernelRequest(**{**base, **sizes, "features": frozenset(features), **changes})


def test_priority_then_name():
    assert str(selector([Kernel("a"), Kernel("b", priority=1)]).route(ask())) == "b"
    assert str(selector([Kernel("b"), Kernel("a")]).route(ask())) == "a"
    assert str(selector([Kernel("a"), Kernel("b", "tree", priority=-1)]).route(ask("tree"))) == "b"


def test_each_limit_is_a_reason_of_its_own():
    kernel = Kernel(
        "narrow",
        devices=frozenset({"cuda"}),
        min_arch=90,
        q_dtypes=frozenset({torch.float16}),
        kv_dtypes=frozenset({torch.bfloat16}),
        mixed_dtypes=False,
        max_head_dim=32,
        head_dim_multiple=48,
        unequal_head_dims=False,
        page_multiple=16,
    )
    request = ask("tree", "sinks", v_head_dim=80, kv_dtype=torch.float16)
    with pytest.raises(NoKernelError) as caught:
        selector([kernel, Kernel("other")]).route(request)
    text = str(caught.value)
    for aspect in ("device", "architecture", "q dtype", "kv dtype", "dtypes", "head dim", "page size", "feature"):
        assert f"narrow: {aspect}: wanted" in text
    for part in ("up to 32", "multiples of 48", "equal dims", "multiples of 16", "sm_0", "64/80", "tree", "sinks"):
        assert part in text
    assert sum("narrow:" in r for r in caught.value.reasons) == 11
    assert sum("other:" in r for r in caught.value.reasons) == 3


@pytest.mark.parametrize(
    ("limits", "fits", "misses"),
    [
        ({"max_head_dim": 64}, {"head_dim": 64, "v_head_dim": 64}, {"v_head_dim": 65}),
        ({"head_dim_multiple": 16}, {"head_dim": 48}, {"head_dim": 40}),
        ({"page_multiple": 16}, {"page_size": 32}, {"page_size": 24}),
        ({"page_multiple": 16}, {"page_size": 1, "features": frozenset({"raw_kv"})}, {"page_size": 1}),
        ({"unequal_head_dims": False}, {}, {"v_head_dim": 32}),
        ({"min_arch": 80, "max_arch": 90}, {"arch": 90}, {"arch": 100}),
        ({"min_arch": 80, "max_arch": 90}, {"arch": 80}, {"arch": 75}),
    ],
)
def test_limits_are_inclusive(limits, fits, misses):
    kernel = Kernel("k", "raw_kv", **limits)
    assert kernel.reject(ask(**fits) if "arch" in fits or "min_arch" not in limits else ask(arch=80, **fits), CPU) == ()
    (only,) = kernel.reject(ask(**misses), CPU)
    assert only.kernel == "k" and only.wanted and only.supported


def test_absent_kernels_are_reported():
    chosen = selector([Kernel("gone", absent="flash_attn is not installed"), Kernel("here")])
    assert chosen.absent == {"gone": "flash_attn is not installed"}
    assert str(chosen.route(ask())) == "here"
    with pytest.raises(NoKernelError, match="gone: not available here: flash_attn is not installed"):
        chosen.route(ask("tree"))


def test_a_pinned_kernel_never_falls_back():
    chosen = selector([Kernel("plain"), Kernel("able", "tree", priority=9)], kernels="plain")
    assert str(chosen.route(ask())) == "plain"
    with pytest.raises(NoKernelError) as caught:
        chosen.route(ask("tree"))
    assert all(reason.startswith("plain:") for reason in caught.value.reasons)
    assert "pins" in caught.value.hint


def test_an_unknown_pinned_kernel_lists_the_known_ones():
    with pytest.raises(ConfigError) as caught:
        selector([Kernel("here"), Kernel("gone", absent="no GPU")], kernels="magic")
    assert "here" in caught.value.wanted and "gone (not here: no GPU)" in caught.value.wanted
    assert caught.value.got == "magic"


def test_pinning_per_mode():
    chosen = selector([Kernel("a"), Kernel("b")], kernels={"decode": "b", "extend": "auto", "default": "b"})
    names = {mode: str(chosen.route(ask(forward_mode=mode))) for mode in ("decode", "extend", "mixed")}
    assert names == {"decode": "b", "extend": "a", "mixed": "b"}


def test_pinning_ignores_the_ranking():
    chosen = selector([Kernel("a"), Kernel("b")], rank=lambda candidates: candidates[1:], kernels="a")
    assert str(chosen.route(ask())) == "a"


def test_the_ranking_decides_otherwise():
    kernels = [Kernel("a"), Kernel("b")]
    assert str(selector(kernels, rank=lambda candidates: candidates[::-1]).route(ask())) == "b"
    with pytest.raises(NoKernelError):
        selector(kernels, rank=lambda candidates: []).route(ask())


def test_a_dropped_kernel_is_a_reason():
    with pytest.raises(NoKernelError, match="a"):
        selector([Kernel("a")], rank=lambda candidates: []).route(ask())
    with pytest.raises(NoKernelError) as caught:
        selector([Kernel("a")], rank=lambda candidates: []).route(ask())
    assert any("faback_rank" in reason for reason in caught.value.reasons)


def test_no_lowering_where_a_kernel_can():
    drop = Drop("tree")
    assert str(selector([Kernel("fast", priority=9), Kernel("able", "tree")], [drop]).route(ask("tree"))) == "able"
    assert drop.calls == 0


def test_a_lowering_where_none_can():
    route = selector([Kernel("fast")], [Drop("tree"), Drop("chunk")]).route(ask("tree"))
    assert str(route) == "drop_tree(fast)"
    assert route.kernels() == ("fast",)
    assert route.parts[0].request.features == frozenset()


def test_lowerings_chain_and_split():
    kernels = [Kernel("fast", "lse", "dense_table", priority=9), Kernel("slow", "tail", "lse")]
    lowerings = [Drop("tree", ("lse", "slot_map"), ("lse", "tail")), Drop("slot_map", ("dense_table",))]
    route = selector(kernels, lowerings).route(ask("tree"))
    assert str(route) == "drop_tree(drop_slot_map(fast), slow)"
    assert route.kernels() == ("fast", "slow")


def test_a_lowering_that_leads_nowhere_is_passed_over():
    lowerings = [Drop("tree", ("chunk",), priority=5, key="dead_end"), Drop("tree", key="way_out")]
    assert str(selector([Kernel("fast")], lowerings).route(ask("tree"))) == "way_out(fast)"
    assert str(selector([Kernel("fast", "chunk")], lowerings).route(ask("tree"))) == "dead_end(fast)"


def test_a_circle_of_lowerings_ends():
    lowerings = [Drop("tree", ("chunk",)), Drop("chunk", ("tree",))]
    with pytest.raises(NoKernelError, match="tree"):
        selector([Kernel("fast")], lowerings).route(ask("tree"))


def test_a_branching_circle_of_lowerings_ends_soon():
    class Patient(Kernel):
        def reject(self, request, device):
            assert self.asked < 1000, "too many questions"
            return super().reject(request, device)

    parts = [("tree", "chunk", "keep")] * 2
    lowerings = [Drop(feature, *parts, key=f"{feature}{i}") for feature in ("tree", "chunk") for i in "ab"]
    with pytest.raises(NoKernelError):
        selector([Patient(n) for n in "abc"], lowerings).route(ask("tree", "chunk", "keep"))


def test_a_route_is_found_once_per_request():
    kernel = Kernel("a")
    chosen = selector([kernel])
    assert chosen.route(ask()) is chosen.route(ask())
    assert kernel.asked == 1
    assert chosen.route(ask(page_size=16)) is not chosen.route(ask())


def test_rejections_of_all_kernels_that_run_here():
    found = selector([Kernel("a"), Kernel("b", "tree"), Kernel("c", absent="x")]).rejections(ask("tree", "keep"))
    assert {(r.kernel, r.wanted.split()[0]) for r in found} == {("a", "tree"), ("a", "keep"), ("b", "keep")}
