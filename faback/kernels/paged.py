"""What the FlashAttention packages have in common: a segment as their variable-length calls take it, and one call."""

from __future__ import annotations

import abc
from typing import Any

import attrs
import torch

from faback.core.errors import PoolError
from faback.core.kernel import KernelProvider
from faback.core.segment import Segment
from faback.core.workspace import DeviceOps, Workspace

Tensor = torch.Tensor

HALF = frozenset({torch.float16, torch.bfloat16})
ALIGNMENT = 16
"""Bytes that these kernels load and store at once: a vector of a head begins at a multiple of them."""


@attrs.frozen(eq=False, kw_only=True)
class Paged:
    """Rows of queries and keys, padding resolved: made once per plan by `of`.

    Attributes:
        rows, tokens: of the segment.
        offsets: int32 [rows + 1], where each row's queries lie.
        max_seqlen_q, max_seqlen_k: upper bounds of a row, on the host.
        lens: int32 [rows], keys of each row; 0 for padding.
        table: int32 [rows, pages] page ids, None for keys that come with the call.
        offsets_k: int32 [rows + 1], where each row's keys lie in those; None for a cache.
        page_size: tokens per page.
        page_stride: slots from one page to the next.
        causal: a query sees no key behind it.
        window: inclusive distances (left, right), -1 where open.
        uniform: row b's queries are known to be tokens b * max_seqlen_q to (b + 1) * max_seqlen_q - 1.
    """

    rows: int
    tokens: int
    offsets: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    lens: Tensor
    table: Tensor | None
    offsets_k: Tensor | None
    page_size: int
    page_stride: int
    causal: bool
    window: tuple[int, int]
    uniform: bool

    @classmethod
    def of(cls, segment: Segment, ws: Workspace) -> Paged:
        """Two fills at most: lengths without padding, and the page table, slot map included.

        The segment has neither a tail nor a start offset, and no rule besides causality and a window. Pages before the
        window of a row's first query are left out: they may have been given back, and these kernels multiply what they
        mask. Chunks are not their matter for the same reason: one may begin within a page.
        """
        view, rule = segment.kv, segment.visibility
        active = None if view is None or view.dense else view.req_pool_indices
        lens, each, longest, table = segment.kv_len, segment.max_seqlen_q, segment.max_kv_len, None
        left, right = rule.window
        if view is not None and left is not None:
            known = lens, segment.cu_seqlens_q, active
            keys = ws.fill(
                "near_keys", (2, segment.rows), ws.ops.near_keys, *known, left=left, page_size=view.page_size
            )
            view, lens = attrs.evolve(view, start=keys[0]), keys[1]
            longest = min(longest, left + each + view.page_size)
        elif active is not None or lens.dtype != torch.int32:
            lens = ws.fill("live_keys", (segment.rows,), ws.ops.lens, lens, add=0, active=active)
        if view is not None:
            table = ws.page_table("page_table", view, lens, longest)
        offsets_k = segment.cu_seqlens_q if segment.cu_seqlens_k is None else segment.cu_seqlens_k
        return cls(
            rows=segment.rows,
            tokens=segment.tokens,
            offsets=segment.cu_seqlens_q,
            max_seqlen_q=each,
            max_seqlen_k=longest,
            lens=lens,
            table=table,
            offsets_k=offsets_k if view is None else None,
            page_size=1 if view is None else view.page_size,
            page_stride=1 if view is None else view.slots_per_page,
            causal=rule.causal,
            window=(-1 if left is None else left, 0 if rule.causal else -1 if right is None else right),
            uniform=segment.rows * each <= segment.tokens
            and segment.cu_seqlens_q.data_ptr() == ws.uniform_offsets(segment.rows, each).data_ptr(),
        )

    def pages(self, cache: Tensor) -> Tensor:
        """[slots, heads, dim] -> [pages, page_size, heads, dim]; what comes with the call stays as it is."""
        if self.table is None:
            return cache
        slot, head, _ = cache.stride()
        count = (cache.shape[0] - self.page_size) // self.page_stride + 1
        shape = count, self.page_size, *cache.shape[1:]
        return cache.as_strided(shape, (slot * self.page_stride, slot, head, 1))

    def answered(self, out: Tensor, lse: Tensor | None) -> bool:
        """Whether there is nothing to attend from; out [tokens, heads, dim] and lse [tokens, heads] say so then."""
        if self.rows and self.tokens:
            return False
        out.zero_()
        if lse is not None:
            lse.fill_(-torch.inf)
        return True

    def clear_rest(self, out: Tensor, lse: Tensor | None, ops: DeviceOps) -> None:
        """Answers for the tokens that belong to no row, which kernels leave as they are."""
        if not self.uniform or out.shape[0] > self.rows * self.max_seqlen_q:
            ops.clear(out, lse, self.offsets)


