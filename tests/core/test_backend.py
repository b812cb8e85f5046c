"""The facade: what is refused at construction, at plan and at forward, and what the caller gets back."""

import math

import attrs
import pytest
import torch

from faback import (
    AttentionBackend,
    AttentionLayer,
    BackendConfig,
    BatchError,
    ConfigError,
    FabackError,
    ForwardBatch,
    NoKernelError,
    Pools,
    hookimpl,
)
from faback.core.contracts import Mode
from faback.core.kernel import Capabilities
from faback.core.segment import KVWrite
from faback.kernels.reference import Reference
from faback.modes.decode import Decode
from faback.pools import MHAPool


class Point:
    dist = None

    def __init__(self, name="test", **hooks):
        self.name = name
        self._hooks = hooks

    def load(self):
        plugin = type("Plugin", (), {})()
        for name, values in self._hooks.items():
            setattr(plugin, name, hookimpl(lambda values=values: values))
        return plugin


class Limited(Reference):
    """The reference under another name that admits to fewer features and dtypes."""

    priority = 50

    def __init__(self, name, without=(), **limits):
        super().__init__()
        self.name, self._without, self._limits = name, frozenset(without), limits

    def capabilities(self, device):
        able = super().capabilities(device)
        return attrs.evolve(able, features=able.features - self._without, **self._limits)


# --- construction -----------------------------------------------------------------------------------------------------


def test_duplicate_layer_ids(world, layer):
    with pytest.raises(ConfigError, match="one description per layer_id, got two of 3"):
        world([layer(3), layer(3, window=2)], [1], [1])


def test_no_layers(world, layer):
    made = world([layer()], [1], [1])
    with pytest.raises(ConfigError, match="at least one"):
        AttentionBackend(made.config, made.pools, [])


@pytest.mark.parametrize("change", [{"num_kv_heads": 1}, {"head_dim": 16}, {"v_head_dim": 4}])
def test_buffers_that_do_not_fit_the_layer(world, layer, change):
    made = world([layer(5)], [1], [1])
    with pytest.raises(ConfigError, match="KV buffers of layer 5"):
        AttentionBackend(made.config, made.pools, [layer(5, **change)], registry=made.backend.registry)


def test_settings_that_nobody_takes_are_refused(world, layer):
    made = world([layer()], [1], [1])
    config = attrs.evolve(made.config, options={"prefil_aware_swa": {}})
    with pytest.raises(ConfigError, match="prefil_aware_swa"):
        AttentionBackend(config, made.pools, [layer()], registry=made.backend.registry)


def test_parts_that_do_not_fit_are_refused(world, layer):
    made = world([layer()], [1], [1])
    made.backend.plan(made.batch("decode"))
    with pytest.raises(BatchError, match="q, k or v"):
        made.backend.forward(torch.zeros(1, 5), None, None, made.backend.layers[0])


def test_a_layer_kind_without_a_kernel_is_refused_with_all_reasons(world, layer):
    made = world([layer()], [1], [1])
    point = Point(faback_kernels=[Limited("limited", without=("softcap", "sinks"), max_head_dim=4)])
    with pytest.raises(NoKernelError) as caught:
        world([layer(softcap=5.0, sinks=True)], [1], [1], points=[point], kernels="limited")
    assert all(part in str(caught.value) for part in ("softcap", "sinks", "up to 4"))
    assert made.backend.current is None


def test_a_kernel_pinned_for_one_mode_is_looked_up_at_construction(world, layer):
    with pytest.raises(ConfigError, match="no_such_kernel"):
        world([layer()], [1], [1], kernels={"decode": "no_such_kernel"})


def test_a_kernel_pinned_for_no_mode_is_a_typo(world, layer):
    with pytest.raises(ConfigError, match="decoed"):
        world([layer()], [1], [1], kernels={"decoed": "reference"})


@pytest.mark.parametrize(
    ("plugin", "fields"),
    [
        ("faback.modes.sliding_window", {"window": 1}),
        ("faback.modes.local_attention", {"chunk": 2}),
        ("faback.modes.encoder_only", {"causal": False}),
    ],
)
def test_a_layer_whose_overlay_is_switched_off_is_refused(world, layer, plugin, fields):
    with pytest.raises(FabackError):
        made = world([layer(**fields)], [5, 3], [5, 1], disable_plugins=[plugin])
        made.run(made.layers[0])


