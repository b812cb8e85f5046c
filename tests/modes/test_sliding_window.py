"""Sliding windows: exactly which keys are seen, in each mode and with several sizes in one model."""

import pytest
import torch


def seen_keys(made, layer, mode):
    """Per query, the positions with nonzero weight: values are one-hot by position."""
    width = layer.v_head_dim
    for request, length in enumerate(made.lens):
        made.v[layer.layer_id][request] = torch.eye(width)[:length, None].expand(-1, layer.num_kv_heads, -1).clone()
    made.cache_prefixes()
    out = made.run(layer, mode)
    return [sorted({int(i) for i in row.nonzero()[:, 1]}) for row in out]


@pytest.mark.parametrize("window", [0, 1, 4, 9, 10, 11, None])
@pytest.mark.parametrize("mode", ["decode", "extend", "mixed"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_the_keys_that_are_seen(world, layer, mode, window, page_size):
    new = 1 if mode == "decode" else 6
    made = world([layer(v_head_dim=16, window=window)], [10, 7], [new, 1], page_size=page_size)
    positions = [*range(10 - new, 10), 6]
    low = [0 if window is None else max(0, p - window) for p in positions]
    wanted = [list(range(first, p + 1)) for first, p in zip(low, positions, strict=True)]
    assert seen_keys(made, made.layers[0], mode) == wanted


def test_four_to_the_left_are_five_keys(world, layer):
    made = world([layer(v_head_dim=16, window=4)], [10], [1])
    assert seen_keys(made, made.layers[0], "decode") == [[5, 6, 7, 8, 9]]


def test_several_sizes_and_a_full_layer_in_one_plan(world, layer):
    layers = [layer(0), layer(1, window=1), layer(2, window=5), layer(3, window=1)]
    made = world(layers, [10, 3, 8], [4, 3, 1], page_size=4)
    made.backend.plan(made.batch("mixed"))
    for each in layers:
        made.check(each, made.backend.forward(made.q[each.layer_id], *made.fresh(each), each))


def test_a_window_wider_than_the_text_changes_nothing(world, layer):
    made = world([layer(0), layer(1, window=50)], [10, 3], [4, 3])
    for store in (made.q, made.k, made.v):
        store[1] = store[0]
    made.cache_prefixes()
    assert torch.equal(made.run(made.layers[0]), made.run(made.layers[1]))


def test_nothing_left_of_the_window_is_touched(world, layer):
    """Freed window slots may be anything: here the table points outside of the pool."""
    made = world([layer(window=3)], [12, 9], [2, 1])
    wanted = made.run(made.layers[0])
    made.pools.req_to_token[made.rows[0], :7] = 1 << 30
    made.pools.req_to_token[made.rows[1], :5] = 1 << 30
    assert torch.equal(made.run(made.layers[0]), wanted)
