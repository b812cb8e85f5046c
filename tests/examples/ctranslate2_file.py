"""Writes CTranslate2 files: any variables, or a Whisper model named and fused as CTranslate2 does it."""

from __future__ import annotations

import struct

import torch

DTYPES = (torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16)


def name(text):
    data = text.encode() + b"\0"
    return struct.pack("<H", len(data)) + data


def write(path, variables, aliases=None, *, version=6):
    parts = [struct.pack("<I", version), name("WhisperSpec"), struct.pack("<II", 3, len(variables))]
    for key, tensor in variables.items():
        data = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
        shape = struct.pack(f"<B{tensor.ndim}I", tensor.ndim, *tensor.shape)
        parts += [name(key), shape, struct.pack("<BI", DTYPES.index(tensor.dtype), len(data)), data]
    aliases = aliases or {}
    parts += [struct.pack("<I", len(aliases)), *(name(alias) + name(key) for alias, key in aliases.items())]
    path.write_bytes(b"".join(parts))


def write_whisper(path, model):
    state = {key.removeprefix("model."): tensor.half() for key, tensor in model.state_dict().items()}
    variables = {"decoder/activation": torch.tensor(3, dtype=torch.int8)}
    for side in ("encoder", "decoder"):
        heads = getattr(model.config, f"{side}_attention_heads")
        variables[f"{side}/num_heads"] = torch.tensor(heads, dtype=torch.int16)
        variables[f"{side}/position_encodings/encodings"] = state[f"{side}.embed_positions.weight"]
        variables |= norm(state, f"{side}.layer_norm", f"{side}/layer_norm")
        for number in range(getattr(model.config, f"{side}_layers")):
            variables |= block(state, f"{side}.layers.{number}", f"{side}/layer_{number}", side == "decoder")
    for conv in ("conv1", "conv2"):
        variables |= {f"encoder/{conv}/{kind}": state[f"encoder.{conv}.{kind}"] for kind in ("weight", "bias")}
    variables["decoder/embeddings/weight"] = state["decoder.embed_tokens.weight"]
    write(path, variables, {"decoder/projection/weight": "decoder/embeddings/weight"})


def block(state, ours, theirs, decoder):
    found = norm(state, f"{ours}.self_attn_layer_norm", f"{theirs}/self_attention/layer_norm")
    found |= norm(state, f"{ours}.final_layer_norm", f"{theirs}/ffn/layer_norm")
    for number, part in enumerate(("fc1", "fc2")):
        for kind in ("weight", "bias"):
            found[f"{theirs}/ffn/linear_{number}/{kind}"] = state[f"{ours}.{part}.{kind}"]
    found |= attention(state, f"{ours}.self_attn", f"{theirs}/self_attention", ("qkv", ("out",)))
    if decoder:
        found |= norm(state, f"{ours}.encoder_attn_layer_norm", f"{theirs}/attention/layer_norm")
        found |= attention(state, f"{ours}.encoder_attn", f"{theirs}/attention", ("q", "kv", ("out",)))
    return found


def norm(state, ours, theirs):
    return {f"{theirs}/gamma": state[f"{ours}.weight"], f"{theirs}/beta": state[f"{ours}.bias"]}


def attention(state, ours, theirs, fused):
    found = {}
    for number, letters in enumerate(fused):
        for kind in ("weight", "bias"):
            zeros = torch.zeros_like(state[f"{ours}.q_proj.bias"])
            parts = [state.get(f"{ours}.{letter}_proj.{kind}", zeros) for letter in letters]
            found[f"{theirs}/linear_{number}/{kind}"] = torch.cat(parts)
    return found