def test_plugins_know_every_layer_when_they_are_bound(world, layer):
    seen = []

    class Listing(Decode):
        key = "listing"

        def bind(self, ctx):
            seen.append(ctx.layers)

    layers = [layer(3), layer(0, window=2)]
    made = world(layers, [1], [1], points=[Point(faback_modes=[Listing()])])
    assert [tuple(made.backend.layers.values())] == seen == [tuple(layers)]


# --- plan -------------------------------------------------------------------------------------------------------------


def test_an_unknown_mode_lists_the_known_ones(world, layer):
    made = world([layer()], [1], [1])
    with pytest.raises(BatchError, match="one of .*'decode'.*'extend'.*got 'decoder'.*doctor"):
        made.backend.plan(made.batch("decoder"))


def test_a_failing_plan_leaves_no_plan(world, layer):
    made = world([layer()], [2], [1])
    made.backend.plan(made.batch("decode"))
    with pytest.raises(BatchError, match="batch.extend_seq_lens"):
        made.backend.plan(made.batch("extend", extend_seq_lens=None))
    with pytest.raises(BatchError, match="forward: wanted a plan.*plan.batch"):
        made.backend.forward(made.q[0], *made.fresh(made.layers[0]), made.layers[0])


@pytest.mark.parametrize(
    ("mode", "field"),
    [("decode", "out_cache_loc"), ("extend", "out_cache_loc"), ("mixed", "extend_seq_lens")],
)
def test_missing_needed_field(world, layer, mode, field):
    made = world([layer()], [2], [1])
    with pytest.raises(BatchError, match=f"batch.{field}: wanted a value in forward mode '{mode}'"):
        made.backend.plan(made.batch(mode, **{field: None}))


def test_tensors_on_another_device(world, layer):
    made = world([layer()], [2], [1])
    with pytest.raises(BatchError, match="batch.out_cache_loc.*cpu.*meta"):
        made.backend.plan(made.batch("decode", out_cache_loc=torch.ones(1, dtype=torch.int32, device="meta")))


def test_a_request_longer_than_its_table_row(world, layer):
    made = world([layer()], [4], [1], checks=True)
    with pytest.raises(FabackError, match="seq_lens"):
        made.backend.plan(made.batch("decode", seq_lens=torch.tensor([99])))


def test_more_new_tokens_than_queries(world, layer):
    made = world([layer()], [4, 4], [2, 2], checks=True)
    with pytest.raises(FabackError, match="extend_seq_lens"):
        made.backend.plan(made.batch("extend", extend_seq_lens=torch.tensor([2, 3])))


def test_layers_of_one_kind_share_one_step(world, layer):
    made = world([layer(0), layer(1), layer(2, window=1)], [3], [1])
    steps = made.backend.plan(made.batch("decode")).steps
    assert steps[0] is steps[1]
    assert steps[2] is not steps[0]


@pytest.mark.parametrize("mode", ["decode", "extend", "mixed"])
@pytest.mark.parametrize("forward", ["int32", "int64", "mixed"])
def test_index_dtypes_do_not_matter_and_inputs_stay(world, layer, mode, forward):
    new = [1, 1, 1] if mode == "decode" else [3, 1, 2]
    made = world([layer(window=2)], [5, 1, 9], new, page_size=4, index_dtype=torch.int64)
    wanted = made.run(made.layers[0], mode)
    cast = {"int32": torch.int32, "int64": torch.int64}
    batch = made.batch(mode)
    names = [
        n for n in ("req_pool_indices", "seq_lens", "out_cache_loc", "extend_seq_lens") if getattr(batch, n) is not None
    ]
    changes = {}
    for index, name in enumerate(names):
        dtype = cast.get(forward, (torch.int32, torch.int64)[index % 2])
        changes[name] = getattr(batch, name).to(dtype)
    table = made.pools.req_to_token
    pools = Pools(req_to_token=table if forward == "int64" else table.int(), kv=made.pool)
    backend = AttentionBackend(made.config, pools, made.layers, registry=made.backend.registry)
    before = {name: value.clone() for name, value in changes.items()} | {"table": pools.req_to_token.clone()}
    q, (k, v) = made.q[0], made.fresh(made.layers[0])
    copies = [t.clone() for t in (q, k, v)]
    backend.plan(made.batch(mode, **changes))
    assert torch.equal(backend.forward(q, k, v, made.layers[0]), wanted)
    assert all(torch.equal(before[n], v) and before[n].dtype == v.dtype for n, v in changes.items())
    assert torch.equal(before["table"], pools.req_to_token)
    assert all(map(torch.equal, copies, (q, k, v)))


