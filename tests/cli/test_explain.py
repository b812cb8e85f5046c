import json

import pytest

from cli import stubs


def answer(faback_cli, *args):
    result = faback_cli("explain", "--device", "cpu", "--json", *args)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_explain_a_plain_decode(faback_cli):
    found = answer(faback_cli, "--batch", 3, "--ctx", 77)
    assert found["mode"].startswith("decode (faback ")
    assert found["kernel"] == "reference"
    assert found["segment"] | {"rows": 3, "max_seqlen_q": 1, "max_kv_len": 77} == found["segment"]
    assert "32/8 heads, dims 128/128" in found["requests"][0]


def test_explain_takes_the_layer_from_the_options(faback_cli):
    flags = ["--heads", "6/2", "--head-dim", "48/32", "--dtype", "float16", "--kv-dtype", "float8_e4m3fn"]
    flags += ["--page-size", 8, "--window", 100, "--softcap", 30, "--sinks", "--kv-scales"]
    found = answer(faback_cli, *flags)
    assert found["segment"]["window"] == [100, None]
    request = found["requests"][0]
    for word in ("6/2 heads, dims 48/32", "float16 on float8_e4m3fn", "page 8", "kv_scales, sinks, softcap, window"):
        assert word in request
    assert any(overlay.startswith("sliding_window") for overlay in found["overlays"])


@pytest.mark.parametrize("mode", ["decode", "extend", "mixed", "idle", "draft_decode", "draft_extend", "target_verify"])
@pytest.mark.parametrize("topk", [1, 3])
def test_every_mode_can_be_explained(faback_cli, mode, topk):
    found = answer(faback_cli, "--mode", mode, "--topk", topk, "--ctx", 33, "--batch", 2)
    assert found["mode"].startswith(f"{mode} (")


def test_explain_other_kinds_of_layers(faback_cli):
    assert "chunk" in answer(faback_cli, "--mode", "extend", "--chunk", 64)["segment"]["features"]
    assert answer(faback_cli, "--mode", "extend", "--cross", "--encoder-len", 9)["segment"]["max_kv_len"] == 9
    assert not answer(faback_cli, "--mode", "extend", "--bidirectional")["segment"]["causal"]
    assert "latent" in answer(faback_cli, "--heads", "4/1", "--head-dim", "576/512", "--latent")["requests"][0]


def test_explain_says_why_other_kernels_are_not_used(faback_cli, monkeypatch):
    points = [stubs.Point(k.name, stubs.Plugin(k)) for k in (stubs.Picky(), stubs.Elsewhere())]
    stubs.install(monkeypatch, *points)
    found = answer(faback_cli, "--window", 5)
    assert found["absent"]["elsewhere"] == "needs a tachyon accelerator"
    assert [r["kernel"] for r in found["rejections"]] == ["picky"]
    printed = faback_cli("explain", "--device", "cpu", "--window", 5).stdout
    assert "picky: feature: wanted window" in printed and "tachyon" in printed


def test_a_long_context_costs_no_memory(faback_cli):
    found = answer(faback_cli, "--batch", 256, "--ctx", 1_000_000, "--mode", "target_verify", "--kernel", "reference")
    assert found["segment"]["max_kv_len"] >= 1_000_000


def test_a_pinned_kernel_is_used(faback_cli, monkeypatch):
    stubs.install(monkeypatch, stubs.Point("picky", stubs.Plugin(stubs.Picky())))
    assert answer(faback_cli, "--kernel", "picky")["kernel"] == "picky"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--mode", "bogus"], "'bogus'"),
        (["--kernel", "bogus"], "bogus"),
        (["--heads", "7/2"], "a multiple of num_kv_heads=2"),
        (["--heads", "many"], "--heads"),
        (["--dtype", "float7"], "float7"),
        (["--kv-dtype", "nn"], "--kv-dtype"),
    ],
)
def test_errors_are_one_message_and_exit_code_2(faback_cli, flags, words):
    result = faback_cli("explain", "--device", "cpu", "--json", *flags)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert words in result.stderr and "Traceback" not in result.stderr


def test_an_unknown_device_is_an_error(faback_cli):
    result = faback_cli("explain", "--device", "abacus")
    assert result.exit_code == 2 and "abacus" in result.stderr
