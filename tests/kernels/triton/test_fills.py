"""The metadata fills of the Triton operations, from their definitions in `DeviceOps`."""

from __future__ import annotations

import random

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from faback.core.segment import KVView, Segment, Visibility
from faback.core.workspace import tree_lines, tree_parts
from faback.kernels.torch_ops import TorchOps
from faback.kernels.triton.ops import TritonOps
from kernels.triton.interpreter import needs_interpreter

needs_interpreter()

OPS = TritonOps()
PAGE_SIZES = (1, 3, 4)
LENGTHS = st.lists(st.integers(0, 30), min_size=0, max_size=5)
INDEX = st.sampled_from([torch.int32, torch.int64])
EITHER = st.booleans()
QUICK = settings(max_examples=60, deadline=None)


def filled(name, shape, *args, dtype=torch.int32, **params):
    out = torch.full(shape, -77, dtype=dtype)
    getattr(OPS, name)(out, *args, **params)
    again = torch.full(shape, -77, dtype=dtype)
    getattr(TorchOps(), name)(again, *args, **params)
    assert torch.equal(out, again)
    return out.tolist()


@QUICK
@given(LENGTHS, INDEX, st.integers(-1, 3), st.data())
def test_lengths(lens, dtype, add, data):
    n = len(lens)
    source = torch.tensor(lens, dtype=dtype)
    rows = [data.draw(st.integers(0, 2)) for _ in lens]
    active = torch.tensor(rows, dtype=dtype)
    on = [row != 0 for row in rows]
    assert filled("lens", (n,), source, add=add, active=None) == [x + add for x in lens]
    assert filled("lens", (n,), source, add=add, active=active) == [
        (x + add) * a for x, a in zip(lens, on, strict=True)
    ]
    assert filled("row_lens", (n,), value=5, active=active) == [5 * a for a in on]
    assert filled("offsets", (n + 1,), source) == [sum(lens[:i]) for i in range(n + 1)]
    assert filled("sum", (n,), source, active) == [(x + r) * (r != 0) for x, r in zip(lens, rows, strict=True)]