# --- forward ----------------------------------------------------------------------------------------------------------


def test_forward_before_plan_and_of_an_unknown_layer(world, layer):
    made = world([layer(3)], [2], [1])
    arguments = made.q[3], *made.fresh(made.layers[0])
    with pytest.raises(BatchError, match="wanted a plan"):
        made.backend.forward(*arguments, made.layers[0])
    made.backend.plan(made.batch("decode"))
    with pytest.raises(BatchError, match=r"layer: wanted one of \[3\], got 4"):
        made.backend.forward(*arguments, layer(4))


@pytest.mark.parametrize("described", [True, False])
def test_sinks_come_exactly_where_they_were_announced(world, layer, described):
    made = world([layer(7, sinks=described)], [2], [1])
    with pytest.raises(BatchError, match="sinks of layer 7"):
        made.run(made.layers[0], sinks=None if described else torch.zeros(4))


def test_wrong_number_of_new_keys(world, layer):
    made = world([layer(6)], [4], [2])
    made.backend.plan(made.batch())
    k, v = made.fresh(made.layers[0])
    with pytest.raises(BatchError, match="k of layer 6: wanted 2 tokens, one per write slot, got 1"):
        made.backend.forward(made.q[6], k[:1], v[:1], made.layers[0])


@pytest.mark.parametrize(
    "change",
    [
        "too few tokens",
        "one head",
        "another dtype",
        "out of more heads",
        "one sink",
    ],
)
def test_tensors_that_do_not_fit(world, layer, change):
    made = world([layer(num_kv_heads=1, sinks=True)], [4], [2])
    made.backend.plan(made.batch())
    changes = {
        "too few tokens": {"q": made.q[0][:1]},
        "one head": {"q": made.q[0][:, :1]},
        "another dtype": {"q": made.q[0].half()},
        "out of more heads": {"out": torch.empty(2, 8, 8)},
        "one sink": {"sinks": torch.zeros(1)},
    }
    arguments = {"q": made.q[0], "sinks": torch.zeros(4), "layer": made.layers[0], **changes[change]}
    k, v = made.fresh(made.layers[0])
    with pytest.raises(BatchError):
        made.backend.forward(k=k, v=v, **arguments)


def test_another_layer_of_the_same_number(world, layer):
    made = world([layer()], [4], [2])
    made.backend.plan(made.batch())
    with pytest.raises(BatchError):
        made.backend.forward(made.q[0], *made.fresh(made.layers[0]), layer(window=1, scale=9.0))


def test_k_without_v(world, layer):
    made = world([layer()], [4], [2], fill=0.0)
    made.backend.plan(made.batch())
    with pytest.raises(BatchError):
        made.backend.forward(made.q[0], made.fresh(made.layers[0])[0], None, made.layers[0])


def test_raw_keys_that_are_missing(world, layer):
    class Raw(Mode):
        key = "raw"

        def build(self, batch, ws, ctx):
            base = Decode().build(batch, ws, ctx)
            return attrs.evolve(base, kv=None, write=KVWrite())

    made = world([layer()], [1], [1], points=[Point(faback_modes=[Raw()])])
    made.backend.plan(made.batch("raw"))
    with pytest.raises(BatchError):
        made.backend.forward(made.q[0], None, None, made.layers[0])


