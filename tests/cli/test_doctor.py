import json

from cli import stubs


def diagnosis(faback_cli):
    result = faback_cli("doctor", "--json", "--device", "cpu")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_doctor_knows_the_environment(faback_cli):
    found = diagnosis(faback_cli)["environment"]
    assert found["faback"] and found["python"] and found["torch"] and found["triton"]
    assert found["device"] == "cpu"


def test_doctor_lists_built_in_plugins_and_kernels(faback_cli):
    found = diagnosis(faback_cli)
    assert {p["status"] for p in found["plugins"]} == {"loaded"}
    reference = next(k for k in found["kernels"] if k["name"] == "reference")
    assert reference["available"] and not reference["objections"]
    assert "window" in reference["abilities"]["features"]
    assert found["problems"] == []


def test_doctor_lists_a_broken_plugin_with_its_traceback(faback_cli, monkeypatch):
    stubs.install(monkeypatch, stubs.Point("shattered", ImportError("libnothing.so is missing")))
    plugin = next(p for p in diagnosis(faback_cli)["plugins"] if p["name"] == "shattered")
    assert plugin["status"] == "broken"
    assert plugin["distribution"] == "shattered-dist 9.9"
    assert "Traceback" in plugin["problem"] and "libnothing.so is missing" in plugin["problem"]
    printed = faback_cli("doctor", "--device", "cpu")
    assert printed.exit_code == 0
    assert "libnothing.so is missing" in printed.stdout and "Traceback" in printed.stdout


def test_doctor_lists_a_plugin_whose_hook_raises(faback_cli, monkeypatch):
    stubs.install(monkeypatch, stubs.Point("raising", stubs.Raising()))
    plugin = next(p for p in diagnosis(faback_cli)["plugins"] if p["name"] == "raising")
    assert plugin["status"] == "broken" and "no mode today" in plugin["problem"]


def test_doctor_lists_a_blocked_plugin(faback_cli, monkeypatch):
    stubs.install(monkeypatch, stubs.Point("unwanted", stubs.Plugin(stubs.Skewed())))
    monkeypatch.setenv("FABACK_DISABLE_PLUGINS", "unwanted")
    found = diagnosis(faback_cli)
    assert next(p for p in found["plugins"] if p["name"] == "unwanted")["status"] == "blocked"
    assert all(k["name"] != "skewed" for k in found["kernels"])
    assert found["environment"]["FABACK_DISABLE_PLUGINS"] == "unwanted"


def test_doctor_says_why_a_kernel_is_not_here(faback_cli, monkeypatch):
    stubs.install(monkeypatch, stubs.Point("far", stubs.Plugin(stubs.Elsewhere())))
    kernel = next(k for k in diagnosis(faback_cli)["kernels"] if k["name"] == "elsewhere")
    assert not kernel["available"] and kernel["problem"] == "needs a tachyon accelerator"
    assert kernel["plugin"] == "far" and kernel["distribution"] == "far-dist 9.9"
    assert "needs a tachyon accelerator" in faback_cli("doctor", "--device", "cpu").stdout


def test_doctor_survives_two_plugins_with_one_kernel(faback_cli, monkeypatch):
    points = [stubs.Point(name, stubs.Plugin(stubs.Skewed())) for name in ("one", "other")]
    stubs.install(monkeypatch, *points)
    problems = diagnosis(faback_cli)["problems"]
    assert len(problems) == 1 and "one-dist" in problems[0] and "other-dist" in problems[0]


def test_doctor_survives_a_raising_probe(faback_cli, monkeypatch):
    kernel = stubs.Elsewhere()
    kernel.probe = lambda device: 1 / 0
    stubs.install(monkeypatch, stubs.Point("far", stubs.Plugin(kernel)))
    found = next(k for k in diagnosis(faback_cli)["kernels"] if k["name"] == "elsewhere")
    assert not found["available"] and "ZeroDivisionError" in found["problem"]


def test_doctor_says_what_was_loaded_from_where(faback_cli, monkeypatch):
    stubs.install(monkeypatch, stubs.Point("near", stubs.Plugin(stubs.Skewed())), stubs.Point("far", stubs.Raising()))
    monkeypatch.setenv("FABACK_PLUGINS", "near")
    found = {p["name"]: p for p in diagnosis(faback_cli)["plugins"]}
    assert found["near"] == {
        "name": "near", "distribution": "near-dist 9.9", "status": "loaded", "problem": "", "path": stubs.__file__
    }  # fmt: skip
    assert (found["far"]["status"], found["far"]["path"]) == ("not allowed", "")
    printed = faback_cli("doctor", "--device", "cpu").stdout
    assert stubs.__file__ in printed and "near-dist 9.9" in printed and "not allowed" in printed
