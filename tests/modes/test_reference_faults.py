"""What goes wrong in the field's reference implementation is right here: a named test for each fault.

Every cell is held against the oracle of `faback.testing`, which knows tokens and no slots, on the reference kernel and
through lowerings on a kernel that knows causality only. A refusal would be a failure as well.
"""

import functools

import attrs
import pytest
import torch

from faback import AttentionBackend, SpeculativeConfig, hookimpl
from faback.builtins import BUILTINS
from faback.core.registry import Registry
from faback.testing import Scenario, run_scenario
from faback.testing.poor import Poor

BRANCHES = {"mode": "draft_decode", "topk": 3}
CHAIN = {"mode": "target_verify", "topk": 1}
TREE = {"mode": "target_verify", "topk": 3}


@functools.cache
def made(**options):
    """A scenario; each is run on both kernels."""
    return Scenario.make(**options)


class PoorPlugin:
    @hookimpl
    def faback_kernels(self):
        return [Poor()]


@pytest.fixture(params=["reference", "poor"])
def make_backend(request):
    """Makes a backend on one kernel alone."""

    def make(config, pools, layers):
        config = attrs.evolve(config, kernels=request.param)
        registry = Registry.load(config, BUILTINS, entry_points=[])
        registry.register(PoorPlugin(), "poor")
        return AttentionBackend(config, pools, layers, registry=registry)

    return make


@pytest.fixture
def right(make_backend):
    """Asserts that scenarios of these options equal the oracle, for a few seeds."""

    def check(seeds=range(2), make=make_backend, **options):
        for seed in seeds:
            results = run_scenario(made(seed=seed, **options), make)
            assert results
            for result in results:
                assert result.status == "equal", str(result)

    return check


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("mode", [BRANCHES, TREE], ids=["draft", "verify"])
def test_sinks_of_a_cascade_count_once(right, mode, page):
    right(page_size=page, sinks=True, **mode)
    right(page_size=page, sinks=True, overlay="window", **mode)


@pytest.mark.parametrize("page", [1, 4])
def test_windows_of_draft_branches_keep_the_prefix(right, page):
    """A wide window is no window, a narrow one begins where the branch's own position says."""
    for step in range(3):
        lengths = ((9, 0), (1, 0), (17, 0), (8, 0))
        right(page_size=page, overlay="window", windows=(4, 1000), lengths=lengths, draft_step=step, **BRANCHES)


@pytest.mark.parametrize("page", [4, 16])
@pytest.mark.parametrize("mode", ["decode", "extend"])
def test_local_layers_with_pages(right, mode, page):
    """The chunk is the layer's, whatever the longest sequence of the batch is."""
    for chunk in (6, 8, 100):
        right(page_size=page, overlay="local", chunk=chunk, mode=mode, lengths=((2, 1), (17, 3), (0, 5)))


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize(
    "mode",
    [CHAIN, TREE, BRANCHES, {"mode": "draft_decode"}, {"mode": "mixed"}, {"mode": "draft_extend"}, {"mode": "extend"}],
    ids=["chain", "tree", "branches", "draft", "mixed", "draft_extend", "extend"],
)
def test_local_layers_in_every_mode(right, mode, page):
    right(page_size=page, overlay="local", chunk=5, **mode)
    right(page_size=page, overlay="local", padded_rows=2, **mode)