@attrs.frozen(eq=False)
class Prepared:
    """What all layers of a kind share.

    Attributes:
        paged: lengths, table and rule.
        arguments: of the package's function, by name.
        ops: clear what belongs to nobody, and merge sinks that the kernel does not take.
    """

    paged: Paged
    arguments: dict[str, Any]
    ops: DeviceOps

    def add_sinks(self, out: Tensor, lse: Tensor, sinks: Tensor) -> None:
        """Takes sinks [heads], natural logits, into out [tokens, heads, dim] whose lse [heads, tokens] has none."""
        self.ops.merge([out.clone()], [lse.T.contiguous()], out, None, sinks)


class PagedKernel(KernelProvider):
    """A kernel that reads page tables, or the keys of the batch, with one function of a package."""

    @abc.abstractmethod
    def attend(
        self, prepared: Prepared, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sinks: Tensor | None, wants_lse: bool
    ) -> Tensor | None:
        """Attends into out, as far as its tokens belong to a row.

        Args:
            prepared: what `prepare` returned.
            q, out: [tokens, num_q_heads, head_dim], at least one token. Heads of these and of k and v are aligned.
            k, v: [pages, page_size, num_kv_heads, head_dim], or [tokens, num_kv_heads, head_dim] of the batch.
            sinks: [num_q_heads] logits.
            wants_lse: whether the log-sum-exp is asked for.

        Returns:
            float32 [num_q_heads, n], natural log, of the first n tokens, all that belong to a row among them; may be
            None where nobody asks.
        """

    def run(
        self,
        prepared: Prepared,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        *,
        lse: Tensor | None = None,
        sinks: Tensor | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
    ) -> None:
        paged = prepared.paged
        if paged.answered(out, lse):
            return
        tokens = slice(paged.tokens)
        q, k, v = _realigned(q), self._keys(k, paged), self._keys(v, paged)
        into = out if _aligned(out) else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        found = self.attend(prepared, q[tokens], k, v, into[tokens], sinks, lse is not None)
        if into is not out:
            out[tokens] = into[tokens]
        if lse is not None:
            assert found is not None
            lse[: found.shape[1]] = found.T
        paged.clear_rest(out, lse, prepared.ops)

    def _keys(self, x: Tensor, paged: Paged) -> Tensor:
        """Keys or values as `attend` takes them. Raises PoolError for a cache that it cannot read."""
        if paged.table is None:
            return _realigned(x)
        if not _aligned(x):
            wanted = f"heads that begin at multiples of {ALIGNMENT} bytes"
            got = f"{x.dtype} of strides {x.stride()} at {x.data_ptr():#x}"
            raise PoolError(
                f"cache of {self.name}", wanted=wanted, got=got, hint="The triton kernel takes any strides."
            )
        return paged.pages(x)


def _aligned(x: Tensor) -> bool:
    """Whether all its heads, [tokens, heads, dim], can be loaded in vectors."""
    token, head, one = x.stride()
    return one == 1 and (x.data_ptr() | token * x.itemsize | head * x.itemsize) % ALIGNMENT == 0


def _realigned(x: Tensor) -> Tensor:
    """The same tensor, or a copy that can be loaded in vectors."""
    return x if _aligned(x) else x.clone(memory_format=torch.contiguous_format)
