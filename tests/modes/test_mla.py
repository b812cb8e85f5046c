"""Multi-head latent attention: absorbed in every mode, un-absorbed in parts and at once, and all three the same."""

import attrs
import pytest
import torch

from faback import AttentionBackend, AttentionLayer, BackendConfig, BatchError, ForwardBatch, Pools, hookimpl
from faback.builtins import BUILTINS
from faback.core.registry import Registry
from faback.kernels.torch_ops import TorchOps
from faback.pools import MLAPool, PageAllocator
from faback.testing import Scenario, run_scenario
from faback.testing.poor import Poor

MODES = {
    "decode": {"mode": "decode"},
    "extend": {"mode": "extend"},
    "mixed": {"mode": "mixed"},
    "chain": {"mode": "target_verify"},
    "tree": {"mode": "target_verify", "topk": 3},
    "draft": {"mode": "draft_decode"},
    "branches": {"mode": "draft_decode", "topk": 3},
    "draft_extend": {"mode": "draft_extend"},
}
LATENT, ROPE, NOPE, VALUE, HEADS = 6, 2, 4, 3, 4


class Writes(TorchOps):
    """Remembers the writes."""

    def __init__(self):
        self.seen = []

    def set_kv(self, k, v, k_cache, v_cache, write, k_scale, v_scale):
        self.seen.append((v, k_cache))
        super().set_kv(k, v, k_cache, v_cache, write, k_scale, v_scale)


class Plugin:
    def __init__(self, ops=None):
        self._ops = ops

    @hookimpl
    def faback_kernels(self):
        return [Poor()]

    @hookimpl
    def faback_device_ops(self):
        return self._ops


def registry(config, ops=None):
    loaded = Registry.load(config, BUILTINS, entry_points=[])
    loaded.register(Plugin(ops), "test")
    return loaded


@pytest.fixture(params=["reference", "poor"])
def kernel(request):
    return request.param


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("features", [{}, {"sinks": True}, {"softcap": True}, {"sinks": True, "softcap": True}])
@pytest.mark.parametrize("mode", MODES)
def test_absorbed_layers_equal_the_oracle(mode, features, page, kernel):
    """Each scenario has a layer with a window and one without."""

    def make(config, pools, layers):
        config = attrs.evolve(config, kernels=kernel)
        return AttentionBackend(config, pools, layers, registry=registry(config))

    scenario = Scenario.make(overlay="mla", page_size=page, padded_rows=1, seed=page, **MODES[mode], **features)
    assert any(layer.window is not None for layer in scenario.layers)
    for result in run_scenario(scenario, make):
        assert result.status == "equal", str(result)


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("mode", MODES)
def test_split_queries_and_keys_are_fused_ones(mode, page):
    """To the bit, in outputs and in the pool."""
    scenario = Scenario.make(overlay="mla", page_size=page, sinks=True, seed=1, **MODES[mode])
    found = []
    for split in (False, True):
        pools = scenario.pools()
        backend = AttentionBackend(scenario.config, pools, scenario.layers, registry=registry(scenario.config))
        backend.plan(scenario.steps[0].batch)
        for call in scenario.steps[0].calls:
            cut = call.layer.v_head_dim
            parts = {"q_rope": call.q[..., cut:], "k_rope": call.k[..., cut:]} if split else {}
            q, k = (call.q[..., :cut], call.k[..., :cut]) if split else (call.q, call.k)
            found += backend.forward(q, k, None, call.layer, sinks=call.sinks, return_lse=True, **parts)
            found.append(pools.kv.buffers(call.layer)[0].view(torch.int32))
    half = len(found) // 2
    assert half
    for fused, split in zip(found[:half], found[half:], strict=True):
        assert torch.equal(fused, split)


