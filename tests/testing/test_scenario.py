"""What holds for every scenario: layout, poison, determinism."""

from __future__ import annotations

import random
import subprocess
import sys

import attrs
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from faback import ForwardBatch, KVPool
from faback.testing import MODES, OVERLAYS, Options, Scenario, impossible, outputs
from faback.testing.layers import as_bits
from faback.testing.poison import TABLE_FLAVOURS, is_poison, poisoned
from faback.testing.speculative import random_tree
from faback.testing.strategies import scenarios

CELLS = [
    (mode, overlay) for mode in MODES for overlay in OVERLAYS if impossible(Options(mode=mode, overlay=overlay)) is None
]
LIGHT = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def tensors(scenario):
    pools = scenario.pools()
    for step in scenario.steps:
        batch = [getattr(step.batch, field.name) for field in attrs.fields(ForwardBatch)]
        yield from (value for value in [*batch, step.req_to_token] if isinstance(value, torch.Tensor))
        for call in step.calls:
            values = (call.q, call.k, call.v, call.sinks, call.out, call.lse)
            yield from (value for value in values if value is not None)
    for pair in pools.kv.storage.values():
        yield from pair


@pytest.mark.parametrize(("mode", "overlay"), CELLS)
def test_equal_options_give_equal_bits(mode, overlay):
    topk = 2 if mode in ("draft_decode", "target_verify") else 1
    options = dict(mode=mode, overlay=overlay, page_size=4, seed=5, topk=topk, padded_rows=1)
    one, two = Scenario.make(**options), Scenario.make(**options)
    assert all(torch.equal(as_bits(a), as_bits(b)) for a, b in zip(tensors(one), tensors(two), strict=True))
    assert eval(str(one), {"Scenario": Scenario, "torch": torch}).options == one.options
    other = Scenario.make(**options | {"seed": 6})
    assert not torch.equal(one.steps[0].calls[0].q[:1], other.steps[0].calls[0].q[:1])


@LIGHT
@given(scenarios())
def test_layout_and_poison(scenario):
    pools = scenario.pools()
    assert isinstance(pools.kv, KVPool)
    page = scenario.options.page_size
    written = {layer.layer_id: set() for layer in scenario.layers}
    for step in scenario.steps:
        batch = step.batch
        step.enter(pools)
        assert (batch.req_pool_indices != 0).sum() == len(set(batch.req_pool_indices.tolist()) - {0})
        for call in step.calls:
            assert torch.isfinite(call.out).all()
            assert len(set(call.write_slots.tolist())) == len(call.write_slots), "one slot per token"
            assert 0 not in call.write_slots, "the padding slot belongs to nobody"
            before = written[call.layer.layer_id]
            fresh = torch.tensor([slot for slot in call.write_slots.tolist() if slot not in before], dtype=torch.int64)
            for buffer in pools.kv.buffers(call.layer):
                assert buffer.stride(-1) == 1
                assert is_poison(as_bits(buffer)[fresh].view(buffer.dtype)).all(), "new slots start as poison"
            before |= set(call.write_slots.tolist())
            padded = torch.tensor([token is None for token in step.queries], dtype=torch.bool)
            assert is_poison(call.q[padded]).all()
            assert torch.isfinite(call.q[~padded].float()).all()
            assert call.out[padded].eq(0).all()
            assert call.lse[padded].eq(-torch.inf).all()
    for layer in scenario.layers:
        for buffer in pools.kv.buffers(layer):
            assert is_poison(buffer[:page].float()).all(), "page 0 is poison"


