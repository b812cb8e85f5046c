"""Hypothesis strategies over the scenario generator. The only module of the kit that needs hypothesis.

    @given(scenarios(modes=("decode", "extend")))
    def test_equal(scenario):
        assert not wrong(run_scenario(scenario))

What shrinks: the number of requests, the text lengths, the page size, and every feature towards off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from hypothesis import strategies as st

from faback.core.batch import ForwardBatch
from faback.core.layer import AttentionLayer
from faback.core.pools import Pools
from faback.testing.options import FP8, MODES, OVERLAYS, Options, impossible
from faback.testing.poison import TABLE_FLAVOURS
from faback.testing.realise import realised
from faback.testing.scenario import Scenario

PAGE_SIZES = (1, 2, 3, 4, 16)
HEADS = ((1, 1), (2, 2), (2, 1), (4, 2), (3, 1), (6, 2), (5, 1))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@st.composite
def options(
    draw: st.DrawFn,
    /,
    *,
    modes: Sequence[str] = MODES,
    overlays: Sequence[str] = OVERLAYS,
    page_sizes: Sequence[int] = PAGE_SIZES,
    dtypes: Sequence[torch.dtype] = DTYPES,
    **fixed: Any,
) -> Options:
    """Options that mean something.

    Args:
        modes, overlays, page_sizes, dtypes: what is drawn from.
        fixed: fields of `Options` that are not drawn.
    """
    mode = draw(st.sampled_from(modes))
    overlay = draw(st.sampled_from([o for o in overlays if impossible(Options(mode=mode, overlay=o)) is None]))
    q_heads, kv_heads = draw(st.sampled_from(HEADS))
    dtype = draw(st.sampled_from(dtypes))
    fields: dict[str, Any] = dict(
        mode=mode,
        overlay=overlay,
        page_size=draw(st.sampled_from(page_sizes)),
        seed=draw(st.integers(0, 2**20)),
        batch_size=draw(st.integers(0, 4)),
        max_len=draw(st.integers(3, 24)),
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([4, 8, 12])),
        dtype=dtype,
        padded_rows=draw(st.integers(0, 2)),
        padded_tokens=draw(st.integers(0, 3)),
        tails=draw(st.sampled_from(TABLE_FLAVOURS)),
        **_flags(draw, mode, overlay),
    )
    if draw(st.booleans()):
        fields.update(kv_dtype=draw(st.sampled_from(FP8)), kv_scales=draw(st.booleans()))
    if overlay != "mla" and draw(st.booleans()):
        fields.update(v_head_dim=draw(st.sampled_from([4, 8, 12])))
    return Options(**fields | fixed)


def _flags(draw: st.DrawFn, mode: str, overlay: str) -> dict[str, Any]:
    """Features, those drawn only that mean something with this mode and overlay."""
    plain = Options(mode=mode, overlay=overlay)
    flags: dict[str, Any] = {name: draw(st.booleans()) for name in ("sinks", "softcap")}
    for name in ("hybrid", "inclusive", "ragged", "strided_rows"):
        changed: dict[str, Any] = {name: True}
        if impossible(attrs.evolve(plain, **changed)) is None:
            flags[name] = draw(st.booleans())
    if mode in ("draft_decode", "target_verify") and not flags.get("ragged"):
        flags["topk"] = draw(st.integers(1, 3))
    return flags


def scenarios(**wanted: Any) -> st.SearchStrategy[Scenario]:
    """Whole scenarios; the arguments are those of `options`."""
    return options(**wanted).map(realised)


def layers(**wanted: Any) -> st.SearchStrategy[tuple[AttentionLayer, ...]]:
    """The layers of a model."""
    return scenarios(**wanted).map(lambda scenario: scenario.layers)


def batches(**wanted: Any) -> st.SearchStrategy[ForwardBatch]:
    """One forward batch."""
    return scenarios(**wanted).map(lambda scenario: scenario.steps[-1].batch)


def pools(**wanted: Any) -> st.SearchStrategy[Pools]:
    """An engine's pools, everything unused poisoned."""
    return scenarios(**wanted).map(lambda scenario: scenario.pools())
