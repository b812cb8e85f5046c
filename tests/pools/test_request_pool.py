from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from faback.core.errors import ConfigError, PoolError
from faback.pools import ReqToTokenPool

from .snapshots import snapshot


def test_table_has_a_padding_row_that_is_never_handed_out() -> None:
    pool = ReqToTokenPool(3, 5)
    assert pool.req_to_token.shape == (4, 5)
    assert pool.req_to_token.dtype == torch.int32
    assert sorted(pool.alloc(3)) == [1, 2, 3]
    assert pool.available == 0


def test_exhaustion_raises_and_changes_nothing() -> None:
    pool = ReqToTokenPool(3, 5)
    pool.alloc(2)
    before = snapshot(pool)
    with pytest.raises(PoolError, match=r"wanted 2 free rows, got 1\. Free the rows"):
        pool.alloc(2)
    assert snapshot(pool) == before
    assert pool.alloc(1) == [3]


@pytest.mark.parametrize("n", [-1, True, 1.0])
def test_alloc_refuses_what_is_no_count(n: int) -> None:
    with pytest.raises(PoolError, match=r"alloc\.n"):
        ReqToTokenPool(3, 5).alloc(n)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([1, 2], "free"),
        ([1, 0], "reserved for padding"),
        ([1, 4], "rows 1 to 3"),
        ([-1], "rows 1 to 3"),
        ([1, 1], "each row once"),
    ],
)
def test_free_of_a_wrong_row_raises_and_changes_nothing(rows: list[int], message: str) -> None:
    pool = ReqToTokenPool(3, 5)
    assert pool.alloc() == [1]
    before = snapshot(pool)
    with pytest.raises(PoolError, match=message):
        pool.free(rows)
    assert snapshot(pool) == before


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, list])
def test_write_puts_slots_at_their_tokens(dtype: type | torch.dtype) -> None:
    pool = ReqToTokenPool(2, 5)
    (row,) = pool.alloc()
    slots = [7, 8, 9] if dtype is list else torch.tensor([7, 8, 9], dtype=dtype)  # type: ignore[arg-type]
    pool.write(row, 2, slots)
    expected = torch.zeros(3, 5, dtype=torch.int32)
    expected[row, 2:] = torch.tensor([7, 8, 9])
    assert torch.equal(pool.req_to_token, expected)


@pytest.mark.parametrize(
    ("row", "start", "slots"),
    [
        (2, 0, [7]),
        (0, 0, [7]),
        (1, 4, [7, 8]),
        (1, -1, [7]),
        (1, 0, [-1]),
        (1, 0, [2**31]),
        (1, 0, [0.5]),
        (1, 0, [True]),
        (1, 0, torch.zeros(1, dtype=torch.int16)),
        (1, 0, torch.zeros((1, 1), dtype=torch.int32)),
    ],
)
def test_wrong_writes_raise_and_change_nothing(row: int, start: int, slots: list[int]) -> None:
    pool = ReqToTokenPool(3, 5)
    pool.alloc()
    before = snapshot(pool)
    with pytest.raises(PoolError):
        pool.write(row, start, slots)
    assert snapshot(pool) == before


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_write_tokens_serves_many_requests_at_once(dtype: torch.dtype) -> None:
    pool = ReqToTokenPool(2, 5)
    pool.alloc(2)
    args = [torch.tensor(values, dtype=dtype) for values in ([2, 1, 1], [4, 0, 3], [70, 80, 90])]
    pool.write_tokens(*args)
    assert pool.req_to_token.tolist() == [[0] * 5, [80, 0, 0, 90, 0], [0, 0, 0, 0, 70]]


@pytest.mark.parametrize(
    ("rows", "positions", "slots"),
    [
        ([1, 2], [0, 0], [7, 8]),
        ([1, 1], [0, 5], [7, 8]),
        ([1, 1], [0, -1], [7, 8]),
        ([1, 1], [0], [7, 8]),
        ([1], [0], [-7]),
    ],
)
def test_wrong_write_tokens_raise_and_change_nothing(rows: list[int], positions: list[int], slots: list[int]) -> None:
    pool = ReqToTokenPool(3, 5)
    pool.alloc()
    before = snapshot(pool)
    with pytest.raises(PoolError):
        pool.write_tokens(rows, positions, slots)
    assert snapshot(pool) == before


@pytest.mark.parametrize(("num_requests", "context_len"), [(0, 4), (4, 0), (True, 4), (4, 2.0)])
def test_sizes_are_checked(num_requests: int, context_len: int) -> None:
    with pytest.raises(ConfigError, match="ReqToTokenPool"):
        ReqToTokenPool(num_requests, context_len)


@settings(deadline=None)
@given(st.data())
def test_random_life(data: st.DataObject) -> None:
    pool = ReqToTokenPool(data.draw(st.integers(1, 6)), 4)
    held: list[int] = []
    for _ in range(data.draw(st.integers(1, 20))):
        if data.draw(st.booleans()):
            n = data.draw(st.integers(0, 4))
            if n > pool.num_requests - len(held):
                with pytest.raises(PoolError):
                    pool.alloc(n)
            else:
                rows = pool.alloc(n)
                assert len(rows) == n
                assert not set(rows) & {0, *held}
                held += rows
        else:
            gone = data.draw(st.lists(st.sampled_from(held), unique=True) if held else st.just([]))
            pool.free(gone)
            held = [row for row in held if row not in gone]
        pool.check()
        assert pool.available + len(held) == pool.num_requests
    pool.clear()
    assert pool.available == pool.num_requests
