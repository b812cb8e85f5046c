"""Which layers choose, and the pool that divides a group among its layers."""

import pytest
import torch
from small_engine import layer

from faback import ConfigError
from faback.pools import HybridPool, MHAPool
from faback_block_sparse import GroupPerLayer, own_groups, sparse_layers

LAYERS = [
    layer(4),
    layer(0, window=4),
    layer(1, chunk=4),
    layer(2, causal=False),
    layer(3, cross=True),
    layer(5, kv_group="none"),
    layer(6, kv_group="window"),
    layer(7, kv_group="window", window=4),
    layer(8, sinks=True, softcap=3.0),
]


def hybrid():
    layers = [one for one in LAYERS if one.cached]
    return HybridPool(num_pages=6, num_window_pages=3, page_size=2, layers=layers, dtype=torch.float16)


def test_plain_causal_layers_in_slots_of_their_own_choose():
    assert [one.layer_id for one in sparse_layers(LAYERS, hybrid())] == [4, 8]


def test_layers_of_one_group_get_groups_of_their_own_and_others_keep_theirs():
    apart = own_groups(LAYERS)
    assert len({one.kind for one in apart if one.layer_id in (0, 1, 2, 3, 4, 8)}) == 6
    assert [one.kv_group for one in apart[5:8]] == ["none", "window", "window"]
    pool = hybrid()
    divided = GroupPerLayer(pool)
    assert (divided.page_size, divided.num_slots) == (pool.page_size, pool.num_slots) == (2, 12)
    assert [one.layer_id for one in sparse_layers(apart, divided)] == [4, 8]
    for mine, given in zip(apart, LAYERS, strict=True):
        if mine.cached:
            assert divided.slot_map(mine.kv_group) is pool.slot_map(given.kv_group)
            assert divided.dtype(mine.kind) == torch.float16
            pairs = zip(divided.buffers(mine), pool.buffers(given), strict=True)
            assert all(ours.data_ptr() == theirs.data_ptr() for ours, theirs in pairs)


def test_a_group_that_the_pool_does_not_have_is_still_refused():
    divided = GroupPerLayer(MHAPool(num_pages=3, layers=[layer(0)]))
    with pytest.raises(ConfigError, match="MHAPool group: wanted 'full', got 'window'"):
        divided.slot_map("window")
