"""Stories drawn at random: any sizes, any order of prompts, chunks, decoding, ends, rewinds and other modes' passes."""

import random

import pytest
from small_engine import CONTEXT, Engine


def drawn(pick):
    """An engine of any kind."""
    page = pick.choice([1, 2, 3, 8, 16, 64])
    recent = pick.choice(["all", "all", "local"])
    settings = {
        "block_size": page * pick.choice([1, 1, 2, 5] if page < 64 else [1]),
        "top_k": pick.choice([0, 1, 2, 3, 50]),
        "local_blocks": pick.choice([1, 2, 3]),
        "recent": recent,
        "catch_up": pick.choice([None, 1, 7, 30]) if recent == "all" else None,
    }
    more = {"kernel": pick.choice(["reference", "poor"]), "graphs": pick.random() < 0.5, "apart": pick.random() < 0.3}
    return Engine(settings, page=page, seed=pick.getrandbits(16), checks=True, **more)


def passes(made, pick):
    """One pass over some requests."""
    rows = pick.sample([1, 2, 3, 4], pick.randint(1, 4))
    decode = pick.random() < 0.6
    work = [(row, 1 if decode else pick.choice([0, 1, 2, 5, 17, 60])) for row in rows]
    work = [(row, new) for row, new in work if 0 < made.length[row] + new <= CONTEXT // 2]
    plain = pick.random() < 0.2
    padding = {"padded_rows": pick.choice([0, 0, 2]), "padded_tokens": pick.choice([0, 0, 3])}
    if work:
        made.step(work, mode="decode" if decode else "extend", plain=plain, **padding)


def ends(made, pick):
    """A request ends, or loses its last tokens and goes on in a pass of these modes."""
    row = pick.choice([row for row in made.length if made.length[row] > 1])
    if pick.random() < 0.5:
        made.free(row)
        return
    keep = pick.randint(1, made.length[row] - 1)
    pages = -(-keep // made.page) * made.page
    made.allocator.free(made.table[row, pages : made.length[row]].clone())
    made.forget(row, keep)
    made.step([(row, 1)])


@pytest.mark.parametrize("seed", range(24))
def test_stories(seed):
    pick = random.Random(f"story {seed}")
    made = drawn(pick)
    made.step([(1, 40), (2, 30)])
    for _ in range(12):
        if pick.random() < 0.2 and any(length > 1 for length in made.length.values()):
            ends(made, pick)
        else:
            passes(made, pick)
    for row, known in made.known.items():
        assert int(made.memory.done[row]) == known