def test_split_parts_of_no_token():
    scenario = Scenario.make(overlay="mla", mode="decode", batch_size=0)
    backend = AttentionBackend(scenario.config, scenario.pools(), scenario.layers)
    backend.plan(scenario.steps[0].batch)
    layer = scenario.layers[0]
    cut, rope = layer.v_head_dim, layer.head_dim - layer.v_head_dim
    q, k = torch.empty(0, layer.num_q_heads, cut), torch.empty(0, 1, cut)
    parts = {"q_rope": torch.empty(0, layer.num_q_heads, rope), "k_rope": torch.empty(0, 1, rope)}
    assert backend.forward(q, k, None, layer, **parts).shape == (0, layer.num_q_heads, cut)


@pytest.mark.parametrize("mode", ["decode", "tree", "branches"])
def test_flat_parts_are_fused_as_well(mode):
    scenario = Scenario.make(overlay="mla", **MODES[mode])
    backend = AttentionBackend(scenario.config, scenario.pools(), scenario.layers)
    backend.plan(scenario.steps[0].batch)
    call = scenario.steps[0].calls[0]
    cut, tokens = call.layer.v_head_dim, call.q.shape[0]
    fused = backend.forward(call.q, call.k, None, call.layer)
    q, q_rope, k, k_rope = (
        x.reshape(tokens, -1) for x in (call.q[..., :cut], call.q[..., cut:], call.k[..., :cut], call.k[..., cut:])
    )
    assert torch.equal(backend.forward(q, k, None, call.layer, q_rope=q_rope, k_rope=k_rope), fused)


@pytest.mark.parametrize("mode", MODES)
def test_latents_are_written_once_and_values_never_read(mode):
    scenario, ops = Scenario.make(overlay="mla", page_size=4, **MODES[mode]), Writes()
    pools = scenario.pools()
    backend = AttentionBackend(scenario.config, pools, scenario.layers, registry=registry(scenario.config, ops))
    backend.plan(scenario.steps[0].batch)
    for call in scenario.steps[0].calls:
        ops.seen.clear()
        spoilt = torch.full_like(call.k[..., : call.layer.v_head_dim], torch.nan)
        out = backend.forward(call.q, call.k, spoilt, call.layer)
        torch.testing.assert_close(out.double(), call.out, atol=2e-5, rtol=0)
        ((value, cache),) = ops.seen
        assert value is None and cache is pools.kv.buffers(call.layer)[0]