def test_flat_tensors(world, layer):
    made = world([layer(v_head_dim=4)], [5, 3], [2, 3])
    wanted = made.run(made.layers[0])
    k, v = made.fresh(made.layers[0])
    out = made.backend.forward(made.q[0].flatten(1), k.flatten(1), v.flatten(1), made.layers[0])
    assert out.shape == (5, 4, 4)
    assert torch.equal(out, wanted)


def test_q_k_v_cut_from_a_fused_projection(world, layer):
    made = world([layer()], [5, 3, 9], [2, 3, 1])
    wanted = made.run(made.layers[0])
    k, v = made.fresh(made.layers[0])
    fused = torch.cat([made.q[0].flatten(1), k.flatten(1), v.flatten(1)], 1)
    q, k, v = fused.split([32, 16, 16], 1)
    for cut in ((q, k, v), (q.unflatten(1, (4, 8)), k.unflatten(1, (2, 8)), v.unflatten(1, (2, 8)))):
        for cache in made.pool.buffers(made.layers[0]):
            cache[made.batch().out_cache_loc] = math.nan
        assert torch.equal(made.backend.forward(*cut, made.layers[0]), wanted)


def test_out_is_a_view_between_guard_bands(world, layer):
    made = world([layer(v_head_dim=4)], [5, 3], [2, 3])
    wanted = made.run(made.layers[0])
    wide = torch.full((5 + 2, 4 + 2, 4 + 6), math.nan)
    view = wide[1:-1, 1:-1, 3:-3]
    result = made.backend.forward(made.q[0], *made.fresh(made.layers[0]), made.layers[0], out=view)
    assert result is view
    assert torch.equal(view, wanted)
    assert wide.isnan().sum() == wide.numel() - view.numel()


def test_log_sum_exp_by_definition(world, layer):
    made = world([layer(softcap=3.0, sinks=True)], [5, 3], [2, 3])
    sinks = torch.tensor([2.0, -1.0, 0.0, 5.0])
    out, lse = made.run(made.layers[0], sinks=sinks, return_lse=True)
    assert (lse.dtype, lse.shape) == (torch.float32, (5, 4))
    torch.testing.assert_close(lse.double(), made.expected(made.layers[0])[1], atol=1e-5, rtol=0)
    made.check(made.layers[0], out, sinks=sinks)
    assert torch.equal(made.run(made.layers[0], sinks=sinks), out)


def test_save_kv_cache_off_reads_what_is_there(world, layer):
    made = world([layer()], [5], [2])
    wanted = made.run(made.layers[0])
    after = made.pool.buffers(made.layers[0])
    stored = [cache.clone() for cache in after]
    other = torch.full((2, 2, 8), 100.0)
    out = made.backend.forward(made.q[0], other, other, made.layers[0], save_kv_cache=False)
    assert torch.equal(out, wanted)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(stored, after, strict=True))
    assert torch.equal(made.backend.forward(made.q[0], None, None, made.layers[0]), wanted)
    assert not torch.equal(made.backend.forward(made.q[0], other, other, made.layers[0]), wanted)


def test_new_keys_go_to_their_slots_and_nowhere_else(world, layer):
    made = world([layer()], [5, 7], [2, 3], page_size=4)
    before = [cache.clone() for cache in made.pool.buffers(made.layers[0])]
    made.run(made.layers[0])
    slots = made.batch().out_cache_loc
    for cache, old, new in zip(made.pool.buffers(made.layers[0]), before, made.fresh(made.layers[0]), strict=True):
        assert torch.equal(cache[slots], new)
        old[slots] = new
        assert torch.equal(cache.nan_to_num(9), old.nan_to_num(9))


def test_a_kernel_without_lse_does_not_serve_return_lse(world, layer):
    class Forgetful(Limited):
        def run(self, prepared, q, k, v, out, *, lse=None, **kwargs):
            super().run(prepared, q, k, v, out, **kwargs)

    point = Point(faback_kernels=[Forgetful("forgetful", without=("lse",))])
    made = world([layer()], [3], [1], points=[point])
    try:
        lse = made.run(made.layers[0], return_lse=True)[1]
    except FabackError:
        return
    torch.testing.assert_close(lse.double(), made.expected(made.layers[0])[1], atol=1e-5, rtol=0)


