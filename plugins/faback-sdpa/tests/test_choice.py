"""Installed, the kernel is the last to be taken; a ranking that is asked for makes it the first."""

from __future__ import annotations

import attrs
import pytest
import torch
from backends import registry

from faback import AttentionBackend, ConfigError
from faback.builtins import BUILTINS
from faback.core.registry import Registry
from faback.testing import Scenario
from faback_sdpa import Ranking

CPU = torch.device("cpu")
STORIES = [{"mode": "decode"}, {"mode": "mixed", "sinks": True}, {"mode": "target_verify", "topk": 2}]


def chosen(scenario, config, found):
    made = AttentionBackend(config, scenario.pools(), scenario.layers, registry=found)
    return [made.explain(step.batch, layer).kernel for step in scenario.steps for layer in scenario.layers]


def ranked(config, **settings):
    config = attrs.evolve(config, options={"sdpa-ranking": settings})
    found = registry(config)
    found.register(Ranking.of(config), "sdpa-ranking")
    return config, found


def brought(config, found):
    """Keys of all modes, overlays and lowerings."""
    parts = (found.modes(config).values(), found.overlays(config), found.lowerings(config))
    keys = [[contribution.value.key for contribution in part] for part in parts]
    assert {record.status for record in found.records} == {"loaded"}
    return keys


def test_the_package_brings_one_kernel_the_last_and_nothing_else():
    config = Scenario.make(mode="decode").config
    without, with_it = Registry.load(config, BUILTINS, []), registry(config)
    assert brought(config, without) == brought(config, with_it)
    names = [[c.value.name for c in found.kernels(CPU)] for found in (without, with_it)]
    assert names[1] == [*names[0], "sdpa"]


@pytest.mark.parametrize("story", STORIES)
def test_auto_takes_the_others_first(story):
    scenario = Scenario.make(**story)
    without = chosen(scenario, scenario.config, Registry.load(scenario.config, BUILTINS, []))
    assert chosen(scenario, scenario.config, registry(scenario.config)) == without
    assert "sdpa" not in str(without)


def test_the_ranking_is_off_until_it_is_asked_for():
    scenario = Scenario.make(mode="decode")
    found = registry(scenario.config)
    found.register(Ranking.of(scenario.config), "sdpa-ranking")
    assert chosen(scenario, scenario.config, found) == ["reference"]


def test_the_ranking_puts_it_first_where_it_was_asked_for():
    decode, extend = Scenario.make(mode="decode"), Scenario.make(mode="extend", lengths=((3, 9), (0, 2)))
    assert chosen(decode, *ranked(decode.config, modes=["extend"])) == ["reference"]
    assert chosen(extend, *ranked(extend.config, modes=["extend"])) == ["sdpa"]
    assert chosen(extend, *ranked(extend.config, modes=["extend"], least_queries=9)) == ["sdpa"]
    assert chosen(extend, *ranked(extend.config, modes=["extend"], least_queries=17)) == ["reference"]


def test_a_preference_is_no_pin():
    scenario = Scenario.make(mode="decode", softcap=True)
    assert chosen(scenario, *ranked(scenario.config, modes=["decode"])) == ["reference"]


@pytest.mark.parametrize("settings", [{"modes": "extend"}, {"modes": [1]}, {"least_queries": -1}, {"mode": ["extend"]}])
def test_settings_that_mean_nothing(settings):
    with pytest.raises(ConfigError, match="sdpa-ranking.*wanted"):
        ranked(Scenario.make(mode="decode").config, **settings)


def test_settings_without_the_registration_are_refused():
    scenario = Scenario.make(mode="decode")
    config = attrs.evolve(scenario.config, options={"sdpa-ranking": {"modes": ["extend"]}})
    with pytest.raises(ConfigError, match="sdpa-ranking"):
        AttentionBackend(config, scenario.pools(), scenario.layers, registry=registry(config))
