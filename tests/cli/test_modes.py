import json

import faback
from cli import stubs
from faback.core.contracts import Mode, Overlay


class Marching(Mode):
    """Marches in step.

    And more.
    """

    key = "march"

    def build(self, batch, ws, ctx):
        raise NotImplementedError


class Optional(Overlay):
    """Only on demand."""

    key = "on_demand"

    def applies(self, layer):
        return False

    def transform(self, segment, layer, batch, ws, ctx):
        return segment


class Band:
    @faback.hookimpl
    def faback_modes(self, config):
        return [Marching()]

    @faback.hookimpl
    def faback_overlays(self, config):
        return [Optional()] if "band" in config.options else []


class Strict(Band):
    """A plugin that does not accept empty options."""

    @faback.hookimpl
    def faback_overlays(self, config):
        return [Optional()] if config.options.get("band", {"size": 1})["size"] > 1 else []


def catalogue(faback_cli):
    result = faback_cli("modes", "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_modes_lists_what_is_built_in(faback_cli):
    found = catalogue(faback_cli)
    assert set(found) == {"modes", "overlays", "lowerings", "kernels"}
    assert {"decode", "extend", "mixed", "idle"} <= {entry["key"] for entry in found["modes"]}
    assert "reference" in {entry["key"] for entry in found["kernels"]}
    for section in found.values():
        assert all(entry["distribution"].startswith("faback ") and entry["summary"] for entry in section)


def test_overlays_come_in_order_and_optional_ones_are_marked(faback_cli):
    overlays = catalogue(faback_cli)["overlays"]
    keys = [entry["key"] for entry in overlays]
    assert keys.index("sliding_window") < keys.index("prefill_aware_swa")
    assert [entry["key"] for entry in overlays if entry["optional"]] == ["prefill_aware_swa"]


def test_a_plugin_is_listed_with_its_distribution_and_first_line(faback_cli, monkeypatch):
    stubs.install(monkeypatch, stubs.Point("band", Band()))
    found = catalogue(faback_cli)
    entry = {"plugin": "band", "distribution": "band-dist 9.9"}
    assert entry | {"key": "march", "summary": "Marches in step.", "optional": False} in found["modes"]
    assert entry | {"key": "on_demand", "summary": "Only on demand.", "optional": True} in found["overlays"]
    printed = faback_cli("modes")
    assert printed.exit_code == 0
    assert "Marches in step." in printed.stdout and "band-dist 9.9" in printed.stdout


def test_a_plugin_that_cannot_do_with_empty_options_is_listed_as_usual(faback_cli, monkeypatch):
    stubs.install(monkeypatch, stubs.Point("band", Strict()))
    assert "march" in {entry["key"] for entry in catalogue(faback_cli)["modes"]}


def test_two_plugins_with_one_mode_are_an_error(faback_cli, monkeypatch):
    stubs.install(monkeypatch, stubs.Point("band", Band()), stubs.Point("orchestra", Band()))
    result = faback_cli("modes", "--json")
    assert result.exit_code == 2
    assert result.stdout == "" and "orchestra-dist" in result.stderr