class Halves(Decode):
    """Decode in two calls, the first and the second half of the keys, which are merged."""

    key = "halves"

    def calls(self, segment, layer, ctx):
        half = segment.kv_len // 2
        start = attrs.evolve(segment.kv, start=half)
        return (
            attrs.evolve(segment, kv_len=half, positions=segment.kv_len.int()),
            attrs.evolve(segment, kv_len=segment.kv_len - half, kv=start),
        )


def test_parts_that_a_mode_asks_for_are_merged_and_sinks_enter_once(world, layer):
    made = world([layer(sinks=True)], [5, 9, 1], [1, 1, 1], points=[Point(faback_modes=[Halves()])])
    sinks = torch.tensor([2.0, -1.0, 0.0, 3.0])
    made.backend.plan(made.batch("halves"))
    out, lse = made.backend.forward(
        made.q[0], *made.fresh(made.layers[0]), made.layers[0], sinks=sinks, return_lse=True
    )
    made.check(made.layers[0], out, sinks=sinks)
    torch.testing.assert_close(lse.double(), made.expected(made.layers[0])[1], atol=1e-5, rtol=0)


def test_parts_that_are_merged_need_lse_and_no_sinks(world, layer):
    made = world([layer(sinks=True)], [5], [1], points=[Point(faback_modes=[Halves()])])
    explained = made.backend.explain(made.batch("halves"), made.layers[0])
    for route in explained.routes:
        assert "lse" in route.request.features
        assert "sinks" not in route.request.features


# --- explain ----------------------------------------------------------------------------------------------------------


def test_explain(world, layer):
    point = Point(faback_kernels=[Limited("limited", without=("window",))])
    made = world(
        [layer(0, window=2), layer(1)], [5, 3], [2, 1], points=[point], disable_plugins=["faback.kernels.triton"]
    )
    plan = made.backend.plan(made.batch("decode"))
    batch = made.batch("mixed")
    windowed, plain = (made.backend.explain(batch, each) for each in made.layers)
    assert made.backend.current is plan
    assert windowed.mode.startswith("mixed (faback ")
    names = [[str(name).split()[0] for name in each.overlays] for each in (windowed, plain)]
    assert "sliding_window" in names[0] and "sliding_window" not in names[1]
    assert (windowed.kernel, plain.kernel) == ("reference", "limited")
    assert [(r.kernel, r.wanted.split()[0]) for r in windowed.rejections] == [("limited", "window")]
    text = str(windowed)
    for part in ("sliding_window", "2 rows, up to 2 queries and 5 keys", "window=(2, None)", "kernel    reference"):
        assert part in text
    assert "rejected  limited: feature: wanted window" in text


def test_explain_of_an_unknown_layer(world, layer):
    made = world([layer(0)], [5], [1])
    with pytest.raises(BatchError):
        made.backend.explain(made.batch("decode"), layer(1, window=2))


def test_the_devices_capabilities_are_data(world, layer):
    able = Reference().capabilities(torch.device("cpu"))
    assert isinstance(able, Capabilities)
    assert "graph" not in able.features


def test_keys_of_an_encoder_without_a_place_are_an_error():
    """A forgotten encoder_out_cache_loc must not leave the layer with whatever the cache holds."""
    layer = AttentionLayer(layer_id=0, num_q_heads=1, num_kv_heads=1, head_dim=16, cross=True)
    kv = MHAPool(num_pages=17, layers=[layer], dtype=torch.float32)
    pools = Pools(req_to_token=torch.arange(1, 17).expand(2, 16).contiguous(), kv=kv)
    backend = AttentionBackend(BackendConfig(context_len=16, dtype=torch.float32), pools, [layer])
    one = torch.tensor([1])
    fields = {"req_pool_indices": one, "seq_lens": one, "extend_seq_lens": one, "encoder_lens": one * 4}
    backend.plan(ForwardBatch(forward_mode="extend", out_cache_loc=one * 9, **fields))
    q, k = torch.ones(1, 1, 16), torch.ones(4, 1, 16)
    with pytest.raises(BatchError, match="encoder_out_cache_loc"):
        backend.forward(q, k, k, layer)
    assert backend.forward(q, None, None, layer).shape == (1, 1, 16)
