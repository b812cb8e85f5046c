"""The package as faback finds it: nothing until it is asked for, one overlay then."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest
import torch

from faback import AttentionBackend, AttentionLayer, BackendConfig, ConfigError, Pools
from faback.builtins import BUILTINS
from faback.core.registry import Registry
from faback.pools import MHAPool

ASKED = {"streaming-llm": {"sinks": 4, "window": 8}}


@pytest.fixture
def points():
    """The installed entry point and no other."""
    found = [point for point in entry_points(group="faback") if point.name == "streaming-llm"]
    assert found, "not installed: pip install --no-deps -e plugins/faback-streaming-llm"
    return found


def brought(config, points):
    """Keys of all modes, overlays, lowerings and kernels."""
    registry = Registry.load(config, BUILTINS, entry_points=points)
    kernels = registry.kernels(torch.device("cpu"))
    parts = (registry.modes(config).values(), registry.overlays(config), registry.lowerings(config), kernels)
    found = [[getattr(c.value, "key", None) or c.value.name for c in part] for part in parts]
    assert {record.status for record in registry.records} == {"loaded"}
    return found


def test_nothing_changes_until_it_is_asked_for(points):
    assert brought(BackendConfig(context_len=8), points) == brought(BackendConfig(context_len=8), [])


def test_asked_for_it_brings_an_overlay_and_nothing_else(points):
    config = BackendConfig(context_len=8, options=ASKED)
    without, with_it = brought(config, []), brought(config, points)
    assert set(with_it[1]) - set(without[1]) == {"streaming-llm"}
    assert [with_it[i] for i in (0, 2, 3)] == [without[i] for i in (0, 2, 3)]


def test_without_the_plugin_its_settings_are_refused(points):
    layers = [AttentionLayer(layer_id=0, num_q_heads=1, num_kv_heads=1, head_dim=8)]
    config = BackendConfig(context_len=8, dtype=torch.float32, options=ASKED)
    pools = Pools(
        req_to_token=torch.zeros(2, 8, dtype=torch.int64), kv=MHAPool(num_pages=4, layers=layers, dtype=torch.float32)
    )
    AttentionBackend(config, pools, layers, registry=Registry.load(config, BUILTINS, points))
    with pytest.raises(ConfigError, match="config.options.*streaming-llm"):
        AttentionBackend(config, pools, layers, registry=Registry.load(config, BUILTINS, []))
