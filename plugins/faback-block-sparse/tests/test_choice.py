"""What is chosen: the block with the key that a query looks for, in whatever head and layer it is."""

import pytest
import torch
from small_engine import DIM, HEADS, KV_HEADS, Engine, layer

from faback_block_sparse import QueryMemory

SETTINGS = {"block_size": 16, "top_k": 1, "local_blocks": 1}
NEEDLE = 53  # in block 3


def choices(made, batch):
    """[blocks that were chosen] of the first piece, by layer id."""
    steps = made.backend.build(batch, made.backend.workspace()).steps
    return {one.layer_id: steps[one.layer_id].segment.choices[one.kind].chosen[0].tolist() for one in made.sparse}


def planted(made, layer_id, head, strength=8.0):
    """A needle in one head of one layer, and the query that looks for it."""
    direction = made.noise(DIM)
    direction /= direction.norm()
    key = made.noise(KV_HEADS, DIM)
    key[head] = direction * strength
    query = made.noise(len(made.sparse), 1, HEADS, DIM) * 0.2
    query[layer_id, 0, head * HEADS // KV_HEADS] = direction * 2 * strength
    return {(1, layer_id, NEEDLE): key}, query


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("head", range(KV_HEADS))
@pytest.mark.parametrize("layer_id", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_the_needle_is_found(page, head, layer_id, seed):
    made = Engine(SETTINGS, page=page, seed=seed)
    needle, query = planted(made, layer_id, head)
    made.step([(1, 150)], keys=needle)
    batch, _ = made.step([(1, 1)], query=query)
    assert choices(made, batch) == {0: [NEEDLE // 16], 1: [NEEDLE // 16]}


def test_without_the_needle_that_block_is_one_of_many():
    """The test above can fail."""
    found = []
    for seed in range(8):
        made = Engine(SETTINGS, page=4, seed=seed)
        _, query = planted(made, 0, 0)
        made.step([(1, 150)])
        batch, _ = made.step([(1, 1)], query=query)
        found.append(choices(made, batch)[0][0])
    assert len(set(found)) > 3


def test_among_equals_the_earlier_blocks_are_chosen():
    made = Engine({**SETTINGS, "top_k": 3}, page=4)
    made.step([(1, 150)])
    batch, _ = made.step([(1, 1)], query=torch.zeros(2, 1, HEADS, DIM))
    assert choices(made, batch) == {0: [1, 2, 3], 1: [1, 2, 3]}


def test_a_needle_of_the_prefix_is_found_by_a_later_chunk():
    made = Engine(SETTINGS, page=4)
    needle, query = planted(made, 1, 0)
    made.step([(1, 100)], keys=needle)
    batch, _ = made.step([(1, 40)], query=query)
    assert choices(made, batch)[1] == [NEEDLE // 16]


def test_layers_of_groups_of_their_own_find_their_own_needles():
    made = Engine(SETTINGS, page=4, apart=True)
    first, query = planted(made, 0, 1)
    second, other = planted(made, 1, 0)
    moved = {(1, 1, 101): second[1, 1, NEEDLE]}
    query[1] = other[1]
    made.step([(1, 150)], keys={**first, **moved})
    batch, _ = made.step([(1, 1)], query=query)
    assert choices(made, batch) == {0: [3], 1: [6]}


def test_a_large_scale_counts_as_in_attention():
    """A KV head whose stored keys are small and whose scale is large: its needle counts as much as its scores do."""
    scales = {"k_scale": torch.tensor([1.0, 20.0])}
    made = Engine(SETTINGS, page=4, layers=[layer(0, **scales)])
    needle, query = planted(made, 0, 1)
    made.step([(1, 150)], keys=needle)
    batch, _ = made.step([(1, 1)], query=query)
    stored = made.kv.buffers(made.layers[0])[0][made.table[1, NEEDLE], 1]
    torch.testing.assert_close(stored * 20, made.keys(1, 0)[NEEDLE, 1])
    assert choices(made, batch) == {0: [3]}


def test_the_last_query_of_each_request_is_kept():
    made = Engine(SETTINGS, page=4, layers=[layer(0, window=3), layer(1), layer(2)])
    queries = QueryMemory(made.layers, made.pools)
    batch, _ = made.step([(1, 20), (3, 2), (2, 5)], padded_rows=1, padded_tokens=2)
    q = made.noise(29, HEADS, DIM)
    for one in made.layers:
        queries.note(q + one.layer_id, one, batch)
    found = queries.read(torch.tensor([3, 1, 2, 4]))
    assert found.shape == (2, 4, HEADS, DIM)
    for place, shift in enumerate((1, 2)):
        torch.testing.assert_close(found[place], torch.stack([q[21], q[19], q[26], q[21] * 0 - shift]) + shift)
    batch, _ = made.step([(3, 1), (1, 1)])
    queries.note(q[:2] * 3, made.layers[1], batch)
    batch, _ = made.step([(2, 0), (4, 6)])
    queries.note(q[:6] * 5, made.layers[2], batch)
    later = queries.read(torch.tensor([3, 1, 2]))
    torch.testing.assert_close(later[0], torch.stack([q[0] * 3, q[1] * 3, q[26] + 1]))
    torch.testing.assert_close(later[1], found[1, :3])
    torch.testing.assert_close(queries.read(torch.tensor([4]))[1, 0], q[5] * 5)


def test_what_was_kept_goes_into_the_next_pass():
    made = Engine(SETTINGS, page=4)
    queries = QueryMemory(made.layers, made.pools)
    batch, _ = made.step([(1, 150), (2, 70)])
    queries.note(made.noise(220, HEADS, DIM), made.layers[0], batch)
    made.step([(2, 1), (1, 1)], query=queries.read(torch.tensor([2, 1])))