@pytest.mark.parametrize("page", [3, 4, 16])
@pytest.mark.parametrize("mode", ["decode", "extend", "mixed"])
def test_encoder_tokens_that_do_not_fill_their_pages(right, mode, page):
    """Text begins in the middle of a page, and rows end with the table: nothing is gathered behind them."""
    lengths = ((7, 1), (0, 6), (3, 2), (12, 1))
    right(page_size=page, overlay="cross", mode=mode, encoder_lengths=(5, 0, 2 * page, page + 1), lengths=lengths)


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize(
    "mode", [CHAIN, TREE, BRANCHES, {"mode": "draft_decode"}], ids=["chain", "tree", "branches", "draft"]
)
def test_encoder_decoder_models_speculate(right, mode, page):
    """Text behind the encoder's tokens, and cross layers that know no tree."""
    lengths = ((6, 0), (1, 0), (11, 0))
    right(page_size=page, overlay="cross", encoder_lengths=(5, 0, 9), lengths=lengths, **mode)
    right(page_size=page, overlay="cross", padded_rows=1, sinks=True, **mode)


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize(
    "mode",
    [{"mode": "decode"}, {"mode": "extend"}, {"mode": "mixed"}, {"mode": "draft_decode"}, BRANCHES, CHAIN, TREE],
    ids=["decode", "extend", "mixed", "draft", "branches", "chain", "tree"],
)
def test_prefill_aware_windows(right, mode, hybrid, page):
    """Sliding layers only, in every mode, translated in a hybrid pool."""
    right(page_size=page, overlay="prefill_aware", hybrid=hybrid, **mode)


def test_prefill_aware_windows_of_the_last_request_row(right):
    """Row 0 is padding's, so a table for n requests has n + 1 rows, and the last one is remembered as well."""
    options = {"mode": "decode", "overlay": "prefill_aware", "batch_size": 4}
    seeds = []
    for seed in range(30):
        steps = made(seed=seed, **options).steps
        if any(int(s.batch.req_pool_indices.max()) == s.req_to_token.shape[0] - 1 for s in steps if s.batch.bs):
            seeds.append(seed)
    assert len(seeds) >= 2
    right(seeds[:2], **options)


@pytest.mark.parametrize("page", [4, 16])
@pytest.mark.parametrize("mode", [BRANCHES, TREE], ids=["draft", "verify"])
def test_several_branches_pages_and_windows_together(right, mode, page):
    right(page_size=page, overlay="window", **mode)
    right(page_size=page, overlay="window", hybrid=True, **mode)


@pytest.mark.parametrize("page", [4, 16])
@pytest.mark.parametrize("overlay", ["full", "window", "local", "cross", "prefill_aware"])
def test_prefill_with_pages_under_every_overlay(right, overlay, page):
    right(page_size=page, mode="extend", overlay=overlay)
    right(page_size=page, mode="extend", overlay=overlay, padded_rows=2, padded_tokens=3)


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("topk", [1, 3])
def test_drafting_in_a_hybrid_pool(right, topk, page):
    for step in range(3):
        right(page_size=page, mode="draft_decode", topk=topk, overlay="window", hybrid=True, draft_step=step)


@pytest.mark.parametrize("page", [4, 16])
def test_latent_trees_with_pages_sinks_and_windows(right, page):
    right(page_size=page, overlay="mla", **TREE)
    right(page_size=page, overlay="mla", sinks=True, **TREE)
    right(page_size=page, overlay="mla", sinks=True, mode="decode")
    right(page_size=page, overlay="mla", sinks=True, mode="extend")


@pytest.mark.parametrize("page", [1, 4])
def test_uniform_verification_after_a_ragged_one(right, make_backend, page):
    """The ragged pass leaves nothing behind, neither offsets nor lengths."""

    def after_ragged(config, pools, layers):
        backend = make_backend(config, pools, layers)
        uniform = backends_of[id(config)]
        lens = torch.arange(uniform.bs) % (config.speculative.num_draft_tokens + 1)
        tokens = torch.zeros(int(lens.sum()), dtype=torch.int64)
        backend.plan(
            attrs.evolve(uniform, verify_lens=lens, out_cache_loc=tokens, positions=None, num_tokens=len(tokens))
        )
        return backend

    backends_of = {}
    for seed in range(3):
        scenario = made(seed=seed, page_size=page, batch_size=4, **CHAIN)
        backends_of[id(scenario.config)] = scenario.steps[0].batch
        results = run_scenario(scenario, after_ragged)
        assert [str(r) for r in results if r.status != "equal"] == []
    right(page_size=page, ragged=True, padded_tokens=3, **CHAIN)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("overlay", ["full", "local"])
