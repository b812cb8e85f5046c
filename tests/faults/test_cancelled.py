"""Batches that are planned and never run, and requests that go in between: what lives on is right, no page is lost."""

from __future__ import annotations

import pytest
import torch

from faback import AttentionBackend, AttentionLayer, BackendConfig, ForwardBatch, Pools
from faback.pools import HybridPool, ReqToTokenPool

PAGE, WINDOW, CONTEXT = 4, 5, 64
SHAPE = {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 8}
LAYERS = (
    AttentionLayer(layer_id=0, **SHAPE),
    AttentionLayer(layer_id=1, window=WINDOW, kv_group="window", **SHAPE),
)


class Engine:
    """Requests by row; every token's q, k and v follow from its request's seed, so that a request can come again."""

    def __init__(self):
        self.rows = ReqToTokenPool(num_requests=4, context_len=CONTEXT)
        self.kv = HybridPool(num_pages=33, num_window_pages=33, page_size=PAGE, layers=LAYERS, dtype=torch.float32)
        self.slots = self.kv.allocator
        config = BackendConfig(context_len=CONTEXT, dtype=torch.float32, options={"prefill_aware_swa": {}})
        pools = Pools(req_to_token=self.rows.req_to_token, kv=self.kv)
        self.backend = AttentionBackend(config, pools, LAYERS)
        self.seeds, self.lens = {}, {}

    def admit(self, seed, length):
        (row,) = self.rows.alloc()
        slots = self.slots.alloc_extend([0], [length])
        self.rows.write(row, 0, slots)
        self.seeds[row], self.lens[row] = seed, length
        return row, slots

    def grow(self, row):
        self.lens[row] += 1
        length = self.lens[row]
        slots = self.slots.alloc_decode([length], self.rows.req_to_token[row, length - 2].view(1))
        self.rows.write(row, length - 1, slots)
        return slots

    def finish(self, row):
        self.backend.release(torch.tensor([row]))
        self.slots.free(self.rows.req_to_token[row, : self.lens.pop(row)])
        self.rows.free([row])
        del self.seeds[row]

    def batch(self, mode, rows, slots, new):
        lens = torch.tensor([self.lens[row] for row in rows])
        fields = {"extend_seq_lens": torch.tensor(new)} if mode == "extend" else {}
        indices = torch.tensor(rows)
        return ForwardBatch(
            forward_mode=mode, req_pool_indices=indices, seq_lens=lens, out_cache_loc=torch.cat(slots), **fields
        )

    def tokens(self, rows, new):
        """q, k and v of the last tokens of each row."""
        found = []
        for row, count in zip(rows, new, strict=True):
            generator = torch.Generator().manual_seed(self.seeds[row])
            text = torch.randn(CONTEXT, 4, 8, generator=generator)
            found.append(text[self.lens[row] - count : self.lens[row]])
        return torch.cat(found).split([2, 1, 1], dim=1)

    def attend(self, rows, new):
        tensors = self.tokens(rows, new)
        return [self.backend.forward(*tensors, layer) for layer in LAYERS]

    def prefill(self, seed, length):
        row, slots = self.admit(seed, length)
        self.backend.plan(self.batch("extend", [row], [slots], [length]))
        return row, self.attend([row], [length])

    def decode(self, rows):
        self.backend.plan(self.batch("decode", rows, [self.grow(row) for row in rows], [1] * len(rows)))
        return self.attend(rows, [1] * len(rows))


def alone(seed, length, steps):
    """What a request's decode steps answer in an engine of its own."""
    engine = Engine()
    row, _ = engine.prefill(seed, length)
    return [engine.decode([row]) for _ in range(steps)]


def same(found, wanted, row):
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine[row : row + 1], theirs, atol=1e-6, rtol=0)


@pytest.mark.parametrize("runs", [False, True], ids=["dropped", "run all the same"])
def test_a_request_is_freed_between_plan_and_forward(runs):
    """The other one of the batch goes on, and the pages come back, whether the planned pass still runs or not."""
    engine, wanted = Engine(), alone(1, 9, 3)
    free = engine.slots.available_pages
    stays, goes = engine.prefill(1, 9)[0], engine.prefill(2, 7)[0]
    both = [stays, goes]
    batch = engine.batch("decode", both, [engine.grow(row) for row in both], [1, 1])
    tensors = engine.tokens(both, [1, 1])
    engine.backend.plan(batch)
    engine.finish(goes)
    if runs:
        same([engine.backend.forward(*tensors, layer) for layer in LAYERS], wanted[0], 0)
    else:
        engine.backend.plan(engine.batch("decode", [stays], [batch.out_cache_loc[:1]], [1]))
        same(engine.attend([stays], [1]), wanted[0], 0)
    same(engine.decode([stays]), wanted[1], 0)
    newcomer = engine.prefill(3, 11)[0]  # in the row and the pages of the one that went
    assert newcomer == goes
    answers = engine.decode([newcomer, stays])
    same(answers, alone(3, 11, 1)[0], 0)
    same(answers, wanted[2], 1)
    engine.finish(stays)
    engine.finish(newcomer)
    assert engine.slots.available_pages == free
    engine.slots.check()
    engine.rows.check()


def test_a_plan_is_dropped():
    """A prompt is planned, and cancelled before it runs; its row goes to another request."""
    engine = Engine()
    free = engine.slots.available_pages
    row, slots = engine.admit(4, 13)
    engine.backend.plan(engine.batch("extend", [row], [slots], [13]))
    engine.finish(row)
    wanted = alone(5, 3, 6)
    row, _ = engine.prefill(5, 3)
    for step in wanted:
        same(engine.decode([row]), step, 0)
    engine.finish(row)
    assert engine.slots.available_pages == free
    engine.slots.check()
