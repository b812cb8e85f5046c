"""The package as faback finds it: nothing until it is asked for, everything then."""

from importlib.metadata import entry_points

import pytest
import torch
from small_engine import layer

from faback import AttentionBackend, BackendConfig, ConfigError, Pools
from faback.builtins import BUILTINS
from faback.core.registry import Registry
from faback.pools import MHAPool

ASKED = {"block_sparse": {"block_size": 16, "top_k": 4}}
MODES = {"block_sparse_decode", "block_sparse_extend"}


@pytest.fixture
def points():
    """The installed entry point and no other."""
    found = [point for point in entry_points(group="faback") if point.name == "block_sparse"]
    assert found, "not installed: pip install --no-deps -e plugins/faback-block-sparse"
    return found


def brought(config, points):
    """Keys of everything, without and with the plugin."""
    found = []
    for some in ([], points):
        registry = Registry.load(config, BUILTINS, entry_points=some)
        parts = (registry.modes(config).values(), registry.overlays(config), registry.lowerings(config))
        kernels = registry.kernels(torch.device("cpu"))
        found.append([[getattr(c.value, "key", None) or c.value.name for c in part] for part in (*parts, kernels)])
        assert {record.status for record in registry.records} == {"loaded"}
    return found


def test_nothing_changes_until_it_is_asked_for(points):
    without, with_it = brought(BackendConfig(context_len=8), points)
    assert without == with_it


def test_asked_for_it_brings_two_modes_and_a_lowering(points):
    config = BackendConfig(context_len=8, options=ASKED)
    without, with_it = brought(config, points)
    assert set(with_it[0]) - set(without[0]) == MODES
    assert with_it[2] == ["block_table", *without[2]]
    assert (with_it[1], with_it[3]) == (without[1], without[3])


def test_the_settings_are_known_and_without_the_plugin_refused(points):
    layers = [layer(0)]
    config = BackendConfig(context_len=8, dtype=torch.float32, options=ASKED)
    kv = MHAPool(num_pages=4, page_size=16, layers=layers, dtype=torch.float32)
    pools = Pools(req_to_token=torch.zeros(2, 8, dtype=torch.int64), kv=kv)
    backend = AttentionBackend(config, pools, layers, registry=Registry.load(config, BUILTINS, points))
    assert set(backend.modes) > MODES
    with pytest.raises(ConfigError, match="config.options.*block_sparse"):
        AttentionBackend(config, pools, layers, registry=Registry.load(config, BUILTINS, []))