@LIGHT
@given(scenarios(overlays=("full", "window", "local", "cross", "mla")))
def test_rows_are_whole_aligned_pages_of_their_own(scenario):
    page, step = scenario.options.page_size, scenario.steps[0]
    batch, owner = step.batch, {}
    if scenario.options.mode == "embedding":
        return
    for index, row in enumerate(batch.req_pool_indices.tolist()):
        if row == 0:
            continue
        length = int(batch.seq_lens[index]) + (0 if batch.encoder_lens is None else int(batch.encoder_lens[index]))
        slots = step.req_to_token[row, :length].tolist()
        for column, slot in enumerate(slots):
            assert slot % page == column % page
            assert slot // page != 0
            assert owner.setdefault(slot // page, row) == row, "no page of two requests"
            assert slot // page == slots[column // page * page] // page


@pytest.mark.parametrize("flavour", TABLE_FLAVOURS)
def test_tails_differ_and_nothing_else_does(flavour):
    plain = Scenario.make(mode="decode", page_size=4, seed=2, batch_size=3, tails="negative")
    other = Scenario.make(mode="decode", page_size=4, seed=2, batch_size=3, tails=flavour)
    lens = dict(
        zip(plain.steps[0].batch.req_pool_indices.tolist(), plain.steps[0].batch.seq_lens.tolist(), strict=True)
    )
    for row in range(plain.steps[0].req_to_token.shape[0]):
        live = lens.get(row, 0)
        table = other.steps[0].req_to_token[row]
        assert torch.equal(plain.steps[0].req_to_token[row, :live], table[:live])
        assert {"huge": table[live:].eq(2**30), "negative": table[live:].eq(-1)}.get(flavour, table[live:].gt(0)).all()
    assert all(torch.equal(a, b) for a, b in zip(outputs(plain), outputs(other), strict=True))


def test_pools_are_fresh_copies_with_the_original_strides():
    for seed in range(6):
        scenario = Scenario.make(mode="decode", seed=seed)
        first, second = scenario.pools().kv.storage[0], scenario.pools().kv.storage[0]
        for one, two, made in zip(first, second, scenario._pool.storage[0], strict=True):
            assert one.data_ptr() != two.data_ptr() != made.data_ptr()
            assert one.stride() == two.stride() == made.stride()
            assert torch.equal(as_bits(one), as_bits(made))


def test_edges_come_up():
    seen = {"no new": 0, "no prefix": 0, "length 1": 0, "empty batch": 0, "whole page": 0, "page + 1": 0}
    for seed in range(40):
        batch = Scenario.make(mode="extend", page_size=4, seed=seed, batch_size=seed % 4).steps[0].batch
        lens = batch.seq_lens
        seen["no new"] += int((batch.extend_seq_lens == 0).sum())
        seen["no prefix"] += int((batch.extend_prefix_lens == 0).sum())
        seen["length 1"] += int((lens == 1).sum())
        seen["whole page"] += int((lens % 4 == 0).sum())
        seen["page + 1"] += int((lens == 5).sum())
        seen["empty batch"] += batch.bs == 0
    assert all(seen.values()), seen


def test_given_lengths_are_kept():
    batch = Scenario.make(mode="extend", lengths=((0, 3), (63, 1), (9, 0)), page_size=16).steps[0].batch
    assert batch.seq_lens.tolist() == [3, 64, 9]
    assert batch.extend_prefix_lens.tolist() == [0, 63, 9]
    assert Scenario.make(mode="decode", lengths=((5, 1),)).steps[0].batch.seq_lens.tolist() == [6]
    drafted = Scenario.make(mode="draft_decode", lengths=((6, 0),), topk=2, draft_step=1, page_size=4).steps[0].batch
    assert drafted.seq_lens.tolist() == [6]
    assert drafted.out_cache_loc.shape == (6,)
    assert (drafted.out_cache_loc.view(2, 3)[:, 0] % 4 == 2).all(), (
        "the first draft sits behind the partial page's copy"
    )


def test_features_matter():
    """A backend that drops a feature cannot be equal: the expectation moves by more than the tolerance."""
    plain = Scenario.make(mode="extend", overlay="window", seed=1, batch_size=2)
    for feature in ({"sinks": True}, {"softcap": True}, {"scale": 1.0}, {"windows": (2, 2)}):
        other = Scenario.make(mode="extend", overlay="window", seed=1, batch_size=2, **feature)
        gap = max(
            float((a.out - b.out).abs().max()) for a, b in zip(plain.steps[0].calls, other.steps[0].calls, strict=True)
        )
        assert gap > 1e-2, feature


def test_window_pool_is_smaller_and_freed_pages_map_to_zero():
    freed = 0
    for seed in range(8):
        scenario = Scenario.make(
            mode="decode",
            overlay="window",
            hybrid=True,
            windows=(2, 3),
            page_size=3,
            seed=seed,
            lengths=((20, 1), (2, 1)),
        )
        kv, step = scenario.pools().kv, scenario.steps[0]
        slots = step.req_to_token[step.batch.req_pool_indices[0], :21].long()
        entries = kv.slot_map("window")[slots]
        assert entries[-4:].gt(0).all(), "whatever a window shows is there"
        freed += int(entries.eq(0).sum())
        assert kv.buffers(scenario.layers[1])[0].shape[0] < kv.num_slots
    assert freed


def test_trees_show_every_node_itself_and_its_ancestors():
    shuffled = 0
    for seed in range(30):
        tree = random_tree(6, random.Random(seed))
        for node, line in enumerate(tree):
            assert line[node]
            for above, seen in enumerate(line):
                if seen:
                    assert all(line[i] for i, further in enumerate(tree[above]) if further), "ancestors of ancestors"
                    shuffled += above > node
    assert shuffled, "some ancestors come after their descendants"


@pytest.mark.parametrize(
    "wanted",
    [
        {"mode": "decode", "topk": 2},
        {"mode": "extend", "ragged": True},
        {"mode": "embedding", "overlay": "cross"},
        {"mode": "decode", "hybrid": True},
        {"mode": "target_verify", "overlay": "encoder_only"},
    ],
)
def test_meaningless_combinations_say_why(wanted):
    with pytest.raises(ValueError, match=impossible(Options(**wanted))):
        Scenario.make(**wanted)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_poison_is_never_finite(dtype):
    assert is_poison(poisoned((50, 3), dtype, random.Random(1))).all()


def test_the_kit_needs_no_hypothesis():
    code = (
        "import sys; sys.modules['hypothesis'] = None; from faback.testing import Scenario; Scenario.make(mode='mixed')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
