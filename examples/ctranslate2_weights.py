"""Weights of Whisper out of a CTranslate2 file, for the model of Transformers.

`read` knows the format and no model; `whisper` knows how CTranslate2 names and fuses what Whisper is made of.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

from faback import FabackError

Tensor = torch.Tensor

VERSION = 6
DTYPES = (torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16)
"""By the number that stands for them in a file."""


def read(path: Path) -> dict[str, Tensor]:
    """All variables of a CTranslate2 model by name, aliases included, in the dtypes that they are stored in.

    A file is a header and a list of variables, each with its name, shape, dtype and bytes, and then a list of second
    names. Integers are unsigned and little-endian; a name has its length before it and a zero behind it.

    Raises:
        FabackError: another version of the format, or a file that ends too early.
    """
    with path.open("rb") as file:
        (version,) = _unpack(file, "I")
        if version != VERSION:
            raise FabackError(str(path), wanted=f"version {VERSION} of CTranslate2's format", got=version)
        _name(file)  # of the model's kind
        _unpack(file, "I")  # revision of that kind
        variables = dict(_variable(file) for _ in range(*_unpack(file, "I")))
        for _ in range(*_unpack(file, "I")):
            alias, name = _name(file), _name(file)
            variables[alias] = variables[name]
    return variables


def whisper(path: Path, **settings: Any) -> WhisperForConditionalGeneration:
    """The model, float32, on the CPU.

    Args:
        path: a `model.bin`.
        settings: of `WhisperConfig`, where the file does not tell them by its shapes.
    """
    stored = read(path)
    model = WhisperForConditionalGeneration(WhisperConfig(**_sizes(stored), **settings))
    state = {f"model.{name}": tensor.float() for name, tensor in _renamed(stored)}
    state["proj_out.weight"] = stored["decoder/projection/weight"].float()
    model.load_state_dict(state)
    return model.eval()


def _sizes(stored: dict[str, Tensor]) -> dict[str, int]:
    vocab_size, d_model = stored["decoder/embeddings/weight"].shape
    sizes = {
        "vocab_size": vocab_size,
        "d_model": d_model,
        "num_mel_bins": stored["encoder/conv1/weight"].shape[1],
        "max_source_positions": len(stored["encoder/position_encodings/encodings"]),
        "max_target_positions": len(stored["decoder/position_encodings/encodings"]),
    }
    for side in ("encoder", "decoder"):
        sizes[f"{side}_layers"] = sum(name.endswith("/ffn/linear_0/bias") for name in stored if name.startswith(side))
        sizes[f"{side}_attention_heads"] = int(stored[f"{side}/num_heads"])
        sizes[f"{side}_ffn_dim"] = len(stored[f"{side}/layer_0/ffn/linear_0/bias"])
    return sizes


def _renamed(stored: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """What the encoder and the decoder are made of, by the names of Transformers."""
    places = {
        "self_attention": ("self_attn", "self_attn_layer_norm", ("qkv", "out")),
        "attention": ("encoder_attn", "encoder_attn_layer_norm", ("q", "kv", "out")),
    }
    for name, tensor in stored.items():
        side, *path, kind = name.split("/")
        kind = {"gamma": "weight", "beta": "bias"}.get(kind, kind)
        match path:
            case ["conv1" | "conv2" as part] | ["layer_norm" as part]:
                yield f"{side}.{part}.{kind}", tensor
            case ["embeddings"]:
                yield f"{side}.embed_tokens.weight", tensor
            case ["position_encodings"]:
                yield f"{side}.embed_positions.weight", tensor
            case [layer, "ffn", part]:
                part = {"layer_norm": "final_layer_norm", "linear_0": "fc1", "linear_1": "fc2"}[part]
                yield f"{side}.{_layer(layer)}.{part}.{kind}", tensor
            case [layer, "self_attention" | "attention" as place, "layer_norm"]:
                yield f"{side}.{_layer(layer)}.{places[place][1]}.{kind}", tensor
            case [layer, "self_attention" | "attention" as place, linear]:
                attention, _, fused = places[place]
                letters = fused[int(linear.removeprefix("linear_"))]
                for letter, part in zip(*_parts(letters, tensor), strict=True):
                    if (letter, kind) != ("k", "bias"):  # keys have none: it is stored as zeros
                        yield f"{side}.{_layer(layer)}.{attention}.{letter}_proj.{kind}", part


def _parts(letters: str, tensor: Tensor) -> tuple[tuple[str, ...], tuple[Tensor, ...]]:
    """The projections that were fused into one, "qkv" or "kv", by their letters."""
    if letters == "out":
        return (letters,), (tensor,)
    return tuple(letters), tensor.chunk(len(letters))


def _layer(name: str) -> str:
    return f"layers.{name.removeprefix('layer_')}"


def _variable(file: BinaryIO) -> tuple[str, Tensor]:
    name = _name(file)
    (rank,) = _unpack(file, "B")
    shape = _unpack(file, f"{rank}I")
    dtype, size = _unpack(file, "BI")
    data = bytearray(_bytes(file, size))
    return name, torch.frombuffer(data, dtype=DTYPES[dtype]).reshape(shape)


def _name(file: BinaryIO) -> str:
    return _bytes(file, *_unpack(file, "H")).rstrip(b"\0").decode()


def _unpack(file: BinaryIO, layout: str) -> tuple[int, ...]:
    layout = f"<{layout}"
    return struct.unpack(layout, _bytes(file, struct.calcsize(layout)))


def _bytes(file: BinaryIO, count: int) -> bytes:
    data = file.read(count)
    if len(data) != count:
        raise FabackError(file.name, wanted=f"{count} more bytes", got=len(data))
    return data
