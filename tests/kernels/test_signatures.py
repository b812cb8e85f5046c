"""The adapters and their stand-ins speak of arguments as the packages do, whose signatures are recorded.

`tools/package_signatures.py` records them, and says where another version differs.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import torch

from core.test_select import ask
from faback.core.layer import LayerKind
from faback.core.segment import KVView, Segment, Visibility
from faback.core.workspace import EagerWorkspace
from faback.kernels import fa2
from faback.kernels.fa2 import FlashAttention2
from faback.kernels.fa3 import FlashAttention3
from faback.kernels.fa4 import FlashAttention4
from faback.kernels.torch_ops import TorchOps
from kernels import stubs_fa2, stubs_fa3

RECORDED = json.loads(Path(__file__).with_name("signatures.json").read_text())
HALF = {"q_dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}


def recorded(distribution, function):
    return RECORDED[distribution]["functions"][function].split(", ")


def schema(text):
    return [argument.name for argument in torch._C.parse_schema(text).arguments]


@pytest.mark.parametrize(
    ("distribution", "function", "stand_in"),
    [
        ("flash_attn", "_flash_attn_varlen_forward", schema(stubs_fa2.VARLEN)),
        ("flash_attn", "_flash_attn_varlen_forward", [*inspect.signature(stubs_fa2.varlen).parameters]),
        ("flash_attn", "flash_attn_with_kvcache", [*inspect.signature(stubs_fa2.flash_attn_with_kvcache).parameters]),
        ("tokenspeed_fa3", "fwd", schema(stubs_fa3.FWD)),
        ("tokenspeed_fa3", "get_scheduler_metadata", schema(stubs_fa3.METADATA)),
    ],
)
def test_stand_ins_have_the_arguments_of_the_package(distribution, function, stand_in):
    assert stand_in == recorded(distribution, function)


@pytest.fixture(scope="module", autouse=True)
def operators():
    library = stubs_fa3.register()
    yield
    library._destroy()


def segment(ws, *, paged=True, uniform=True, window=(None, None), causal=True):
    ones, rows = torch.ones(3, dtype=torch.int32), 3
    view = KVView(torch.zeros(4, 512, dtype=torch.int32), ones, 256) if paged else None
    offsets = ws.uniform_offsets(rows, 2) if uniform else torch.tensor([0, 1, 4, 6], dtype=torch.int32)
    return Segment(
        rows=rows, tokens=6, cu_seqlens_q=offsets, max_seqlen_q=2, kv_len=ones, max_kv_len=512, kv=view,
        visibility=Visibility(causal=causal, window=window),
    )  # fmt: skip


CALLS = [{}, {"uniform": False}, {"paged": False, "causal": False}, {"window": (8, None)}]


@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize(
    ("kernel", "distribution", "function", "besides"),
    [
        (FlashAttention2(), "flash_attn", None, {"q", "k", "v", "return_softmax_lse"}),
        (FlashAttention3(), "tokenspeed_fa3", "fwd", {"q", "k", "v", "out", "sinks"}),
        (FlashAttention4(), "flash_attn_4", "flash_attn_varlen_func", {"q", "k", "v", "learnable_sink", "return_lse"}),
    ],
    ids=["fa2", "fa3", "fa4"],
)
def test_adapters_pass_arguments_that_there_are(kernel, distribution, function, besides, call):
    ws = EagerWorkspace(TorchOps(), torch.device("cpu"), {})
    layer = LayerKind(num_q_heads=4, num_kv_heads=2, head_dim=64)
    request = ask(head_dim=64, v_head_dim=64, page_size=256, **HALF)
    arguments = kernel.prepare(segment(ws, **call), layer, request, ws).arguments
    if function is None:
        cached = "cache_seqlens" in arguments
        function = "flash_attn_with_kvcache" if cached else "_flash_attn_varlen_forward"
        assert cached == (call.get("paged", True) and call.get("uniform", True))
        besides = besides if cached else besides - {"return_softmax_lse"}
    assert set(arguments) | (besides - {"k", "v"}) <= set(recorded(distribution, function))


@pytest.mark.parametrize(
    ("needed", "function"),
    [(fa2.OF_CACHE, "flash_attn_with_kvcache"), (fa2.OF_VARLEN, "_flash_attn_varlen_forward")],
)
def test_what_is_looked_for_is_there(needed, function):
    assert needed <= set(recorded("flash_attn", function))