@QUICK
@given(LENGTHS, INDEX, st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_all_steps_of_a_draft(lens, dtype, steps, each, from_zero):
    source = torch.tensor(lens, dtype=dtype)
    active = torch.tensor([row % 3 for row in range(len(lens))], dtype=dtype)
    base = None if from_zero else source
    assert filled("step_lens", (steps, len(lens)), base, active=active) == [
        [((0 if from_zero else x) + s + 1) * (row % 3 != 0) for row, x in enumerate(lens)] for s in range(steps)
    ]
    assert filled("branch_positions", (steps, len(lens) * each), source, each=each) == [
        [x + s for x in lens for _ in range(each)] for s in range(steps)
    ]


@st.composite
def segments(draw, *, mapped=EITHER, started=EITHER, blocks=EITHER, **rule):
    """Segments over whole pages in random order, everything unused being an id far outside."""
    page, dtype = draw(st.sampled_from(PAGE_SIZES)), draw(INDEX)
    keys = draw(LENGTHS)
    queries = [draw(st.integers(0, 9)) for _ in keys]
    pick = random.Random(draw(st.integers(0, 999)))
    starts = [pick.randint(0, 6) for _ in keys] if draw(started) else None
    spans = [k + (0 if starts is None else starts[i]) for i, k in enumerate(keys)]
    pages = list(range(1, 2 + sum(-(-n // page) for n in spans)))
    pick.shuffle(pages)
    table = torch.full((len(keys) + 1, max([0, *spans]) + 2), 1 << 30, dtype=dtype)
    for row, n in enumerate(spans):
        slots = [slot for _ in range(-(-n // page)) for slot in _page(pages.pop(), page)]
        table[row + 1, :n] = torch.tensor(slots[:n], dtype=dtype)
    ids = list(range(len(pages) + 400))
    pick.shuffle(ids)
    slot_map = torch.tensor([slot for p in ids for slot in _page(p, page)], dtype=dtype) if draw(mapped) else None
    page_stride = None
    if draw(blocks):
        table = torch.where(table == 1 << 30, table, table // page)[:, ::page].contiguous()
        page_stride = page + (pick.choice([0, 5]) if slot_map is None else 0)
    view = KVView(
        table,
        torch.arange(1, len(keys) + 1, dtype=dtype),
        page,
        start=None if starts is None else torch.tensor(starts, dtype=dtype),
        slot_map=slot_map,
        page_stride=page_stride,
    )
    return Segment(
        rows=len(keys),
        tokens=sum(queries) + draw(st.integers(0, 2)),
        cu_seqlens_q=torch.tensor([sum(queries[:i]) for i in range(len(keys) + 1)], dtype=torch.int32),
        max_seqlen_q=max([0, *queries]),
        kv_len=torch.tensor(keys, dtype=dtype),
        max_kv_len=max([0, *keys]),
        kv=view,
        visibility=Visibility(**{name: draw(values) for name, values in rule.items()}),
    ).check("the test")


def _page(number, size):
    return range(number * size, (number + 1) * size)


def slot(view, row, token, translate=True):
    """Where a token of a kernel row lies."""
    at = token if view.start is None else token + int(view.start[row])
    if view.page_stride is None:
        found = int(view.req_to_token[view.req_pool_indices[row], at])
    else:
        page = int(view.req_to_token[view.req_pool_indices[row], at // view.page_size])
        found = page * view.page_stride + at % view.page_size
    return int(view.slot_map[found]) if translate and view.slot_map is not None else found


@QUICK
@given(segments(started=st.just(False)))
def test_page_table(segment):
    view, page = segment.kv, segment.kv.page_size
    width = max(1, -(-segment.max_kv_len // page)) + 1
    table = filled("page_table", (segment.rows, width), view=view, lens=segment.kv_len)
    for row, length in enumerate(segment.kv_len.tolist()):
        wanted = [slot(view, row, token) // view.slots_per_page for token in range(0, length, page)]
        assert table[row] == wanted + [0] * (width - len(wanted))


@QUICK
@given(segments())
def test_slot_table(segment):
    width = segment.max_kv_len + 2
    table = filled("slot_table", (segment.rows, width), segment)
    for row, length in enumerate(segment.kv_len.tolist()):
        assert table[row] == [slot(segment.kv, row, token) for token in range(length)] + [0] * (width - length)


def seen_by(segment, row, index):
    """Tokens of the row that one of its queries sees."""
    rule, length = segment.visibility, int(segment.kv_len[row])
    queries = int(segment.cu_seqlens_q[row + 1] - segment.cu_seqlens_q[row])
    p = length - queries + index
    near = range(length) if rule.window[0] is None else range(max(0, p - rule.window[0]), length)
    return [
        t for t in near if (not rule.causal or t <= p) and (rule.chunk is None or t // rule.chunk == p // rule.chunk)
    ]


@QUICK
@given(segments(chunk=st.sampled_from([1, 3, 4, 7])))
def test_virtual_batches(segment):
    """Every query stands in one piece, at the end of exactly the keys that it sees."""
    chunk, view = segment.visibility.chunk, segment.kv
    pieces = segment.rows * 2 + segment.tokens // chunk + 3
    offsets, kv_len, start, request = filled("virtual_batches", (4, pieces + 1), segment)
    found = {}
    for piece in range(pieces):
        count = offsets[piece + 1] - offsets[piece]
        for index in range(count):
            stop = kv_len[piece] - count + index + 1
            row = [int(r) for r in view.req_pool_indices].index(request[piece])
            first = start[piece] - (0 if view.start is None else int(view.start[row]))
            found[offsets[piece] + index] = list(range(first, first + max(0, stop)))
    for row in range(segment.rows):
        low, high = segment.cu_seqlens_q[row : row + 2].tolist()
        for index in range(high - low):
            assert found.pop(low + index) == seen_by(segment, row, index)
    assert not found


@QUICK
@given(
    segments(
        causal=st.booleans(),
        chunk=st.sampled_from([None, 3, 4]),
        window=st.sampled_from([(None, None), (0, None), (5, None)]),
    )
)
def test_query_rows(segment):
    """Every query is a row, whose keys are the contiguous ones that it sees."""
    lens, starts, requests = filled("query_rows", (3, segment.tokens), segment)
    for row in range(segment.rows):
        low, high = segment.cu_seqlens_q[row : row + 2].tolist()
        for index in range(high - low):
            seen = seen_by(segment, row, index)
            assert lens[low + index] == len(seen)
            assert requests[low + index] == int(segment.kv.req_pool_indices[row])
            if seen:
                offset = 0 if segment.kv.start is None else int(segment.kv.start[row])
                assert starts[low + index] - offset == seen[0]


@QUICK
@given(segments(mapped=st.just(True)))
def test_translate(segment):
    slots = segment.kv.req_to_token.clamp(max=segment.kv.slot_map.shape[0] - 1)
    wanted = segment.kv.slot_map[slots.long()]
    assert filled("translate", tuple(slots.shape), slots, segment.kv.slot_map) == wanted.tolist()


@pytest.mark.parametrize("seq_lens", [[3, 0, 5], [0], []], ids=str)
@pytest.mark.parametrize("spare", [0, 2])
def test_tree_mask_and_positions(seq_lens, spare):
    """A mask as an engine packs it: each request's block is [queries, committed + queries]."""
    pick = random.Random(sum(seq_lens))
    counts = [pick.randint(1, 4) for _ in seq_lens]
    offsets = [sum(counts[:i]) for i in range(len(counts) + 1)]
    size, tokens = max([1, *counts]), offsets[-1] + spare
    trees = [[[pick.random() < 0.5 or i == j for j in range(n)] for i in range(n)] for n in counts]
    flat = [
        seen
        for length, tree in zip(seq_lens, trees, strict=True)
        for line in tree
        for seen in [pick.random() < 0.5 for _ in range(length)] + line
    ]
    mask = torch.tensor(flat, dtype=torch.bool)
    lens, cu = torch.tensor(seq_lens, dtype=torch.int64), torch.tensor(offsets, dtype=torch.int32)
    if not seq_lens:
        return
    lines = torch.tensor(filled("tree", (tree_lines(size), tokens), mask, lens, cu, size=size), dtype=torch.int32)
    bits, found, positions = (part.tolist() for part in tree_parts(lines, size))
    found = [line[:size] for line in found]
    as_bits = [[bool(line[c // 32] >> c % 32 & 1) for c in range(size)] for line in bits]
    assert as_bits == found
    wanted = [line + [False] * (size - len(line)) for tree in trees for line in tree]
    assert found[: offsets[-1]] == wanted
    depths = [
        length + sum(line) - line[i]
        for length, tree in zip(seq_lens, trees, strict=True)
        for i, line in enumerate(tree)
    ]
    assert positions[: offsets[-1]] == depths


@QUICK
@given(segments(window=st.sampled_from([(None, None), (2, None)]), causal=st.booleans()))
def test_compact(segment):
    segment = attrs.evolve(segment, max_kv_len=max(1, segment.max_kv_len))
    width = segment.max_kv_len
    out = filled("compact", (segment.tokens * (1 + width),), segment)
    counts, table = out[: segment.tokens], out[segment.tokens :]
    for row in range(segment.rows):
        low, high = segment.cu_seqlens_q[row : row + 2].tolist()
        for index in range(high - low):
            token = low + index
            wanted = [slot(segment.kv, row, t) for t in seen_by(segment, row, index)]
            assert table[token * width : token * width + counts[token]] == wanted


@QUICK
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(0, 9)), max_size=6), INDEX, EITHER, EITHER)
def test_what_is_known_of_prompts(batch, dtype, mixed, said):
    rows, new, lens = (torch.tensor([entry[i] for entry in batch], dtype=dtype) for i in range(3))
    prompts = torch.tensor([0, 3, 0, 5, 9], dtype=torch.int32)
    told = torch.tensor([4] * len(batch), dtype=dtype) if said else None
    known = (prompts, rows, lens, new if mixed else None, told)
    keep, reach, behind = filled("prompt_reach", (3, len(batch)), *known, later=7, prompt=8)
    for i, (row, count, length) in enumerate(batch):
        wanted = (
            not mixed or length > 4
            if said
            else not mixed or (count == 1 and prompts[row] > 0 and length > prompts[row])
        )
        assert (keep[i], reach[i], behind[i]) == (int(prompts[row]) if wanted else 0, 7 if wanted else 8, int(wanted))


@QUICK
@given(st.permutations(range(1, 6)), st.integers(0, 5), INDEX, EITHER)
def test_prompts_are_remembered(order, count, dtype, some_later):
    rows = torch.tensor([*order[:count], 0, 0], dtype=dtype)
    lens = torch.arange(10, 10 + len(rows), dtype=dtype)
    later = (lens % 2 == 0).int() if some_later else None
    mine, theirs = torch.arange(6, dtype=torch.int32), torch.arange(6, dtype=torch.int32)
    OPS.remember(mine, rows, lens, later)
    TorchOps().remember(theirs, rows, lens, later)
    assert torch.equal(mine, theirs)
    for row, length in zip(order[:count], lens.tolist(), strict=False):
        assert mine[row] == (row if some_later and length % 2 == 0 else length)
    assert mine[0] == 0


@QUICK
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(0, 30)), max_size=6), INDEX, EITHER, st.data()
)
def test_where_the_keys_begin_that_a_window_reaches(batch, dtype, padded, data):
    rows, new, lens = (torch.tensor([entry[i] for entry in batch], dtype=dtype) for i in range(3))
    left, page = data.draw(st.integers(0, 12)), data.draw(st.sampled_from(PAGE_SIZES))
    offsets = torch.nn.functional.pad(new.cumsum(0), (1, 0)).int()
    active = rows if padded else None
    begins, counts = filled("near_keys", (2, len(batch)), lens, offsets, active, left=left, page_size=page)
    for (row, count, length), begin, kept in zip(batch, begins, counts, strict=True):
        length = 0 if padded and row == 0 else length
        assert begin % page == 0 or begin == length
        assert begin + kept == length
        assert begin <= max(0, length - count - left) < begin + page or begin == length
