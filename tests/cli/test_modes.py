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


# ---- what they make of a batch


def planned(faback_cli, *args):
    result = faback_cli("modes", "--plan", "--json", *args)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_plan_names_mode_overlays_and_kernel_of_each_kind_of_layers(faback_cli):
    full, sliding = planned(faback_cli, "--mode", "extend", "--window", 3, "--lengths", "4+3", "--kernel", "reference")
    assert full["layers"] == "layer 0: full attention" and sliding["layers"] == "layer 1: window 3"
    assert [line["role"] for line in sliding["lines"]] == ["mode", "overlay", "overlay", "overlay", "kernel"]
    by_key = {line["key"]: line for line in sliding["lines"]}
    assert by_key["extend"]["plugin"] == "faback.modes.extend"
    assert by_key["sliding_window"]["what"] == "visibility.window=(3, None)"
    assert by_key["hybrid_pool"]["what"] == "nothing to vary here"
    assert all(line["distribution"].startswith("faback ") for line in sliding["lines"])
    (segment,) = sliding["segments"]
    assert segment | {"rows": 1, "max_kv_len": 7, "window": [3, None], "kernel": "reference"} == segment


def test_a_plan_names_lowerings_and_a_kernel_for_each_segment(faback_cli):
    args = ("--mode", "target_verify", "--topk", 2, "--kernel", "poor")
    (kind,) = planned(faback_cli, *args)
    assert [segment["lowerings"] for segment in kind["segments"]] == [
        ["cascade 1", "query_rows"],
        ["cascade 2", "compact"],
    ]
    lowerings = [(line["key"], line["what"]) for line in kind["lines"] if line["role"] == "lowering"]
    assert lowerings[0] == ("cascade", "segment 1: cascade 1") and lowerings[-1] == ("compact", "segment 2: compact")
    kernels = [line for line in kind["lines"] if line["role"] == "kernel"]
    assert [line["distribution"] for line in kernels] == ["faback.testing"] * 2
    printed = faback_cli("modes", "--plan", *args).stdout
    assert "faback.core.lowering.cascade" in printed and "serves segment 2" in printed


def test_a_plan_names_third_parties(faback_cli, monkeypatch):
    from faback_streaming_llm import overlay

    picky = stubs.Point("picky", stubs.Plugin(stubs.Picky()))
    stubs.install(monkeypatch, stubs.Point("streaming-llm", overlay), picky)
    settings = 'streaming-llm={"sinks": 1, "window": 2}'
    (kind,) = planned(faback_cli, "--lengths", 6, "--set", settings, "--kernel", "reference")
    (line,) = [line for line in kind["lines"] if line["key"] == "streaming-llm"]
    assert (line["plugin"], line["distribution"]) == ("streaming-llm", "streaming-llm-dist 9.9")
    assert line["what"] == "visibility.window=(2, None), visibility.keep"
    (kind,) = planned(faback_cli, "--lengths", 6, "--kernel", "picky")
    assert kind["lines"][-1]["plugin"] == "picky" and kind["segments"][0]["kernel"] == "picky"


def test_options_that_would_not_be_heeded_are_errors(faback_cli):
    for flags, words in ((["--window", 3], "--window: wanted --plan"), (["--plan", "--device", "cpu"], "--device")):
        result = faback_cli("modes", *flags)
        assert result.exit_code == 2 and words in result.stderr
