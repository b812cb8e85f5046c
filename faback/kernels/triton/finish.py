"""What leaves the attention kernel: merged, normalised, with sinks, padded rows as 0 and -inf."""

from __future__ import annotations

import triton
import triton.language as tl

from faback.kernels.triton.softmax import LOG2E

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def merge_splits(
    partial_acc, partial_ml, group, splits, first_line, begin, end, live, owned, head, out, lse, sinks, value_scale,
    o_token, o_head, lse_token, d_value,
    GROUP: tl.constexpr, DV: tl.constexpr, V_BLOCK: tl.constexpr, LINES: tl.constexpr, MERGE: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Merges the partial results of one block of queries, MERGE splits at a time, and writes it out."""
    lines = tl.arange(0, LINES)
    inside = (first_line + lines) // GROUP < end - begin
    m = tl.full((LINES,), float("-inf"), tl.float32)
    total = tl.zeros((LINES,), tl.float32)
    acc = tl.zeros((LINES, V_BLOCK), tl.float32)
    batch = tl.arange(0, MERGE)
    for s in range(0, splits, MERGE):
        present = s + batch < splits
        places = ((group + s + batch) * HEADS + head).to(tl.int64)[:, None] * LINES + lines[None, :]
        held = present[:, None] & inside[None, :]
        m_part = tl.load(partial_ml + places * 2, mask=held, other=float("-inf"), cache_modifier=".cg")
        total_part = tl.load(partial_ml + places * 2 + 1, mask=held, other=0.0, cache_modifier=".cg")
        part = tl.load(
            partial_acc + places[:, :, None] * V_BLOCK + d_value[None, None, :],
            mask=held[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        higher = tl.maximum(m, tl.max(m_part, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        old, new = tl.exp2(m - base), tl.exp2(m_part - base[None, :])
        total = total * old + tl.sum(total_part * new, 0)
        acc = acc * old[:, None] + tl.sum(part * new[:, :, None], 0)
        m = higher
    finish(
        m, total, acc, first_line + lines, begin, end, live, owned, head, out, lse, sinks, value_scale,
        o_token, o_head, lse_token, d_value, GROUP, DV,
    )  # fmt: skip


@triton.jit
def finish(
    m, total, acc, m_index, begin, end, live, owned, head, out, lse, sinks, value_scale,
    o_token, o_head, lse_token, d_value, GROUP: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Writes rows of packed queries out; those that are not live, or have seen nothing, become 0 and -inf."""
    index, q_heads = m_index // GROUP, head * GROUP + m_index % GROUP
    token = (begin + index).to(tl.int64)
    inside, queries = index < end - begin, index < tl.where(owned, live, 0)
    total = tl.where(queries, total, 0.0)  # a padded query has seen what it should not
    acc = tl.where(queries[:, None], acc, 0.0)
    denominator = total
    m = tl.where(total > 0, m, 0.0)
    if sinks is not None:
        sink = tl.load(sinks + q_heads, mask=inside, other=0.0).to(tl.float32) * LOG2E
        denominator = total + tl.exp2(tl.minimum(sink - m, 126.0))
    result = acc * (value_scale / tl.where(denominator > 0, denominator, 1.0))[:, None]
    o_ptr = out + token * o_token + q_heads.to(tl.int64) * o_head
    tl.store(o_ptr[:, None] + d_value, result.to(out.dtype.element_ty), mask=inside[:, None] & (d_value < DV))
    if lse is not None:
        value = tl.where(total > 0, (m + tl.log2(total)) * LN2, float("-inf"))
        tl.store(lse + token * lse_token + q_heads, value, mask=inside)