@pytest.mark.parametrize(
    "mode",
    [BRANCHES, TREE, {"mode": "decode"}, {"mode": "extend"}],
    ids=["branches", "tree", "decode", "extend"],
)
def test_scales_of_fp8_follow_the_rows_of_the_kernel(right, mode, overlay, dtype):
    right(page_size=4, overlay=overlay, kv_dtype=dtype, kv_scales=True, **mode)


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("mode", [CHAIN, TREE], ids=["chain", "tree"])
def test_verification_at_the_context_limit(right, mode, page):
    """The table ends with the longest request's last draft token, in the middle of a page or at its end."""
    for last in (2 * page - 4, 2 * page - 3, 2 * page + 1):
        right(page_size=page, lengths=((max(1, last), 0), (1, 0)), **mode)


def embedding_seeds(group, **options):
    """Seeds for embedding models whose layers have a cache that stays untouched ("full"), or none at all."""
    return [seed for seed in range(12) if made(seed=seed, mode="embedding", **options).layers[0].kv_group == group][:3]


GROUPS = ["none", "full"]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("overlay", ["local", "window"])
def test_embedding_of_models_with_two_kinds_of_layers(right, overlay, group):
    """Each kind has offsets of its own."""
    options = {"overlay": overlay, "padded_tokens": 2}
    right(embedding_seeds(group, **options), mode="embedding", **options)


@pytest.mark.parametrize("group", GROUPS)
def test_bidirectional_windows_of_embeddings_reach_to_the_right(right, group):
    options = {"overlay": "encoder_only", "windows": (2, 3)}
    right(embedding_seeds(group, **options), mode="embedding", **options)


def test_bidirectional_windows_of_cached_layers_reach_to_the_right(right):
    mode = "extend"
    right(mode=mode, overlay="encoder_only", windows=(2, 3))
    scenario = made(mode=mode, overlay="encoder_only", windows=(2, 3), lengths=((0, 9),), seed=1)
    windowed = next(call for call in scenario.steps[0].calls if call.layer.window == 2)
    assert [token.position for token in windowed.keys[4]] == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("overlay", ["full", "window", "local", "cross"])
def test_no_requests_at_all(right, make_backend, overlay, page):
    """Nothing to do is no error: idle between two passes, and every mode with zero requests."""

    def speculating(config, pools, layers):
        sizes = SpeculativeConfig(topk=3, num_steps=3, num_draft_tokens=4)
        return make_backend(attrs.evolve(config, speculative=sizes), pools, layers)

    right(make=speculating, page_size=page, overlay=overlay, mode="idle")
    right(make=speculating, page_size=page, overlay=overlay, mode="idle", padded_rows=2)
    modes = [
        BRANCHES,
        TREE,
        CHAIN,
        *({"mode": m} for m in ("draft_decode", "decode", "extend", "mixed", "draft_extend")),
    ]
    for mode in modes:
        right(seeds=[0], page_size=page, overlay=overlay, batch_size=0, **mode)


@pytest.mark.parametrize(
    "mode",
    [BRANCHES, TREE, CHAIN, *({"mode": m} for m in ("draft_decode", "decode", "extend", "mixed", "draft_extend"))],
    ids=["branches", "tree", "chain", "draft", "decode", "extend", "mixed", "draft_extend"],
)
def test_int32_lengths_stay_what_they_are(make_backend, mode):
    for seed in range(3):
        scenario = made(seed=seed, page_size=4, index_dtype=torch.int32, **mode)
        batch = scenario.steps[0].batch
        assert batch.seq_lens.dtype == torch.int32
        before = batch.seq_lens.clone()
        results = run_scenario(scenario, make_backend)
        assert [str(r) for r in results if r.status != "equal"] == []
        assert torch.equal(batch.seq_lens, before)
