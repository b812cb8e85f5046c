"""Prefill-aware sliding windows over whole conversations: what is remembered, when, and who sees it.

`Chat` is a small engine. It knows by itself where each prompt ended, and computes what must come out from that.
"""

import attrs
import pytest
import torch

from faback import AttentionBackend, AttentionLayer, BackendConfig, ConfigError, ForwardBatch, Pools, hookimpl
from faback.builtins import BUILTINS
from faback.core.registry import Registry
from faback.pools import HybridPool, MHAPool, PageAllocator
from faback.testing import Scenario, oracle_attention, run_scenario
from faback.testing.poor import Poor

WINDOW = 3
ROWS, CONTEXT = 5, 40


class PoorPlugin:
    @hookimpl
    def faback_kernels(self):
        return [Poor()]


def registry(config):
    loaded = Registry.load(config, BUILTINS, entry_points=[])
    loaded.register(PoorPlugin(), "poor")
    return loaded


class Chat:
    """Requests that are extended and decoded, a sliding layer and a full one."""

    def __init__(self, *, kernel="reference", page=1, hybrid=False, inclusive=False, index_dtype=torch.int64):
        group = "window" if hybrid else "full"
        sizes = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 4}
        self.sliding = AttentionLayer(layer_id=0, window=WINDOW, kv_group=group, **sizes)
        self.full = AttentionLayer(layer_id=1, **sizes)
        layers = [self.sliding, self.full]
        common = {"num_pages": 60, "page_size": page, "layers": layers, "dtype": torch.float32}
        pool = HybridPool(num_window_pages=50, **common) if hybrid else MHAPool(**common)
        self.allocator = pool.allocator if hybrid else PageAllocator(60, page)
        if hybrid:  # so that full slots and window slots differ
            held = self.allocator.alloc_pages(5)
            self.allocator.evict(held[: 2 * page])
            self.allocator.free(held[page:])
        for layer in layers:
            for buffer in pool.buffers(layer):
                buffer.fill_(torch.nan)
        self.table = torch.full((ROWS + 1, CONTEXT), 1 << 30)
        options = {"prefill_aware_swa": {"inclusive": inclusive}}
        config = BackendConfig(context_len=CONTEXT, dtype=torch.float32, kernels=kernel, options=options)
        pools = Pools(req_to_token=self.table, kv=pool)
        self.backend = AttentionBackend(config, pools, layers, registry=registry(config))
        self.generator = torch.Generator().manual_seed(1)
        self.reach = WINDOW + inclusive
        self.index_dtype = index_dtype
        self.text = {row: [torch.zeros(2, 0, 2, 4), torch.zeros(2, 0, 2, 4)] for row in range(ROWS + 1)}

    @property
    def remembered(self):
        overlays = {c.value.key: c.value for c in self.backend._planner.overlays}
        return overlays["prefill_aware_swa"]._prompts.tolist()

    def noise(self, *shape):
        return torch.randn(shape, generator=self.generator)

    def length(self, row):
        return self.text[row][0].shape[1]

    def grow(self, row, count):
        """Room and numbers for new tokens of a row."""
        old, last = self.length(row), self.length(row) - 1
        slots = self.allocator.alloc_extend([old], [old + count], self.table[row, last : last + 1] if old else None)
        self.table[row, old : old + count] = slots
        self.text[row] = [torch.cat([kv, self.noise(2, count, 2, 4)], dim=1) for kv in self.text[row]]
        return slots

    def step(self, mode, news, prompts=None, padded=0, **extras):
        """A pass with news[row] new tokens; prompts[row] is what its queries must know as their prompt."""
        prompts = prompts or {}
        slots = [self.grow(row, count) for row, count in news.items()]
        batch = self.batch(mode, news, slots, padded, **extras)
        tokens = sum(news.values()) + padded
        self.backend.plan(batch)
        for number, layer in enumerate((self.sliding, self.full)):
            new = [self.text[row][number][:, self.length(row) - n :] for row, n in news.items()]
            k, v = torch.cat([*new, torch.full((2, padded, 2, 4), torch.nan)], dim=1)
            q = self.noise(tokens, 4, 4)
            out = self.backend.forward(q, k, v, layer)
            torch.testing.assert_close(out.double(), self.expected(q, layer, news, prompts), atol=2e-5, rtol=0)

    def batch(self, mode, news, slots, padded=0, **extras):
        def index(values, more):
            return torch.tensor([*values, *more], dtype=self.index_dtype)

        fields = {}
        if mode in ("extend", "mixed", "draft_extend"):
            fields["extend_seq_lens"] = index(news.values(), [1] * padded)
        return ForwardBatch(
            forward_mode=mode,
            req_pool_indices=index(news, [0] * padded),
            seq_lens=index([self.length(row) for row in news], [7] * padded),
            out_cache_loc=torch.cat([*slots, torch.zeros(padded, dtype=torch.int64)]).to(self.index_dtype),
            extras={name: index(values, [0] * padded) for name, values in extras.items()},
            **fields,
        )

    def expected(self, q, layer, news, prompts):
        out, first = torch.zeros(q.shape, dtype=torch.float64), 0
        for row, count in news.items():
            length, prompt = self.length(row), prompts.get(row)
            t = torch.arange(length)
            p = torch.arange(length - count, length)[:, None]
            seen = t <= p
            if layer.window is not None and prompt is None:
                seen = seen & (t >= p - WINDOW)
            elif layer.window is not None:
                seen = seen & ((t < prompt) | (t > p - self.reach))
            k, v = self.text[row][layer.layer_id]
            tokens = slice(first, first + count)
            out[tokens] = oracle_attention(q[tokens], k, v, seen, scale=layer.scale)[0]
            first += count
        return out


