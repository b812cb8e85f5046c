"""Memory runs out wherever it can: the error passes as it is, nothing is lost, and the next attempt is right."""

from __future__ import annotations

import attrs
import pytest
import torch

from faback import AttentionBackend, BatchError
from faback.pools import HybridAllocator, PageAllocator, TokenAllocator
from faback.testing import MODES, Scenario, run_scenario
from faback.testing.late import Replayed
from faults.injection import failures
from graphs.test_contract import backend, extend
from graphs.test_simulated import registry
from pools.snapshots import snapshot


class Unlucky:
    """A backend whose every plan and every call first fails in all the ways in which it can run out of memory."""

    def __init__(self, backend):
        self.backend, self.failures = backend, 0

    def plan(self, batch):
        for _ in failures(lambda: self.backend.plan(batch)):
            self.failures += 1
            with pytest.raises(BatchError, match="wanted a plan"):
                self._facade.forward(None, None, None, None)
        return self.backend.plan(batch)

    def forward(self, *args, **options):
        self.failures += sum(1 for _ in failures(lambda: self.backend.forward(*args, **options)))
        return self.backend.forward(*args, **options)

    @property
    def _facade(self):
        return getattr(self.backend, "backend", self.backend)


def unlucky(kind, kernel, made):
    def make(config, pools, layers):
        config = attrs.evolve(config, kernels=kernel)
        made.append(Unlucky(kind(config, pools, layers, registry=registry(config))))
        return made[-1]

    return make


@pytest.mark.parametrize("kernel", ["reference", "poor"])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "idle"])
def test_planning_and_attending(mode, kernel):
    made, overlay = [], "full" if mode == "embedding" else "prefill_aware"
    scenario = Scenario.make(mode=mode, overlay=overlay, page_size=4, batch_size=2, max_len=5)
    found = run_scenario(scenario, unlucky(AttentionBackend, kernel, made), lse=False)
    assert [str(result) for result in found if result.status != "equal"] == []
    assert made[0].failures > 10


@pytest.mark.parametrize("mode", ["decode", "target_verify", "mixed"])
def test_capturing_and_replaying(mode):
    made = []
    scenario = Scenario.make(mode=mode, overlay="window", page_size=4, batch_size=2, max_len=5)
    found = run_scenario(scenario, unlucky(Replayed, "poor", made), lse=False)
    assert [str(result) for result in found if result.status != "equal"] == []
    assert made[0].failures > 10


def test_reserving():
    """Part-way, nothing is kept; afterwards a smaller reservation is granted, and captured plans live in it."""
    made = backend(kernels="poor")
    small, large = extend([4], [2]), extend([4, 4], [2, 2])
    made.capture(small)
    before = made._graphs.arena.nbytes
    count = 0
    for _ in failures(lambda: made.reserve([small, large])):
        count += 1
        assert (made._graphs.arena.nbytes, made._graphs.arena.sealed) == (before, False)
    assert count > 1
    assert made._graphs.arena.sealed

    made = backend(kernels="poor")
    next(failures(lambda: made.reserve([large])))
    made.reserve([small])
    assert made.capture(small) is made.replay(small)


Q, KV = torch.randn(2, 2, 8), torch.randn(2, 1, 8)


def test_a_plan_that_was_captured_before_serves_on_after_a_failed_one():
    made = backend()
    small, large = extend([9], [2]), extend([4, 4], [1, 1])
    made.capture(small)
    wanted = made.forward(Q, KV, KV, made.layers[0])
    for _ in failures(lambda: made.capture(large)):
        made.replay(small)
        assert torch.equal(made.forward(Q, KV, KV, made.layers[0]), wanted)


ALLOCATORS = {
    "tokens": lambda: TokenAllocator(40),
    "pages": lambda: PageAllocator(12, 4),
    "hybrid": lambda: HybridAllocator(12, 4, num_window_pages=11),
}


@pytest.mark.parametrize("name", ALLOCATORS)
def test_no_page_is_lost_by_an_allocator(name):
    """What a failed call would have handed out is still free, and what it would have freed is still owned."""
    pool = ALLOCATORS[name]()

    def grant(call):
        before = snapshot(pool)
        for _ in failures(call):
            assert snapshot(pool) == before
        assert snapshot(pool) != before
        pool.check()

    owned = []
    grant(lambda: owned.append(pool.alloc_extend([0, 0], [6, 3])))
    first, second = owned[-1].split([6, 3])
    grant(lambda: owned.append(pool.alloc_extend([6, 3], [12, 7], [int(first[-1]), int(second[-1])])))
    more, others = owned[-1].split([6, 4])
    grant(lambda: owned.append(pool.alloc_decode([13, 8], torch.stack([more[-1], others[-1]]))))
    grant(lambda: owned.append(pool.alloc_branches([13, 8], owned[-1], 1, 3).slots))
    grant(lambda: owned.append(pool.alloc_pages(2)))
    if isinstance(pool, HybridAllocator):
        grant(lambda: pool.evict(torch.cat([first, more])[:8]))
    for slots in owned[-2:]:
        grant(lambda slots=slots: pool.free(slots))
