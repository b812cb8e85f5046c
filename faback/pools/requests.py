"""Rows of the request table: which slot holds each token of each request."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import torch

from faback.core.errors import PoolError
from faback.core.pools import MAX_SLOTS
from faback.pools.checks import Index, at_least, check_count, check_values, index_tensor, real_device

Tensor = torch.Tensor


@attrs.define(eq=False)
class ReqToTokenPool:
    """Hands out rows of `req_to_token`. Row 0 is never handed out: padded batch rows point at it.

    Contents of a row past a request's length are left from earlier use; nothing may depend on them.

    Attributes:
        num_requests: requests that can live at once.
        context_len: tokens per row, draft tokens included.
        device: where the table lives.
        req_to_token: int32 [num_requests + 1, context_len], slot of each token.
    """

    num_requests: int = attrs.field(validator=at_least(1))
    context_len: int = attrs.field(validator=at_least(1))
    device: torch.device = attrs.field(default=torch.device("cpu"), converter=real_device)
    req_to_token: Tensor = attrs.field(init=False, repr=False)
    _free: list[int] = attrs.field(init=False, repr=False)
    _used: set[int] = attrs.field(init=False, repr=False, factory=set)

    def __attrs_post_init__(self) -> None:
        shape = (self.num_requests + 1, self.context_len)
        self.req_to_token = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self.clear()

    @property
    def available(self) -> int:
        """Rows that can still be handed out."""
        return len(self._free)

    def alloc(self, n: int = 1) -> list[int]:
        """Takes n rows, the lowest first in a fresh pool.

        Raises:
            PoolError: fewer than n rows are free.
        """
        check_count("alloc.n", n)
        if n > self.available:
            hint = "Free the rows of finished requests, or make the pool with more num_requests."
            raise PoolError("request rows", wanted=f"{n} free rows", got=self.available, hint=hint)
        rows = [self._free.pop() for _ in range(n)]
        self._used.update(rows)
        return rows

    def free(self, rows: Iterable[int]) -> None:
        """Gives rows back.

        Raises:
            PoolError: a row is not in use, is listed twice, is not of this pool, or is the reserved row 0.
        """
        listed = [int(row) for row in rows]
        for row in listed:
            self._check_row(row)
        if len(set(listed)) != len(listed):
            raise PoolError("free.rows", wanted="each row once", got=listed)
        self._used.difference_update(listed)
        self._free.extend(reversed(listed))

    def write(self, row: int, start: int, slots: Index) -> None:
        """Writes the slots of tokens start ... start + n - 1 of one request.

        Args:
            row: a row in use.
            start: the first token, counted from the request's beginning.
            slots: [n] integers, int32 or int64; any device.

        Raises:
            PoolError: the row is not in use, the tokens do not fit in the row, or a slot is malformed (values are
                looked at where they lie on the CPU).
        """
        self._check_row(row)
        check_count("write.start", start)
        values = self._slots(slots)
        end = start + values.shape[0]
        self._check_end(end)
        self.req_to_token[row, start:end] = values

    def write_tokens(self, rows: Index, positions: Index, slots: Index) -> None:
        """Writes one slot per entry, for tokens of many requests at once: `table[rows[i], positions[i]] = slots[i]`.

        Args:
            rows: [n] rows in use.
            positions: [n] tokens, counted from their request's beginning.
            slots: [n].

        Raises:
            PoolError: as `write`; rows and positions that lie on an accelerator are not looked at.
        """
        row, position, values = index_tensor("rows", rows), index_tensor("positions", positions), self._slots(slots)
        if not row.shape == position.shape == values.shape:
            got = [row.shape[0], position.shape[0], values.shape[0]]
            raise PoolError("write_tokens", wanted="rows, positions and slots of one length", got=got)
        if row.device.type == "cpu":
            for used in set(row.tolist()):
                self._check_row(used)
        if position.device.type == "cpu" and position.numel():
            check_count("write_tokens.positions", int(position.min()))
            self._check_end(int(position.max()) + 1)
        table, device = self.req_to_token, self.device
        table[row.to(device, torch.int64), position.to(device, torch.int64)] = values.to(device, torch.int32)

    def clear(self) -> None:
        """Frees every row."""
        self._free = list(range(self.num_requests, 0, -1))
        self._used = set()

    def check(self) -> None:
        """Asserts the invariants: each row but 0 is either free or in use, once."""
        assert sorted([*self._free, *self._used]) == list(range(1, self.num_requests + 1))

    def _check_row(self, row: int) -> None:
        if row in self._used:
            return
        reserved = "row 0, which is reserved for padding"
        foreign = f"row {row} of a pool with rows 1 to {self.num_requests}"
        free = f"row {row}, which is free (a double free, or a request that was never admitted)"
        got = reserved if row == 0 else free if 0 < row <= self.num_requests else foreign
        raise PoolError("request row", wanted="a row in use", got=got)

    def _check_end(self, end: int) -> None:
        if end > self.context_len:
            hint = "Stop the request, or make the pool with a longer context_len (draft tokens count)."
            raise PoolError("request row", wanted=f"at most {self.context_len} tokens", got=end, hint=hint)

    def _slots(self, slots: Index) -> Tensor:
        values = index_tensor("slots", slots)
        check_values("slots", values, MAX_SLOTS)
        return values
