"""Everything that the capabilities claim, against the oracle, planned and replayed."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from backends import Watched, backend, failures, registry, replayed, watched

from faback import AttentionBackend, AttentionLayer, BackendConfig, ForwardBatch, Pools
from faback.core.segment import FEATURES, KVView, Segment, Visibility
from faback.core.workspace import EagerWorkspace
from faback.kernels.torch_ops import TorchOps
from faback.pools import MHAPool
from faback.testing import MODES, OVERLAYS, Options, Scenario, impossible
from faback_sdpa import Sdpa
from faback_sdpa import kernel as module

FP8 = {"dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn}
VARIANTS = {
    "plain": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16, "padded_rows": 2, "padded_tokens": 3},
    "narrow cache": {"kv_dtype": torch.bfloat16, "num_q_heads": 6},
    "fp8": FP8,
    "scaled fp8": FP8 | {"kv_scales": True},
    "scaled e5m2": {"dtype": torch.float16, "kv_dtype": torch.float8_e5m2, "kv_scales": True},
    "scaled float32": {"kv_scales": True},
    "dims": {"head_dim": 24, "v_head_dim": 16, "num_q_heads": 3, "num_kv_heads": 1, "scale": 0.4},
    "hybrid": {"hybrid": True},
    "branches": {"topk": 3, "padded_rows": 1},
    "ragged": {"ragged": True},
    "strided": {"strided_rows": True},
}
PAGE_SIZES = (1, 3, 4, 16, 64)


def scenes(mode, overlay):
    """Scenarios of all variants that mean something, page sizes and seeds in turn."""
    for number, fields in enumerate(VARIANTS.values()):
        options = {"mode": mode, "overlay": overlay, "seed": number, **fields}
        if impossible(Options(**options)) is None:
            yield Scenario.make(page_size=PAGE_SIZES[number % len(PAGE_SIZES)], **options)


CELLS = [cell for cell in product(MODES, OVERLAYS) if impossible(Options(mode=cell[0], overlay=cell[1])) is None]


@pytest.mark.parametrize("make", [backend, replayed], ids=["planned", "replayed"])
@pytest.mark.parametrize(("mode", "overlay"), CELLS)
def test_every_mode_and_overlay(mode, overlay, make):
    for scenario in scenes(mode, overlay):
        assert failures(scenario, make) == []


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("mode", MODES)
def test_every_page_size(mode, page_size):
    for seed, overlay in enumerate(("full", "window", "local")):
        assert failures(Scenario.make(mode=mode, overlay=overlay, page_size=page_size, seed=seed), backend) == []


def test_rows_that_do_not_fit_into_one_call(monkeypatch):
    """However few scores may be computed together, they are the same."""
    scenario = Scenario.make(mode="mixed", overlay="window", page_size=4, seed=5, batch_size=4)
    calls = []

    def counted(*args, **options):
        calls.append(args[0].shape[0])
        return torch.nn.functional.scaled_dot_product_attention(*args, **options)

    monkeypatch.setattr(module, "scaled_dot_product_attention", counted)
    for most, rows in ((1 << 24, 4), (1, 1)):
        calls.clear()
        monkeypatch.setattr(module, "SCORES", most)
        assert failures(scenario, backend) == []
        assert set(calls) == {rows}


@pytest.mark.parametrize("mode", MODES)
def test_nothing_waits_for_the_device(mode):
    more = {"topk": 2} if mode in ("target_verify", "draft_decode") else {}
    for seed, overlay in enumerate(("full", "window", "local")):
        scenario = Scenario.make(mode=mode, overlay=overlay, seed=seed, page_size=4, **more)
        assert failures(scenario, watched) == []


@pytest.mark.parametrize(
    "wait", [lambda x: x.sum().item(), lambda x: x.tolist(), lambda x: x[x > 0], lambda x: x.nonzero(), bool]
)
def test_waiting_is_noticed(wait):
    """The test above can fail: a kernel that looks at lengths on the host does not pass it."""

    class Waiting(Sdpa):
        def run(self, prepared, *args, **options):
            wait(prepared.tokens[0, :1])
            super().run(prepared, *args, **options)

    class WatchedWaiting(Watched, Waiting):
        pass

    scenario = Scenario.make(mode="decode")
    assert failures(scenario, lambda *given: watched(*given, kernel=Waiting)) == []
    assert "forward raised" in str(failures(scenario, lambda *given: watched(*given, kernel=WatchedWaiting)))


def test_fills_that_are_not_issued_again_are_noticed(monkeypatch):
    """Replaying is a test: here nothing is refilled."""
    from faback.core.graphs import Captured

    monkeypatch.setattr(Captured, "load", lambda self, batch: None)
    scenario = Scenario.make(mode="decode", seed=1)
    assert failures(scenario, replayed) != []


def test_the_features_that_are_claimed_have_been_asked_for(monkeypatch):
    """No word of the capabilities is there without a scenario that needs it."""
    asked = set()
    reject = Sdpa.reject

    def noted(self, request, device):
        found = reject(self, request, device)
        asked.update(request.features if not found else ())
        return found

    monkeypatch.setattr(Sdpa, "reject", noted)
    for mode, overlay in CELLS:
        for scenario in scenes(mode, overlay):
            failures(scenario, backend)
    failures(Scenario.make(mode="decode"), replayed)
    able = Sdpa().capabilities(torch.device("cpu")).features
    assert able - asked == {"sharded", "positions"}, "these have a test of their own"
    assert able <= set(FEATURES)


@pytest.mark.parametrize("index", range(3))
def test_sharded_keys_and_positions(index):
    """Every third token of a request, each at its own position, for queries whose positions are given."""
    one, slots = torch.tensor([1]), torch.arange(16, dtype=torch.int64).view(2, 8)
    segment = Segment(
        rows=1,
        tokens=2,
        cu_seqlens_q=torch.tensor([0, 2], dtype=torch.int32),
        max_seqlen_q=2,
        kv_len=one * 4,
        max_kv_len=5,
        kv=KVView(slots, one, 1, shard=(index, 3)),
        visibility=Visibility(window=(5, None)),
        positions=torch.tensor([7, 9]),
    )
    layer = AttentionLayer(layer_id=0, num_q_heads=1, num_kv_heads=1, head_dim=16)
    kernel, cpu = Sdpa(), torch.device("cpu")
    prepared = kernel.prepare(segment, layer.kind, None, EagerWorkspace(TorchOps(), cpu, {}))
    k, v, out = torch.zeros(16, 1, 16), torch.eye(16)[:, None], torch.empty(2, 1, 16)  # what is seen shows up
    kernel.run(prepared, torch.ones(2, 1, 16), k, v, out)
    for row, p in enumerate((7, 9)):
        seen = [8 + t for t in range(4) if p - 5 <= t * 3 + index <= p]
        assert out[row, 0].nonzero().flatten().tolist() == seen
        assert out[row, 0, seen].tolist() == pytest.approx([1 / len(seen)] * len(seen))


@pytest.mark.parametrize("chunk", [(0, 2), (2, 3), (5, 0)])
def test_keys_of_the_call_in_chunks(chunk):
    """Modes that `faback.testing` has no scenarios for: a part of the prefix, or all of it, none at all being legal."""
    start, count = chunk
    shape = {"num_q_heads": 1, "num_kv_heads": 1, "head_dim": 8}
    layers = [AttentionLayer(layer_id=0, kv_group="none", **shape), AttentionLayer(layer_id=1, **shape)]
    config = BackendConfig(context_len=8, dtype=torch.float32, kernels="sdpa")
    kv = MHAPool(num_pages=2, layers=layers[1:], dtype=torch.float32)
    pools = Pools(req_to_token=torch.zeros(2, 8, dtype=torch.int64), kv=kv)
    made = AttentionBackend(config, pools, layers, registry=registry(config))
    one = torch.tensor([1])
    extras = {"chunk_lens": one * count, "chunk_starts": one * start}
    common = {"req_pool_indices": one, "seq_lens": one * 7, "extend_seq_lens": one * 2, "num_tokens": 2}
    for mode, seen in (("prefix_chunk", [count, count]), ("one_shot", [6, 7])):
        keys = count if mode == "prefix_chunk" else 7
        made.plan(ForwardBatch(forward_mode=mode, extras=extras if mode == "prefix_chunk" else {}, **common))
        out = made.forward(torch.ones(2, 1, 8), torch.zeros(keys, 1, 8), torch.eye(8)[:keys, None], layers[0])
        assert [row.nonzero().flatten().tolist() for row in out[:, 0]] == [list(range(number)) for number in seen]
