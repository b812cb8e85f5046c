"""What cannot be honoured is refused when it is built or planned, in words."""

import attrs
import pytest
import torch
from small_engine import Engine, layer, registry

from faback import AttentionBackend, BackendConfig, BatchError, ConfigError, FabackError, ForwardBatch, Pools
from faback.core.contracts import Overlay
from faback.core.hooks import hookimpl
from faback.pools import MHAPool

GOOD = {"block_size": 8, "top_k": 1}


def build(settings, *, page=4, layers=None, **config):
    layers = layers or [layer(0), layer(1)]
    made = BackendConfig(context_len=32, dtype=torch.float32, options={"block_sparse": settings}, **config)
    kv = MHAPool(num_pages=20, page_size=page, layers=layers, dtype=torch.float32)
    pools = Pools(req_to_token=torch.zeros(3, 32, dtype=torch.int64), kv=kv)
    return AttentionBackend(made, pools, layers, registry=registry(made))


def refused(error, *words):
    """The message has these words, and the attributes that make a good one."""
    assert isinstance(error.value, FabackError) and error.value.wanted is not None
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"block_size": 0}, "['block_size']: wanted an integer >= 1, got 0"),
        ({"block_size": 8.0}, "['block_size']: wanted an integer >= 1, got 8.0"),
        ({"block_size": True}, "['block_size']: wanted an integer >= 1, got True"),
        ({"block_size": 6}, "['block_size']: wanted a multiple of the page size 4, got 6"),
        ({"top_k": -1}, "['top_k']: wanted an integer >= 0, got -1"),
        ({"local_blocks": 0}, "['local_blocks']: wanted an integer >= 1, got 0"),
        ({"recent": "some"}, "['recent']: wanted 'all' or 'local', got some"),
        ({"catch_up": 0}, "['catch_up']: wanted None or an integer >= 1, got 0"),
        ({"catch_up": 8, "recent": "local"}, "['catch_up']: wanted None where recent='local', got 8"),
        ({"topk": 3}, "wanted settings (*, block_size: "),
    ],
)
def test_settings(change, wanted):
    with pytest.raises(ConfigError) as error:
        build({**GOOD, **change})
    refused(error, "config.options['block_sparse']", wanted)


def test_a_size_that_is_missing():
    with pytest.raises(ConfigError) as error:
        build({"top_k": 1})
    refused(error, "block_size")


def test_deterministic():
    with pytest.raises(ConfigError) as error:
        build(GOOD, deterministic=True)
    refused(error, "wanted None where deterministic=True", "Near ties")


@pytest.mark.parametrize(
    "layers", [[layer(0, window=4)], [layer(0), layer(1, head_dim=16)], [layer(0), layer(1, num_q_heads=2)]]
)
def test_layers(layers):
    with pytest.raises(ConfigError) as error:
        build(GOOD, layers=layers)
    refused(error, "block-sparse layers: wanted causal layers without window or chunk, all of the same heads")


def batch(**changes):
    fields = {
        "forward_mode": "block_sparse_extend",
        "req_pool_indices": torch.tensor([1, 2]),
        "seq_lens": torch.tensor([5, 4]),
        "extend_seq_lens": torch.tensor([2, 1]),
        "out_cache_loc": torch.tensor([5, 6, 7]),
        "extras": {"query_summary": torch.zeros(2, 4, 8)},
    }
    return ForwardBatch(**{**fields, **changes})


def test_the_good_batch_is_planned():
    build(GOOD).plan(batch())


@pytest.mark.parametrize("change", [{"extras": {}}, {"extend_seq_lens": None}, {"out_cache_loc": None}])
def test_fields_that_are_missing(change):
    with pytest.raises(BatchError) as error:
        build(GOOD).plan(batch(**change))
    refused(error, "wanted a value in forward mode 'block_sparse_extend'")


@pytest.mark.parametrize(
    ("summary", "got"),
    [
        (torch.zeros(3, 4, 8), "got torch.float32 [3, 4, 8]"),
        (torch.zeros(2, 3, 8), "got torch.float32 [2, 3, 8]"),
        (torch.zeros(2, 4, 4), "got torch.float32 [2, 4, 4]"),
        (torch.zeros(3, 2, 4, 8), "got torch.float32 [3, 2, 4, 8]"),
        (torch.zeros(2, 8), "got torch.float32 [2, 8]"),
        (torch.zeros(2, 4, 8, dtype=torch.int64), "got torch.int64 [2, 4, 8]"),
        (torch.zeros(2, 4, 8, device="meta"), "on meta"),
        ([1.0], "got list"),
    ],
)
def test_query_summaries(summary, got):
    with pytest.raises(BatchError) as error:
        build(GOOD).plan(batch(extras={"query_summary": summary}))
    refused(error, "batch.extras['query_summary']: wanted float [2, heads, 8] or [2 layers, 2, heads, 8]", got)


def test_rows_that_are_padded_to_one_length():
    with pytest.raises(BatchError) as error:
        build(GOOD).plan(batch(token_stride=2, out_cache_loc=torch.tensor([5, 6, 7, 0])))
    refused(error, "batch.token_stride: wanted None, got 2. Give the rows' tokens one after another")


def test_an_overlay_that_does_not_go_with_it():
    class Narrow(Overlay):
        key = "narrow"

        def applies(self, kind):
            return True

        def transform(self, segment, kind, batch, ws, ctx):
            return attrs.evolve(segment, visibility=attrs.evolve(segment.visibility, window=(3, None)))

    class Plugin:
        @hookimpl
        def faback_overlays(self):
            return [Narrow()]

    backend = build(GOOD)
    backend.registry.register(Plugin(), "narrow")
    backend = AttentionBackend(backend.config, backend.pools, backend.layers.values(), registry=backend.registry)
    with pytest.raises(ConfigError) as error:
        backend.plan(batch())
    refused(error, "block-sparse layers: wanted the mode's own causal segment, got window", "overlay")


def test_a_replay_wants_the_summary_that_was_captured():
    made = Engine({"block_size": 8, "top_k": 1}, page=4, graphs=True)
    captured, _ = made.step([(1, 1), (2, 1)])
    with pytest.raises(BatchError, match="query_summary"):
        made.backend.replay(attrs.evolve(captured, extras={}))