KINDS = [
    {},
    {"kernel": "poor", "page": 4},
    {"page": 4, "hybrid": True},
    {"kernel": "poor", "page": 3, "hybrid": True},
    {"inclusive": True, "index_dtype": torch.int32},
    {"kernel": "poor", "inclusive": True},
]


@pytest.fixture(params=KINDS, ids=lambda kind: "-".join(map(str, kind)) or "plain")
def chat(request):
    return Chat(**request.param)


def test_a_prompt_in_chunks_is_remembered_whole(chat):
    """Chunks see the plain window; then the whole prompt stays in sight."""
    chat.step("extend", {2: 5})
    assert chat.remembered == [0, 0, 5, 0, 0, 0]
    chat.step("extend", {2: 4, 3: 6})
    assert chat.remembered == [0, 0, 9, 6, 0, 0]
    for _ in range(6):
        chat.step("decode", {3: 1, 2: 1}, {2: 9, 3: 6})
    assert chat.remembered == [0, 0, 9, 6, 0, 0]


def test_a_decode_row_among_prompts_overwrites_nothing(chat):
    chat.step("extend", {1: 6, 4: 8})
    for _ in range(4):
        chat.step("decode", {1: 1}, {1: 6})
    chat.step("mixed", {1: 1, 2: 7, 4: 3}, {1: 6})
    assert chat.remembered == [0, 6, 7, 0, 11, 0]
    for _ in range(3):
        chat.step("decode", {1: 1, 2: 1, 4: 1}, {1: 6, 2: 7, 4: 11})


def test_a_prompt_of_one_token_in_a_mixed_batch_is_a_prompt(chat):
    chat.step("mixed", {3: 1})
    assert chat.remembered == [0, 0, 0, 1, 0, 0]
    for _ in range(6):
        chat.step("decode", {3: 1}, {3: 1})


def test_a_last_chunk_of_one_token_needs_a_word_of_the_engine(chat):
    """By its lengths alone it is a decode row; `prompt_lens` says that it is not."""
    chat.step("extend", {1: 8, 2: 8})
    chat.step("mixed", {1: 1}, {1: 8})
    assert chat.remembered[1] == 8
    chat.step("mixed", {2: 1, 1: 1}, {1: 8}, prompt_lens=[9, 8])
    assert chat.remembered[1:3] == [8, 9]
    chat.step("decode", {1: 1, 2: 1}, {1: 8, 2: 9})


def test_a_finished_request_is_forgotten(chat):
    chat.step("extend", {1: 6, 5: 4})
    chat.backend.release(torch.tensor([1], dtype=torch.int32))
    assert chat.remembered == [0, 0, 0, 0, 0, 4]
    chat.text[1] = [kv[:, :0] for kv in chat.text[1]]
    chat.step("mixed", {1: 1, 5: 1}, {5: 4})
    for _ in range(5):
        chat.step("decode", {1: 1, 5: 1}, {1: 1, 5: 4})


def test_a_new_prompt_takes_the_place_of_an_old_one(chat):
    chat.step("extend", {1: 9})
    chat.text[1] = [kv[:, :0] for kv in chat.text[1]]
    chat.step("extend", {1: 4})
    assert chat.remembered[1] == 4
    for _ in range(5):
        chat.step("decode", {1: 1}, {1: 4})