class Model:
    """One model's attention, absorbed and not: k = W_UK latent, v = W_UV latent, rope shared by all heads.

    Args:
        pairs: (tokens, new ones) per request.
        rule: window, softcap, chunk of every layer.
    """

    def __init__(self, pairs, kernel, page=1, **rule):
        generator = torch.Generator().manual_seed(3)

        def noise(*shape):
            return torch.randn(shape, generator=generator)

        self.lens, self.new = torch.tensor([n for n, _ in pairs]), torch.tensor([n for _, n in pairs])
        shared = {"num_q_heads": HEADS, "scale": 0.4, **rule}
        raw = {"num_kv_heads": HEADS, "head_dim": NOPE + ROPE, "v_head_dim": VALUE, "kv_group": "none"}
        latent = {"num_kv_heads": 1, "head_dim": LATENT + ROPE, "v_head_dim": LATENT, "latent": True}
        self.absorbed = AttentionLayer(layer_id=0, sinks=True, **shared, **latent)
        self.whole = AttentionLayer(layer_id=1, sinks=True, **shared, **raw)
        self.part = AttentionLayer(layer_id=2, **shared, **raw)
        self.w_uk, self.w_uv = noise(HEADS, NOPE, LATENT) / 2, noise(HEADS, VALUE, LATENT) / 2
        self.latents = [noise(n, LATENT + ROPE) for n, _ in pairs]
        self.q, self.sinks = noise(sum(new for _, new in pairs), HEADS, NOPE + ROPE), noise(HEADS)
        pool = MLAPool(num_pages=60, page_size=page, layers=[self.absorbed], dtype=torch.float32)
        pool.buffers(self.absorbed)[0].fill_(torch.nan)
        table = torch.full((len(pairs) + 2, 24), 1 << 30)
        self.slots = PageAllocator(60, page).alloc_extend([0] * len(pairs), self.lens).split(self.lens.tolist())
        for row, (slots, latents, new) in enumerate(zip(self.slots, self.latents, self.new.tolist(), strict=True)):
            table[row + 1, : len(slots)] = slots
            old = len(slots) - new
            pool.buffers(self.absorbed)[0][slots[:old], 0] = latents[:old]
        config = BackendConfig(context_len=24, dtype=torch.float32, kernels=kernel)
        pools, layers = Pools(req_to_token=table, kv=pool), [self.absorbed, self.whole, self.part]
        self.backend = AttentionBackend(config, pools, layers, registry=registry(config))

    def batch(self, mode, **fields):
        rows = torch.arange(1, len(self.lens) + 1)
        tokens = {"num_tokens": len(self.q), "extend_seq_lens": self.new}
        return ForwardBatch(forward_mode=mode, req_pool_indices=rows, seq_lens=self.lens, **tokens, **fields)

    def expanded(self, spans):
        """k and v of tokens [start, end) of each request."""
        flat = torch.cat([latents[a:b] for latents, (a, b) in zip(self.latents, spans, strict=True)])
        latent, rope = flat[:, :LATENT], flat[:, None, LATENT:].expand(-1, HEADS, -1)
        k = torch.cat([torch.einsum("hdl,tl->thd", self.w_uk, latent), rope], dim=-1)
        return k, torch.einsum("hdl,tl->thd", self.w_uv, latent)

    def run_absorbed(self):
        new = [latents[len(latents) - n :] for latents, n in zip(self.latents, self.new.tolist(), strict=True)]
        written = [slots[len(slots) - n :] for slots, n in zip(self.slots, self.new.tolist(), strict=True)]
        self.backend.plan(self.batch("extend", out_cache_loc=torch.cat(written)))
        q = torch.cat([torch.einsum("thd,hdl->thl", self.q[..., :NOPE], self.w_uk), self.q[..., NOPE:]], dim=-1)
        out, lse = self.backend.forward(
            q, torch.cat(new)[:, None], None, self.absorbed, sinks=self.sinks, return_lse=True
        )
        return torch.einsum("hdl,thl->thd", self.w_uv, out), lse

    def run_at_once(self):
        self.backend.plan(self.batch("one_shot"))
        k, v = self.expanded([(0, n) for n in self.lens.tolist()])
        return self.backend.forward(self.q, k, v, self.whole, sinks=self.sinks, return_lse=True)

    def run_in_parts(self, size, sinks=True, index_dtype=torch.int64):
        """New tokens among themselves, then chunks of `size` tokens of every prefix."""
        prefixes = (self.lens - self.new).tolist()
        self.backend.plan(self.batch("extend", out_cache_loc=torch.zeros(len(self.q), dtype=torch.int64)))
        k, v = self.expanded(list(zip(prefixes, self.lens.tolist(), strict=True)))
        parts = [self.backend.forward(self.q, k, v, self.part, return_lse=True)]
        for start in range(0, max(prefixes), size):
            spans = [(min(start, prefix), min(start + size, prefix)) for prefix in prefixes]
            extras = {
                "chunk_starts": torch.tensor([a for a, _ in spans], dtype=index_dtype),
                "chunk_lens": torch.tensor([b - a for a, b in spans], dtype=index_dtype),
            }
            self.backend.plan(self.batch("prefix_chunk", extras=extras))
            parts.append(self.backend.forward(self.q, *self.expanded(spans), self.part, return_lse=True))
        outs, lses = zip(*parts, strict=True)
        return self.backend.merge(outs, lses, sinks=self.sinks if sinks else None)


PAIRS = [(9, 4), (3, 3), (12, 1), (5, 0), (14, 6)]
RULES = [{}, {"window": 3}, {"window": 30}, {"softcap": 1.5}, {"window": 6, "softcap": 2.0}]


def close(got, wanted):
    for mine, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, other, atol=2e-5, rtol=0)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("size", [1, 3, 8, 100])
