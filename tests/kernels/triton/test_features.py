"""The Triton attention kernel on segments, in Triton's interpreter: every feature, alone and mixed with others."""

from __future__ import annotations

import random

import attrs
import pytest
import torch

from faback.kernels.triton.provider import TritonAttention
from kernels.triton.interpreter import needs_interpreter
from kernels.triton.segments import CALL_FEATURES, ROWS, RULES, TAILS, VIEWS, make_case, together

needs_interpreter()

KERNEL = TritonAttention()
UNEVEN = [(3, 70), (1, 0), (0, 9), (5, 17)]
"""Queries and keys: two tiles, no key, no query, few."""


@pytest.mark.parametrize("feature", [*CALL_FEATURES, *RULES, *VIEWS, *TAILS, *ROWS])
def test_each_feature(feature):
    make_case(1, rows=UNEVEN, page=3, features={feature, "window"} if feature == "row_window" else {feature}).check(
        KERNEL
    )


@pytest.mark.parametrize(
    "features",
    [
        {"window", "keep", "slot_map", "padded_rows"},
        {"row_window", "keep", "sinks", "softcap"},
        {"chunk", "keep", "start"},
        {"chunk", "window", "q_len"},
        {"non_causal", "window", "window_right", "start", "padded_tokens"},
        {"tree", "window", "slot_map", "head_scales"},
        {"tree", "tail_positions", "tail_slots", "chunk"},
        {"keep", "tail_positions", "window"},
        {"branches", "softcap", "sinks", "slot_map", "scales"},
        {"branches", "window", "padded_rows", "int64"},
        {"shard", "window", "sinks"},
        {"dense", "slot_map", "chunk", "positions"},
        {"raw", "window", "keep", "q_len", "strided"},
        {"blocks", "dense", "window", "start", "sinks"},
        {"blocks_apart", "keep", "window", "padded_rows"},
        {"blocks_apart", "tree", "tail_slots", "start"},
        {"blocks_apart", "tail", "chunk", "slot_map"},
    ],
    ids=together,
)
def test_features_together(features):
    make_case(2, rows=UNEVEN, page=4, features=features).check(KERNEL)


@pytest.mark.parametrize("page", [1, 3, 4, 16])
def test_page_sizes(page):
    make_case(3, rows=UNEVEN, page=page, features={"window", "slot_map", "start"}, window=page + 1).check(KERNEL)


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (6, 1), (8, 1), (6, 2), (2, 2), (34, 2)], ids=str)
def test_groups_of_query_heads(heads):
    """Those that do not divide a block of queries, and one that is wider than a block."""
    make_case(4, rows=[(2, 9), (9, 40)], heads=heads, features={"sinks", "head_scales"}).check(KERNEL)


@pytest.mark.parametrize(
    "dims", [(24, 16), (16, 24), (8, 8), (40, 40), (64, 64), (80, 80), (192, 128), (256, 256)], ids=str
)
def test_head_dims(dims):
    make_case(5, rows=[(2, 40)], dims=dims, features={"strided", "tail"}).check(KERNEL)


@pytest.mark.parametrize("dims", [(24, 16), (72, 64), (20, 9), (576, 512)], ids=str)
@pytest.mark.parametrize("features", [set(), {"tree", "window"}], ids=["plain", "tree"])
def test_latents(dims, features):
    heads = (2, 1) if dims[0] > 100 else (5, 1)
    case = make_case(6, rows=[(2, 37)], heads=heads, dims=dims, latent=True, features={"scales", "sinks", *features})
    case.check(KERNEL)


PRECISIONS = [
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.float16, torch.float8_e5m2),
    (torch.float32, torch.float8_e4m3fn),
]


@pytest.mark.parametrize(("dtype", "kv_dtype"), PRECISIONS, ids=str)
@pytest.mark.parametrize(
    "features", [{"head_scales", "softcap"}, {"branches", "scales"}, {"tree", "sinks"}], ids=together
)
def test_precisions(dtype, kv_dtype, features):
    case = make_case(7, rows=[(3, 40), (1, 2)], dtype=dtype, kv_dtype=kv_dtype, dims=(24, 16), features=features)
    case.check(KERNEL)


@pytest.mark.parametrize("left_out", ["k_scale", "v_scale"])
@pytest.mark.parametrize("other", [None, 0.25, torch.tensor([4.0])], ids=str)
def test_scales_of_different_kinds(left_out, other):
    """One of them per head, the other not."""
    case = make_case(11, rows=[(2, 9)], heads=(6, 3), features={"head_scales"})
    attrs.evolve(case, **{left_out: other}).check(KERNEL)


@pytest.mark.parametrize("rows", [[], [(0, 0)], [(0, 5), (1, 0)]], ids=str)
@pytest.mark.parametrize("features", [set(), {"padded_tokens"}, {"raw", "padded_tokens"}, {"tree"}], ids=together)
def test_next_to_nothing(rows, features):
    make_case(8, rows=rows, features=features).check(KERNEL)


@pytest.mark.parametrize(
    "features", [{"chunk"}, {"non_causal", "chunk"}, {"non_causal", "window_right"}, {"keep"}], ids=together
)
def test_more_queries_than_keys(features):
    """The first ones stand before the first key."""
    make_case(12, rows=[(30, 1), (9, 5)], chunk=20, features=features).check(KERNEL)


@pytest.mark.parametrize("magnitude", [1e-4, 30.0])
def test_scores_of_any_size(magnitude):
    case = make_case(9, rows=[(2, 90)], dims=(32, 32), features={"window", "sinks"}, window=70)
    case.q.mul_(magnitude)
    case.check(KERNEL)


@pytest.mark.parametrize("magnitude", [1e-3, 3e4])
def test_queries_beyond_the_range_of_float16_on_8_bit_keys(magnitude):
    case = make_case(
        10, rows=[(2, 40)], dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn, features={"softcap"}, dims=(32, 32)
    )
    case.q.mul_(magnitude)
    case.check(KERNEL)


@pytest.mark.parametrize("seed", range(24))
def test_mixtures(seed):
    pick = random.Random(seed)
    wanted = {name for name in (*CALL_FEATURES, *RULES, *VIEWS, *TAILS, *ROWS) if pick.random() < 0.25}
    if "raw" in wanted:
        wanted -= {*VIEWS, *TAILS} - {"raw"}
    if "shard" in wanted:
        wanted -= set(TAILS)
    if "branches" in wanted:
        wanted -= {"tree", "tail_positions"}
    rows = [(pick.choice([0, 1, 2, 7]), pick.choice([0, 1, 8, 21, 75])) for _ in range(pick.randint(1, 3))]
    dtype = pick.choice([torch.float32, torch.float16, torch.bfloat16])
    kv_dtype = pick.choice([None, torch.float8_e4m3fn, torch.float8_e5m2])
    sizes = {"page": pick.choice([1, 3, 4]), "dims": pick.choice([(16, 16), (24, 16), (8, 12)])}
    make_case(seed, rows=rows, dtype=dtype, kv_dtype=kv_dtype, features=wanted, **sizes).check(KERNEL)