@pytest.mark.parametrize("mode", ["extend", "mixed"])
def test_padding_is_never_remembered(chat, mode):
    chat.step(mode, {1: 5, 5: 2}, padded=2)
    assert chat.remembered == [0, 5, 0, 0, 0, 2]
    for _ in range(4):
        chat.step("decode", {5: 1, 1: 1}, {1: 5, 5: 2}, padded=1)


def test_accepted_drafts_are_later_queries(chat):
    chat.step("extend", {1: 6, 2: 3})
    chat.step("draft_extend", {1: 4, 2: 1}, {1: 6, 2: 3})
    chat.step("draft_extend", {1: 0, 2: 5}, {1: 6, 2: 3})
    assert chat.remembered == [0, 6, 3, 0, 0, 0]


@pytest.mark.parametrize("mode", ["extend", "mixed"])
def test_explaining_remembers_nothing(chat, mode):
    chat.step("extend", {1: 6})
    plan = chat.backend.current
    slots = chat.grow(1, 5)
    explanation = chat.backend.explain(chat.batch(mode, {1: 5}, [slots]), chat.sliding)
    assert any("prefill_aware_swa" in overlay for overlay in explanation.overlays)
    assert chat.remembered == [0, 6, 0, 0, 0, 0]
    assert chat.backend.current is plan
    assert "keep" not in chat.backend.explain(chat.batch("decode", {1: 1}, [slots[:1]]), chat.full).segment.features()


def test_a_plan_remembers_once():
    """Several kinds of sliding layers share what is remembered."""
    scenario = Scenario.make(mode="mixed", overlay="prefill_aware", seed=3)
    wide = attrs.evolve(scenario.layers[0], layer_id=7, window=9)
    pools = scenario.pools()
    pools.kv.storage[7] = pools.kv.storage[0]
    backend = AttentionBackend(scenario.config, pools, [*scenario.layers, wide], registry=registry(scenario.config))
    for step in scenario.steps:
        step.enter(pools)
        plan = backend.plan(step.batch)
        keeps = [plan.steps[layer].segment.visibility.keep for layer in (scenario.layers[0].layer_id, 7)]
        assert (keeps[0] is None) == (keeps[1] is None)
        assert keeps[0] is None or keeps[0].tolist() == keeps[1].tolist()


@pytest.mark.parametrize("kernel", ["reference", "poor"])
@pytest.mark.parametrize("inclusive", [False, True])
@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize(
    ("mode", "topk"), [("draft_decode", 1), ("draft_decode", 3), ("target_verify", 1), ("target_verify", 3)]
)
def test_speculation_knows_the_prompt(mode, topk, hybrid, inclusive, kernel):
    def make(config, pools, layers):
        config = attrs.evolve(config, kernels=kernel)
        return AttentionBackend(config, pools, layers, registry=registry(config))

    options = {"mode": mode, "topk": topk, "hybrid": hybrid, "inclusive": inclusive, "page_size": 3}
    for result in run_scenario(Scenario.make(overlay="prefill_aware", windows=(2, 9), seed=topk, **options), make):
        assert result.status == "equal", str(result)


def test_without_the_option_windows_are_plain():
    config = BackendConfig(context_len=8, dtype=torch.float32)
    assert "prefill_aware_swa" not in {c.value.key for c in registry(config).overlays(config)}


def test_a_misspelt_option_is_an_error():
    scenario = Scenario.make(mode="decode", overlay="prefill_aware")
    config = attrs.evolve(scenario.config, options={"prefill_aware_swa": {"inclusve": True}})
    with pytest.raises(ConfigError, match="inclusve"):
        AttentionBackend(config, scenario.pools(), scenario.layers, registry=registry(config))


def test_a_window_that_counts_the_token_itself_has_at_least_that_one():
    """Of a window of 0 nothing would be left, not even the token."""
    layers = [AttentionLayer(layer_id=0, num_q_heads=1, num_kv_heads=1, head_dim=8, window=0)]
    kv = MHAPool(num_pages=4, layers=layers, dtype=torch.float32)
    pools = Pools(req_to_token=torch.zeros(2, 4, dtype=torch.int32), kv=kv)
    config = BackendConfig(context_len=4, dtype=torch.float32, options={"prefill_aware_swa": {}})
    with pytest.raises(ConfigError, match="at least the token itself"):
        AttentionBackend(config, pools, layers)
    AttentionBackend(attrs.evolve(config, options={"prefill_aware_swa": {"inclusive": True}}), pools, layers)