def test_parts_equal_the_whole_equal_the_absorbed(kernel, rule, size):
    """Sinks included, which enter the parts once, where they are merged."""
    model = Model(PAIRS, kernel, page=4, **rule)
    whole = model.run_at_once()
    assert bool(torch.isfinite(whole[0]).all())
    close(model.run_absorbed(), whole)
    close(model.run_in_parts(size), whole)


def test_without_sinks_at_the_merge_there_are_none(kernel):
    model = Model(PAIRS, kernel)
    out, lse = model.run_in_parts(4, sinks=False)
    with_sinks, same = model.run_in_parts(4, index_dtype=torch.int32)
    torch.testing.assert_close(lse, same)
    torch.testing.assert_close(out * torch.sigmoid(lse - model.sinks)[..., None], with_sinks, atol=2e-5, rtol=0)


def test_a_prompt_without_a_prefix_needs_no_chunks(kernel):
    model = Model([(4, 4), (1, 1)], kernel)
    close(model.run_in_parts(4), model.run_at_once())


def test_a_request_without_keys_in_a_chunk_yields_nothing(kernel):
    model = Model(PAIRS, kernel)
    extras = {"chunk_lens": torch.tensor([2, 0, 0, 0, 1]), "chunk_starts": torch.tensor([0, 0, 0, 0, 3])}
    model.backend.plan(model.batch("prefix_chunk", extras=extras))
    k, v = model.expanded([(0, 2), (0, 0), (0, 0), (0, 0), (3, 4)])
    out, lse = model.backend.forward(model.q, k, v, model.part, return_lse=True)
    assert not out[4:8].any() and bool((lse[4:8] == -torch.inf).all())
    assert bool(torch.isfinite(lse[:4]).all()) and bool(torch.isfinite(lse[8:]).all())


def test_nothing_un_absorbed_touches_the_pool(kernel):
    model = Model(PAIRS, kernel)
    pool = model.backend.pools.kv.buffers(model.absorbed)[0]
    before = pool.clone()
    model.run_in_parts(4)
    model.run_at_once()
    assert torch.equal(pool.view(torch.int32), before.view(torch.int32))


def test_chunks_of_local_layers_are_refused_or_right(kernel):
    """A prefix chunk need not begin where a chunk of local attention does."""
    model = Model(PAIRS, kernel, chunk=5)
    try:
        parts = model.run_in_parts(3)
    except BatchError:
        return
    close(parts, model.run_at_once())


@pytest.mark.parametrize(("prefix", "legal"), [(0, True), (2, False)])
def test_new_tokens_of_local_layers_are_counted_from_the_first(prefix, legal):
    """Keys that come with the call are the whole request only where nothing was cached before."""
    layer = AttentionLayer(layer_id=0, num_q_heads=2, num_kv_heads=2, head_dim=8, chunk=3, kv_group="none")
    scenario = Scenario.make(mode="extend", page_size=1)
    backend = AttentionBackend(scenario.config, scenario.pools(), [layer])
    lens, new = torch.tensor([prefix + 4]), torch.tensor([4])
    batch = ForwardBatch(
        forward_mode="extend",
        req_pool_indices=torch.tensor([1]),
        seq_lens=lens,
        seq_lens_cpu=lens,
        out_cache_loc=torch.arange(1, 5),
        extend_seq_lens=new,
        extend_seq_lens_cpu=new,
    )
    if legal:
        backend.plan(batch)
        return
    with pytest.raises(BatchError, match="local attention"):
        backend.plan(batch)


@pytest.mark.parametrize("name", ["chunk_lens", "chunk_starts"])
@pytest.mark.parametrize("value", [None, torch.zeros(3, dtype=torch.int64), torch.zeros(5), [0, 0, 0, 0, 0]])
def test_chunks_are_index_tensors_of_one_entry_per_request(name, value):
    model = Model(PAIRS, "reference")
    extras = {"chunk_lens": torch.ones(5).int(), "chunk_starts": torch.zeros(5).int(), name: value}
    with pytest.raises(BatchError, match=name):
        model.backend.plan(model.batch("prefix_chunk", extras=extras))
