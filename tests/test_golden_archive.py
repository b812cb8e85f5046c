"""The archive of recorded scenarios is whole, small, and readable as its loader says."""

from __future__ import annotations

import json
import lzma
import runpy
from pathlib import Path

import numpy as np
import pytest

from golden_data import ARCHIVE, Call, Scenario, load, scenarios, tolerance

REPACK = Path(__file__).parents[1] / "tools" / "repack_golden.py"


def test_archive_is_small_and_complete() -> None:
    assert ARCHIVE.stat().st_size < 5_000_000
    names = [scenario.name for scenario in scenarios()]
    assert len(names) == len(set(names)) == 192
    assert tolerance() == 2e-4


def test_no_private_metadata_and_no_recorded_output() -> None:
    for scenario in scenarios():
        for key in scenario.arrays:
            assert not {"meta", "expand", "out"} & set(key.split(".")), f"{scenario.name}: {key}"


@pytest.mark.parametrize("scenario", scenarios(), ids=lambda scenario: scenario.name)
def test_scenario(scenario: Scenario) -> None:
    calls = scenario.reproducible_calls()
    assert calls
    last = [call for call in scenario.calls if call.tag == scenario.calls[-1].tag]
    everything = calls[0].kind == "mha-lse"
    assert list(calls) == (list(scenario.calls) if everything else last)
    for call in scenario.calls:
        oracle = scenario.of(call)["oracle"]
        assert oracle.dtype == np.float32
        assert np.isfinite(oracle).all()
    for call in calls:
        arrays = scenario.of(call)
        assert arrays["q"].shape[0] >= arrays["oracle"].shape[0]
        assert arrays["q"].shape[1] == arrays["oracle"].shape[1] == scenario.cfg["heads"]
        assert ("cu_seqlens_k" in arrays) == everything == (scenario.forward_mode is None)
        if "fb.out_cache_loc" in scenario.arrays and "kpool" in arrays and call.kind in ("full", "cross"):
            assert scenario.arrays["fb.out_cache_loc"].max() < arrays["kpool"].shape[0]


def test_names_tell_the_forward_mode() -> None:
    said = {"verify1": "target_verify", "verifyk": "target_verify", "ragged": "target_verify", "draft1": "draft_decode"}
    said |= {"draftk": "draft_decode", "multistep": "draft_decode", "draftext": "draft_extend", "decode": "decode"}
    found = {scenario.name: scenario.forward_mode for scenario in scenarios()}
    expected = {name: said[name.split("_")[0]] for name in found if name.split("_")[0] in said}
    assert {name: found[name] for name in expected} == expected
    assert set(found.values()) == {*said.values(), "extend", "mixed", None}


def test_earlier_passes_keep_their_result_alone() -> None:
    scenario = load("decode_ps4")
    first, last = scenario.calls
    assert set(scenario.of(first)) == {"oracle"}
    assert set(scenario.of(last)) == {"q", "k", "v", "kpool", "vpool", "oracle"}


def test_arrays_are_fresh_at_each_access() -> None:
    arrays = load("decode_ps4").arrays
    spoilt = arrays["req_to_token"]
    before = spoilt.copy()
    spoilt[...] = -1
    np.testing.assert_array_equal(arrays["req_to_token"], before)


def test_unknown_names_raise() -> None:
    with pytest.raises(KeyError, match="no_such"):
        load("no_such")
    with pytest.raises(KeyError, match="no_such"):
        load("decode_ps4").arrays["no_such"]


def test_repacking_drops_what_is_private_and_is_deterministic(tmp_path: Path) -> None:
    arrays = {
        "run.L0.q": np.arange(6, dtype=np.float16).reshape(1, 2, 3),
        "run.L0.oracle": np.zeros((1, 2, 3), np.float32),
        "run.L0.out": np.ones((1, 2, 3), np.float32),
        "run.L1.out": np.ones((1, 2, 3), np.float32),
        "fb.forward_mode": np.array(2),
        "meta.page_table": np.zeros(1),
        "b0.meta.page_table": np.zeros(1),
        "b0.expand.page_table": np.zeros(1),
    }
    np.savez(tmp_path / "one.npz", **arrays)
    entry = {"scenario": "one", "file": "one.npz", "cfg": {"page_size": 1}, "calls": [["", 0, "full"]], "notes": ["x"]}
    (tmp_path / "index.json").write_text(json.dumps({"tolerance": 1.0, "files": [entry]}))
    tool = runpy.run_path(str(REPACK))
    data = tool["repack"](tmp_path)
    assert data == tool["repack"](tmp_path)

    raw = lzma.decompress(data)
    kept = {key for key in arrays if f"one/{key}.npy".encode() in raw}
    assert kept == {"run.L0.q", "run.L0.oracle", "run.L1.out", "fb.forward_mode"}
    assert tool["describe"](entry) == {"name": "one", "cfg": {"page_size": 1}, "calls": [["run", 0, "full"]]}
    assert Call("run", 0, "full").prefix + "q" in kept
