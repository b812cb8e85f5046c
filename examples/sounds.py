"""Sounds for speech recognition: read from WAV files, or made here by a few lines of formant synthesis."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np

RATE = 16_000
"""Samples per second of every sound here."""

# Formants in Hz, and loudness. A voice glides from one to the next.
PHONES = {
    "w": (300, 700, 2200, 0.5),
    "y": (280, 2200, 2900, 0.5),
    "l": (360, 1050, 2700, 0.5),
    "ee": (280, 2250, 2900, 1.0),
    "i": (400, 2000, 2600, 1.0),
    "e": (530, 1850, 2500, 1.0),
    "a": (730, 1150, 2450, 1.0),
    "uh": (600, 1200, 2400, 1.0),
    "er": (480, 1350, 1700, 1.0),
    "oo": (310, 870, 2250, 1.0),
    ".": (500, 1500, 2500, 0.0),
}


def read_wav(path: Path) -> np.ndarray:
    """A file of 16-bit samples at any rate, as float32 [samples] at `RATE`; channels are averaged."""
    with wave.open(str(path)) as file:
        if file.getsampwidth() != 2:
            raise ValueError(f"{path}: wanted 16-bit samples, got {8 * file.getsampwidth()}-bit")
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, file.getnchannels()).mean(1)
        rate = file.getframerate()
    times = np.arange(0, len(samples), rate / RATE)
    return (np.interp(times, np.arange(len(samples)), samples) / 2**15).astype(np.float32)


def say(phones: str, *, seconds: float = 0.11, pitch: float = 120.0) -> np.ndarray:
    """A voice: pulses, as of vocal cords, through three resonances. It knows voiced sounds only.

    Args:
        phones: names out of `PHONES`, separated by spaces; a phone may be repeated.
        seconds: for each.
        pitch: in Hz at the beginning; it falls by a quarter.
    """
    targets = np.array([PHONES[name] for name in phones.split()])
    count = int(len(targets) * seconds * RATE)
    where = np.linspace(0, len(targets) - 1, count)
    tracks = np.stack([np.interp(where, np.arange(len(targets)), column) for column in targets.T], 1)
    phase = np.cumsum(np.linspace(pitch, 0.75 * pitch, count) / RATE)
    voice = np.diff(np.floor(phase), prepend=0.0) + 0.01 * np.random.default_rng(0).standard_normal(count)
    for formant, width in ((0, 60), (1, 90), (2, 150)):
        voice = _resonance(voice, tracks[:, formant], width)
    voice = np.diff(voice * tracks[:, 3], prepend=0.0)
    return (0.5 * voice / np.abs(voice).max()).astype(np.float32)


def _resonance(signal: np.ndarray, frequency: np.ndarray, width: float) -> np.ndarray:
    """A resonator of two poles whose frequency moves."""
    radius = np.exp(-np.pi * width / RATE)
    first, second = 2 * radius * np.cos(2 * np.pi * frequency / RATE), -radius * radius
    gain = 1 - first - second  # 1 at frequency 0
    out = [0.0, 0.0]
    for x, a, g in zip(signal.tolist(), first.tolist(), gain.tolist(), strict=True):
        out.append(g * x + a * out[-1] + second * out[-2])
    return np.array(out[2:])
