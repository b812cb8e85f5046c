"""Recorded attention scenarios with known results, read from `golden/golden.tar.xz`.

A scenario is one configuration, a life of a cache, and the attention calls made on the way. Arrays, by key:

`<tag>.L<layer>.oracle`
    float32 [tokens, heads, v_dim], the result to be matched, for every call. Rows of `q` beyond it are padding.
`<tag>.L<layer>.q`, `.k`, `.v`
    float16, [tokens, heads, dim]. With MLA `q` is [nope | rope], `k` the latent, `v` the rope part. Cross-attention
    while decoding writes nothing and has neither `k` nor `v`.
`<tag>.L<layer>.kpool`, `.vpool`, or with MLA `.kvpool`
    float16 [slots, kv_heads, dim], the layer's pool before the call, the call's own `k` and `v` not yet written.
`<tag>.L<layer>.cu_seqlens_k`, `.oracle_lse`
    only of calls of kind "mha-lse", which attend to the contiguous `k` and `v` given and have no pool and no batch:
    the keys' boundaries, and float32 [tokens, heads] natural log-sum-exp.
`fb.*`
    the batch. `fb.forward_mode` is a number; `Scenario.forward_mode` names it. `fb.step_loc` are the slots that this
    draft step writes, where `fb.out_cache_loc` are those of all steps. Padded batches have more rows than requests.
`req_to_token`, `req_rows`, `req_len`, `req_enc`, `req_prefill`
    int32 [rows, context] slots, then per request its row, its tokens, its encoder tokens, its prefilled tokens.
`full_to_swa`, `sinks`
    int64 slot translation of hybrid pools; float32 [heads] sink logits, which count where `cfg["sinks"]` says so.

With an fp8 pool (`cfg["kv_dtype"]`) the pools hold the stored values, which are e4m3 numbers, and the oracle casts `q`
to e4m3 as well. Where `cfg["k_scale"]` is 0.5 the scale of the values is 0.25, which `cfg` does not say: what is stored
was divided by the scale, and is multiplied by it when read.

Only the last forward pass of a scenario was recorded whole: the batch, the tables, and `q`, `k`, `v` and the pools are
those of its last tag. Of earlier passes the results alone remain; `Scenario.reproducible_calls` leaves them out. The
passes of "mha-lse" calls are all there.
"""

from __future__ import annotations

import functools
import io
import json
import lzma
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np

ARCHIVE = Path(__file__).parent / "golden" / "golden.tar.xz"
FORWARD_MODES = ((1, "extend"), (2, "decode"), (3, "mixed"), (5, "target_verify"), (6, "draft_extend"))
KEYS = (frozenset({"kpool", "vpool"}), frozenset({"kvpool"}), frozenset({"k", "v", "cu_seqlens_k"}))
"""What a call may attend to: one of these sets of arrays must be there."""


class ArchivedArrays(Mapping[str, np.ndarray]):
    """Arrays of one scenario by key, decoded anew at each access, so that no test can spoil another's.

    Args:
        blob: the unpacked archive.
        spans: where each key's .npy lies in it, (offset, size).
    """

    def __init__(self, blob: memoryview, spans: Mapping[str, tuple[int, int]]) -> None:
        self._blob = blob
        self._spans = spans

    def __getitem__(self, key: str) -> np.ndarray:
        offset, size = self._spans[key]
        return np.load(io.BytesIO(self._blob[offset : offset + size]), allow_pickle=False)

    def __iter__(self) -> Iterator[str]:
        return iter(self._spans)

    def __len__(self) -> int:
        return len(self._spans)

    def __contains__(self, key: object) -> bool:
        return key in self._spans


@attrs.frozen
class Call:
    """One layer's attention in one forward pass.

    Attributes:
        tag: the forward pass, for example "run" or "step1".
        layer: the layer's number.
        kind: "full", "swa", "local", "cross", "enc_only" or "mha-lse".
    """

    tag: str
    layer: int
    kind: str

    @property
    def prefix(self) -> str:
        """What the keys of the call's arrays begin with."""
        return f"{self.tag}.L{self.layer}."


@attrs.frozen(eq=False)
class Scenario:
    """A recorded scenario.

    Attributes:
        name: `<mode>_ps<page size>[_options]`.
        cfg: its configuration.
        calls: every attention call, in order.
        arrays: the arrays, by key.
    """

    name: str
    cfg: Mapping[str, Any]
    calls: tuple[Call, ...]
    arrays: Mapping[str, np.ndarray] = attrs.field(repr=False)

    @property
    def forward_mode(self) -> str | None:
        """The last pass's mode in faback's names; None where calls were recorded without a batch."""
        if "fb.forward_mode" not in self.arrays:
            return None
        mode = dict(FORWARD_MODES)[int(self.arrays["fb.forward_mode"])]
        return "draft_decode" if mode == "decode" and "fb.step_loc" in self.arrays else mode

    def of(self, call: Call) -> dict[str, np.ndarray]:
        """A call's arrays by the last part of their keys: "q", "kpool", "oracle", ..."""
        found = (key for key in self.arrays if key.startswith(call.prefix))
        return {key.removeprefix(call.prefix): self.arrays[key] for key in found}

    def reproducible_calls(self) -> tuple[Call, ...]:
        """The calls whose queries and keys are recorded, so that their result can be computed again."""
        return tuple(call for call in self.calls if self._has_inputs(call))

    def _has_inputs(self, call: Call) -> bool:
        have = {key.removeprefix(call.prefix) for key in self.arrays if key.startswith(call.prefix)}
        return {"q", "oracle"} <= have and any(keys <= have for keys in KEYS)


@functools.cache
def tolerance() -> float:
    """The largest absolute difference from an oracle that computing in float32 explains."""
    return float(_archive()[0]["tolerance"])


@functools.cache
def scenarios() -> list[Scenario]:
    """Every scenario, by name."""
    index, found = _archive()
    return [
        Scenario(entry["name"], entry["cfg"], tuple(Call(*call) for call in entry["calls"]), found[entry["name"]])
        for entry in index["scenarios"]
    ]


def load(name: str) -> Scenario:
    """The scenario of that name; KeyError if there is none."""
    return {scenario.name: scenario for scenario in scenarios()}[name]


@functools.cache
def _archive() -> tuple[dict[str, Any], dict[str, ArchivedArrays]]:
    """The index, and each scenario's arrays; unpacked once per process and kept in memory."""
    raw = lzma.decompress(ARCHIVE.read_bytes())
    blob = memoryview(raw)
    spans: dict[str, dict[str, tuple[int, int]]] = {}
    with tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as tar:
        for member in tar:
            scenario, slash, file = member.name.partition("/")
            if slash:
                key = file.removesuffix(".npy")
                spans.setdefault(scenario, {})[key] = member.offset_data, member.size
            else:
                index = json.loads(blob[member.offset_data : member.offset_data + member.size].tobytes())
    return index, {scenario: ArchivedArrays(blob, keys) for scenario, keys in spans.items()}
