"""Faults that users of other attention backends met, by number: docs/cases.md says what happened there.

Every scenario is run in four ways: natively and through lowerings, planned anew and captured once on nothing and then
brought up to date. All that no request owns is poisoned, and the oracle knows no page.
"""

from __future__ import annotations

import itertools

import attrs
import pytest
import torch

from faback import AttentionBackend
from faback.testing import Scenario, run_scenario
from faback.testing.poison import TABLE_FLAVOURS
from graphs.test_simulated import registry, replayed

E4M3 = torch.float8_e4m3fn


def eager(kernel):
    def make(config, pools, layers):
        config = attrs.evolve(config, kernels=kernel)
        return AttentionBackend(config, pools, layers, registry=registry(config))

    return make


WAYS = {
    "native": eager("late reference"),
    "lowered": eager("poor"),
    "native replayed": replayed("late reference"),
    "lowered replayed": replayed("poor"),
}


def product(**choices):
    """Every combination; a choice that is no list is always the same."""
    lists = {name: value if isinstance(value, list) else [value] for name, value in choices.items()}
    return [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]


SPECULATING = ["draft_decode", "target_verify"]
LOCAL_LENS = ((0, 1), (62, 1), (63, 1), (64, 1), (127, 1), (128, 1))
FAMILIES = {
    "B01 tree drafting on pages": [
        *product(
            mode="draft_decode", overlay=["full", "mla"], topk=2, page_size=[1, 4], lengths=((6, 0),), draft_step=[0, 2]
        ),
        *product(mode="target_verify", overlay=["full", "mla"], topk=2, page_size=[1, 4], lengths=((6, 0), (3, 0))),
    ],
    "B03 padded rows": product(mode=["decode", "extend", "target_verify"], lengths=((5, 1),), padded_rows=7),
    "B04 empty sequences": product(
        mode=["extend", "mixed"], page_size=[1, 4], lengths=((9, 0), (0, 5), (0, 0), (6, 1))
    ),
    "B05 poison behind the last token": product(
        mode="decode", page_size=[1, 16], lengths=((0, 1), (14, 1), (126, 1), (128, 1))
    ),
    "B11 draft extend with strides": product(
        mode="draft_extend", strided_rows=[True, False], lengths=((20, 2), (9, 4)), page_size=[1, 4], padded_rows=[0, 1]
    ),
    "B12 page sizes": product(
        mode=["decode", "extend"],
        overlay=["full", "mla"],
        page_size=[1, 3, 16, 64, 128, 256],
        lengths=((257, 1), (300, 5)),
    ),
    "B13 windows to the token": product(
        mode=["decode", "extend", "target_verify"],
        overlay="window",
        windows=[(1, 4), (3, 9), (10, 11)],
        lengths=((9, 1),),
    ),
    "B14 local attention": [
        *product(mode="decode", overlay="local", chunk=64, page_size=16, hybrid=[False, True], lengths=LOCAL_LENS),
        *product(
            mode="extend", overlay="local", chunk=8, page_size=[4, 16], hybrid=[False, True], lengths=((5, 15), (0, 9))
        ),
    ],
    "B15 windows while speculating": [
        *product(
            mode=SPECULATING,
            overlay="window",
            hybrid=True,
            topk=[1, 4],
            page_size=[1, 16],
            windows=(8, 5),
            lengths=((20, 0),),
        ),
        *product(
            mode="draft_extend", overlay="window", hybrid=True, page_size=[1, 16], windows=(8, 5), lengths=((20, 3),)
        ),
    ],
    "B16 capped scores": product(
        mode=["decode", "extend", "target_verify"], overlay="window", softcap=True, scale=20.0
    ),
    "B21 sinks enter once": [
        *product(mode=["decode", "extend"], overlay=["full", "window"], sinks=True, lengths=((200, 1), (3, 1))),
        *product(mode=SPECULATING, overlay=["full", "window"], topk=2, sinks=True, page_size=4),
    ],
    "B23 scales of 8-bit caches": product(
        mode=["extend", "decode", *SPECULATING], dtype=torch.bfloat16, kv_dtype=E4M3, kv_scales=True, page_size=4
    ),
    "B24 scales where rows are no requests": [
        *product(
            mode="extend",
            overlay="local",
            chunk=4,
            dtype=torch.bfloat16,
            kv_dtype=E4M3,
            kv_scales=True,
            lengths=((3, 6), (0, 6)),
        ),
        *product(mode=SPECULATING, topk=2, dtype=torch.bfloat16, kv_dtype=E4M3, kv_scales=True, padded_rows=2),
    ],
    "B25 heads and numbers of queries": product(
        mode=["extend", "target_verify"],
        num_q_heads=[6, 14, 71],
        num_kv_heads=[1, 2],
        num_draft_tokens=[3, 6],
        lengths=((7, 3), (2, 5), (9, 6), (0, 7)),
    ),
    "B26 head dims": [
        *product(mode="extend", head_dim=[40, 80, 96, 112, 160], lengths=((5, 3),)),
        {"mode": "extend", "head_dim": 192, "v_head_dim": 128, "lengths": ((5, 3),)},
    ],
    "B28 index dtypes": product(
        mode=["decode", "extend", *SPECULATING], index_dtype=[torch.int32, torch.int64], page_size=4
    ),
}


def kept(family, options):
    """Heads that do not divide mean nothing."""
    return options.get("num_q_heads", 4) % options.get("num_kv_heads", 2) == 0


CELLS = [
    (family, number, options)
    for family, cells in FAMILIES.items()
    for number, options in enumerate(cells)
    if kept(family, options)
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("family", "number", "options"), CELLS, ids=[f"{name}-{n}" for name, n, _ in CELLS])
def test_family(family, number, options, way):
    scenario = Scenario.make(seed=number, **options)
    assert any(query is not None for step in scenario.steps for query in step.queries)
    assert [str(result) for result in run_scenario(scenario, WAYS[way]) if result.status != "equal"] == []


ROWS = ((58, 5), (30, 1), (63, 1), (0, 3), (40, 0))
"""Of B17: verified drafts, a decode, a prompt's last token, a short first prompt, a row that is cached whole."""


@pytest.mark.parametrize("way", ["native", "lowered"])
def test_b17_rows_by_their_own_lengths_in_any_order(way):
    for order in list(itertools.permutations(ROWS))[::7]:
        scenario = Scenario.make(mode="mixed", lengths=order, page_size=4)
        assert [str(result) for result in run_scenario(scenario, WAYS[way]) if result.status != "equal"] == []


@pytest.mark.parametrize("flavour", TABLE_FLAVOURS)
@pytest.mark.parametrize("mode", ["decode", "extend", "target_verify"])
def test_b10_tails_of_table_rows_never_matter(mode, flavour):
    scenario = Scenario.make(mode=mode, page_size=4, tails=flavour, padded_rows=1)
    for way in WAYS.values():
        assert [str(result) for result in run_scenario(scenario, way) if result.status != "equal"] == []
