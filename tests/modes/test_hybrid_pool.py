"""Sliding and local layers in a smaller pool that really evicts: `faback.pools.HybridPool` under whole generations.

Before every pass all window slots that no token owns hold NaN, page 0 among them, so that touching one shows.
"""

import pytest
import torch

from faback import AttentionBackend, AttentionLayer, BackendConfig, ForwardBatch, Pools, SpeculativeConfig, hookimpl
from faback.builtins import BUILTINS
from faback.core.registry import Registry
from faback.pools import HybridPool
from faback.testing import oracle_attention
from faback.testing.poor import Poor

WINDOW, CHUNK, CONTEXT, PAGES = 3, 5, 64, 60
STEPS, DRAFTS = 3, 4


class PoorPlugin:
    @hookimpl
    def faback_kernels(self):
        return [Poor()]


class Engine:
    """Requests 1 ... n with a sliding, a local and a full layer.

    Args:
        window_pages: pages of the window pool, page 0 included.
    """

    def __init__(self, kernel, page, *, topk=1, window_pages=PAGES, seed=0):
        sizes = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 4}
        self.layers = (
            AttentionLayer(layer_id=0, window=WINDOW, kv_group="window", **sizes),
            AttentionLayer(layer_id=1, chunk=CHUNK, kv_group="window", **sizes),
            AttentionLayer(layer_id=2, **sizes),
        )
        self.pool = HybridPool(
            num_pages=PAGES, num_window_pages=window_pages, page_size=page, layers=self.layers, dtype=torch.float32
        )
        self.allocator, self.page, self.topk = self.pool.allocator, page, topk
        held = self.allocator.alloc_pages(4)  # so that full slots and window slots differ
        self.allocator.evict(held[:page])
        self.allocator.free(held[page:])
        for layer in self.layers:
            for buffer in self.pool.buffers(layer):
                buffer.fill_(torch.nan)
        self.table = torch.full((9, CONTEXT), 1 << 30, dtype=torch.int32)
        config = BackendConfig(
            context_len=CONTEXT,
            dtype=torch.float32,
            kernels=kernel,
            speculative=SpeculativeConfig(topk=topk, num_steps=STEPS, num_draft_tokens=DRAFTS),
        )
        registry = Registry.load(config, BUILTINS, entry_points=[])
        registry.register(PoorPlugin(), "poor")
        pools = Pools(req_to_token=self.table, kv=self.pool)
        self.backend = AttentionBackend(config, pools, self.layers, registry=registry)
        self.generator = torch.Generator().manual_seed(seed)
        self.text = {row: [torch.zeros(2, 0, 2, 4)] * 3 for row in range(1, 9)}

    def noise(self, *shape):
        return torch.randn(shape, generator=self.generator)

    def length(self, row):
        return self.text[row][0].shape[1]

    def grow(self, row, count):
        """Slots for new tokens of a row, in its table."""
        old = self.length(row)
        last = self.table[row, old - 1 : old] if old else None
        slots = self.allocator.alloc_extend([old], [old + count], last)
        self.table[row, old : old + count] = slots
        return slots

    def extend(self, mode, news):
        """New tokens of each row, through the backend and the oracle."""
        slots = {row: self.grow(row, count) for row, count in news.items()}
        lens = [self.length(row) + (0 if mode == "target_verify" else count) for row, count in news.items()]
        fields = {} if mode in ("decode", "target_verify") else {"extend_seq_lens": torch.tensor(list(news.values()))}
        if mode == "target_verify" and self.topk > 1:
            fields["custom_mask"] = self.chain_mask(lens)
        batch = self.batch(mode, news, lens, out_cache_loc=torch.cat(list(slots.values())), **fields)
        fresh = {row: [self.noise(2, count, 2, 4) for _ in self.layers] for row, count in news.items()}
        for row, new in fresh.items():
            self.text[row] = [torch.cat([old, more], 1) for old, more in zip(self.text[row], new, strict=True)]
        views = {row: range(self.length(row) - n, self.length(row)) for row, n in news.items()}
        self.attend(batch, [(self.text[row], list(views[row])) for row in news], torch.cat(list(slots.values())), fresh)

    def batch(self, mode, rows, lens, **fields):
        return ForwardBatch(
            forward_mode=mode, req_pool_indices=torch.tensor(list(rows)), seq_lens=torch.tensor(lens), **fields
        )

    def chain_mask(self, lens):
        blocks = [torch.ones(DRAFTS, n + DRAFTS, dtype=torch.bool).tril(n) for n in lens]
        return torch.cat([block.flatten() for block in blocks])

    def attend(self, batch, queries, slots, fresh):
        """One pass over all layers.

        Args:
            queries: (text of all layers, positions of the queries in it) per group of queries.
            slots: full slots of the new tokens.
            fresh: k and v of the new tokens, [2, tokens, heads, dim] per layer, by group.
        """
        self.poison()
        self.backend.plan(batch)
        for number, layer in enumerate(self.layers):
            k, v = torch.cat([new[number] for new in fresh.values()], dim=1)
            q = self.noise(sum(len(positions) for _, positions in queries), 4, 4)
            before = [buffer.clone() for buffer in self.pool.buffers(layer)]
            out = self.backend.forward(q, k, v, layer)
            wanted = torch.cat([
                self.expected(layer, text[number], positions, part)
                for (text, positions), part in zip(queries, q.split([len(p) for _, p in queries]), strict=True)
            ])  # fmt: skip
            torch.testing.assert_close(out.double(), wanted, atol=2e-5, rtol=0)
            self.check_written(layer, before, slots, (k, v))

    def expected(self, layer, text, positions, q):
        p, t = torch.tensor(positions)[:, None], torch.arange(text.shape[1])
        seen = t <= p
        if layer.window is not None:
            seen = seen & (t >= p - layer.window)
        if layer.chunk is not None:
            seen = seen & (t // layer.chunk == p // layer.chunk)
        return oracle_attention(q, *text, seen, scale=layer.scale)[0]

    def check_written(self, layer, before, slots, new):
        """The layer's own slots hold the new numbers, and no other slot changed but those of padding."""
        own = slots.long() if layer.kv_group == "full" else self.allocator.full_to_window[slots.long()]
        assert bool((own >= self.page).all()), "a new token has no window slot"
        for buffer, old, values in zip(self.pool.buffers(layer), before, new, strict=True):
            old[own] = values
            changed = (buffer != old) & ~(buffer.isnan() & old.isnan())
            assert changed[self.page :].any(-1).any(-1).nonzero().flatten().tolist() == []

    def poison(self):
        """NaN in every slot that no token owns."""
        owned = torch.unique(self.allocator.full_to_window)
        free = torch.ones(self.pool.num_window_pages * self.page, dtype=torch.bool)
        free[owned] = False
        free[: self.page] = True
        for layer in self.layers[:2]:
            for buffer in self.pool.buffers(layer):
                buffer[free] = torch.nan

    def evict(self, row):
        """Frees what no later query of the row reaches in either window layer; says how many slots that is."""
        p = self.length(row)
        reached = min(p - WINDOW, p // CHUNK * CHUNK)
        return self.allocator.evict(self.table[row, :reached]) if reached > 0 else 0

    def finish(self, row):
        self.allocator.free(self.table[row, : self.length(row)])
        self.table[row] = 1 << 30
        self.text[row] = [torch.zeros(2, 0, 2, 4)] * 3
        self.backend.release(torch.tensor([row]))

    def draft(self, rows):
        """A round of drafting, branches in pages of their own."""
        lens = [self.length(row) for row in rows]
        last = torch.stack([self.table[row, n - 1] for row, n in zip(rows, lens, strict=True)])
        branches = self.allocator.alloc_branches(lens, last, self.topk, STEPS)
        self.pool.copy_slots(branches.copy_src, branches.copy_dst)
        texts = [self.text[row] for row in rows for _ in range(self.topk)]
        for step in range(STEPS):
            fresh = {b: [self.noise(2, 1, 2, 4) for _ in self.layers] for b in range(len(texts))}
            texts = [[torch.cat(p, 1) for p in zip(t, fresh[b], strict=True)] for b, t in enumerate(texts)]
            fields = {"out_cache_loc": branches.slots.flatten(), "draft_step": step, "num_tokens": len(texts)}
            batch = self.batch("draft_decode", rows, lens, **fields)
            queries = [(text, [lens[b // self.topk] + step]) for b, text in enumerate(texts)]
            self.attend(batch, queries, branches.slots[:, step], fresh)
        self.allocator.free(branches.slots)


@pytest.fixture(params=["reference", "poor"])
def kernel(request):
    return request.param


@pytest.mark.parametrize("page", [1, 3, 4])
def test_nothing_older_than_the_window_is_touched(kernel, page):
    """A long generation in a window pool that holds a fraction of it."""
    engine = Engine(kernel, page, window_pages=4 + 16 // page)
    engine.extend("extend", {3: 9})
    freed = engine.evict(3)
    for _ in range(20):
        engine.extend("decode", {3: 1})
        freed += engine.evict(3)
    assert freed > 12
    held = engine.allocator.full_to_window[engine.table[3, : engine.length(3)].long()]
    assert not held[:12].any(), "nothing was evicted"
    engine.allocator.check()


@pytest.mark.parametrize("page", [1, 4])
def test_freed_window_slots_serve_other_requests(kernel, page):
    """Prompts in chunks, mixed batches, requests that come and go."""
    engine = Engine(kernel, page, window_pages=6 + 24 // page)
    engine.extend("extend", {1: 7, 2: 4})
    engine.extend("extend", {1: 6})
    engine.evict(1)
    engine.extend("mixed", {2: 1, 5: 8, 1: 1})
    for row in (1, 2, 5):
        engine.evict(row)
    for _ in range(4):
        engine.extend("decode", {5: 1, 1: 1, 2: 1})
        for row in (1, 2, 5):
            engine.evict(row)
    engine.finish(1)
    engine.extend("mixed", {1: 9, 2: 1, 5: 1})
    engine.extend("extend", {1: 0, 5: 2})
    engine.extend("draft_extend", {2: 3, 1: 1})


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("topk", [1, 3])
def test_verification_writes_and_reads_translated(kernel, topk, page):
    engine = Engine(kernel, page, topk=topk)
    engine.extend("extend", {2: 11, 4: 2})
    for _ in range(3):
        engine.evict(2)
        engine.evict(4)
        engine.extend("target_verify", {4: DRAFTS, 2: DRAFTS})


@pytest.mark.parametrize("page", [1, 3, 4])
def test_each_draft_step_writes_its_own_column(kernel, page):
    """Branches read committed tokens from the request's own pages, as far as the window reaches."""
    engine = Engine(kernel, page, topk=3)
    engine.extend("extend", {1: 10, 6: 1, 3: 6})
    for row in (1, 6, 3):
        engine.evict(row)
    engine.draft([1, 6, 3])
    engine.extend("decode", {1: 1, 6: 1, 3: 1})
    engine.draft([6, 1])


def test_the_map_is_read_when_a_plan_is_made(kernel):
    """Eviction between two passes changes the map in place; the next plan sees it."""
    engine = Engine(kernel, 1)
    engine.extend("extend", {1: 12})
    before = engine.allocator.full_to_window.clone()
    engine.extend("decode", {1: 1})
    assert engine.evict(1) == 10
    assert not torch.equal(engine.allocator.full_to_window, before)
    engine.extend("decode", {1: 1})


def test_full_layers_are_not_translated(kernel):
    engine = Engine(kernel, 4)
    engine.extend("extend", {1: 5})
    segments = [engine.backend.current.steps[layer].segment for layer in range(3)]
    assert [segment.kv.slot_map is engine.allocator.full_to_window for segment in segments] == [True, True, False]
    assert [segment.write.slot_map is engine.allocator.full_to_window for segment in segments] == [True, True, False]
    assert segments[2].kv.slot_map is None
