"""The lowering: what it declares, that pages stay pages, and that lists are no longer than they must be."""

import attrs
import pytest
import torch
from small_engine import Engine

from faback.core.kernel import KernelRequest
from faback.core.segment import FEATURES
from faback_block_sparse.lowering import UNSUITED, BlockTable
from faback_block_sparse.segment import FEATURE

SETTINGS = {"block_size": 8, "top_k": 2, "local_blocks": 2}


def request(*features):
    return KernelRequest(
        forward_mode="block_sparse_extend",
        device="cpu",
        arch=0,
        q_dtype=torch.float32,
        kv_dtype=torch.float32,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=8,
        v_head_dim=8,
        page_size=4,
        features=frozenset(features),
    )


def lowered(made, batch):
    """The segment of layer 0 as a mode hands it to kernels, and what the lowering makes of it."""
    ws, mode = made.backend.workspace(), made.backend.modes[batch.forward_mode].value
    segment = made.backend.build(batch, ws).steps[0].segment
    context = made.backend._planner.context
    [part] = mode.calls(segment, made.layers[0].kind, context)
    [table] = BlockTable().lower(part, ws, context)
    return part, table.check("the lowering")


def test_what_it_declares():
    asked = request(FEATURE, "softcap", "sinks", "lse", "kv_scales", "latent", "graph")
    assert BlockTable().becomes(asked) == (attrs.evolve(asked, features=asked.features - {FEATURE} | {"dense_table"}),)


@pytest.mark.parametrize("feature", sorted(UNSUITED))
def test_segments_that_are_not_its_own_any_more_are_left_alone(feature):
    assert BlockTable().becomes(request(FEATURE, feature)) == ()


def test_every_word_is_either_of_the_call_or_unsuited():
    """A word that faback adds must be thought of here."""
    assert set(FEATURES) - UNSUITED == {"softcap", "sinks", "lse", "kv_scales", "latent", "deterministic", "graph"}


@pytest.mark.parametrize("page", [1, 4, 8])
def test_pages_stay_pages_and_features_are_as_declared(page):
    made = Engine(SETTINGS, page=page)
    made.step([(1, 150), (2, 31)])
    for work in ([(1, 1), (2, 1)], [(2, 30), (1, 9)]):
        batch, _ = made.step(work)
        part, table = lowered(made, batch)
        assert part.features() == {FEATURE}
        assert table.features() == {"dense_table"}
        assert table.kv.page_size == page
        pieces = zip(part.choice.chosen.tolist(), part.choice.pieces[3, :-1].tolist(), strict=True)
        for chosen, end in pieces:
            listed = [number for number in chosen if number >= 0]
            assert listed == sorted(set(listed)) and chosen[len(listed) :] == [-1] * (len(chosen) - len(listed))
            assert all(0 < number * 8 < end for number in listed)
        for slots, length in zip(table.kv.req_to_token, table.kv_len.tolist(), strict=True):
            heads = slots[:length:page]
            assert not (heads % page).any()
            offsets = torch.arange(length)
            assert torch.equal(slots[:length], heads[offsets // page] + offsets % page)
            assert not slots[length:].any()


def test_a_decoding_request_costs_its_blocks_and_not_its_length():
    made = Engine(SETTINGS, page=4)
    made.step([(1, 170)])
    batch, _ = made.step([(1, 1)])
    _, table = lowered(made, batch)
    assert table.max_kv_len == 8 * (1 + 2 + 2)
    assert table.kv_len.tolist() == [8 * (1 + 2) + 8 + 171 - 168]  # sink, two chosen, the block before, three tokens


@pytest.mark.parametrize("recent", ["all", "local"])
def test_the_bounds_hold(recent):
    made = Engine({**SETTINGS, "recent": recent}, page=4)
    for work in ([(1, 61), (2, 3)], [(1, 40), (3, 17), (2, 1)], [(1, 1), (2, 8)], [(1, 70)], [(2, 9), (3, 2), (1, 0)]):
        batch, _ = made.step(work)
        part, table = lowered(made, batch)
        assert part.choice.width == table.max_kv_len >= int(table.kv_len.max()) > 0
        spans = table.cu_seqlens_q.diff()
        assert int(spans.min()) >= 0 and int(spans.max()) <= table.max_seqlen_q
        assert int(spans.sum()) == sum(new for _, new in work)
