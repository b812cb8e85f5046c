"""The adapter of FlashAttention 4 against the package itself: every kind of call that it makes compiles for sm_90.

No GPU is needed: tensors are fake, and the package compiles what it would launch. A variant takes 2 to 5 seconds.
"""

from __future__ import annotations

import os
from importlib import import_module, metadata

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from core.test_select import ask
from faback.core.layer import LayerKind
from faback.core.segment import KVView, Segment, Visibility
from faback.core.workspace import Workspace
from faback.kernels.fa4 import DISTRIBUTION, FlashAttention4

TARGET = {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"}
HALF = {"q_dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}
CUDA = torch.device("cuda")


def missing():
    try:
        metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return f"{DISTRIBUTION} is not installed: pip install 'faback[fa4]'"
    return ""


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing() or "installed"),
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor"),
    pytest.mark.filterwarnings("ignore:Argument aux_data"),  # of the package's own calls
]


@pytest.fixture(scope="module", autouse=True)
def package():
    """The package, told what to compile for before it looks for a GPU. It reads that once: nothing is put back."""
    os.environ.update(TARGET)
    return import_module("flash_attn.cute.interface")


@pytest.fixture
def compiled(package):
    """How many variants this test has compiled."""
    known = package._flash_attn_fwd.compile_cache.cache
    known.clear()
    return lambda: len(known)


class Fake(TorchFunctionMode):
    """Fake tensors on "cuda", also where torch knows no CUDA: its Python bindings then stumble over what is here."""

    def __enter__(self):
        self._fake = FakeTensorMode()
        self._fake.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._fake.__exit__(*error)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__getitem__ and isinstance(args[1], int):
            return args[0].select(0, args[1])
        if function is torch.Tensor.copy_:
            return torch.ops.aten.copy_(*args)
        return function(*args, **(kwargs or {}))


class Ops:
    """Launches nothing."""

    def __getattr__(self, name):
        return lambda *args, **params: None


class Unfilled(Workspace):
    """Tensors of the right shapes."""

    def __init__(self):
        self.ops, self.device, self._filled = Ops(), CUDA, {}

    def buffer(self, name, shape, dtype):
        return torch.empty(shape, dtype=dtype, device=CUDA)

    def used(self):
        return

    def uniform_offsets(self, rows, step=1):
        return torch.empty(rows + 1, dtype=torch.int32, device=CUDA)


def run(
    queries=1, tokens=None, page_size=16, dtype=torch.bfloat16, heads=(8, 2), window=(None, None), causal=True,
    sinks=None, lse=False, **layer,
):  # fmt: skip
    """Prepares and runs the adapter on fake tensors: 4 rows of 512 keys; `page_size=None` are keys of the batch."""
    ws, rows = Unfilled(), 4
    kind = LayerKind(**{"num_q_heads": heads[0], "num_kv_heads": heads[1], "head_dim": 128, **layer})

    def ints(*shape):
        return torch.empty(shape, dtype=torch.int32, device=CUDA)

    view = None
    if page_size is not None:
        view = KVView(req_to_token=ints(9, 512), req_pool_indices=ints(rows), page_size=page_size)
    segment = Segment(
        rows=rows, tokens=rows * queries if tokens is None else tokens, cu_seqlens_q=ints(rows + 1),
        max_seqlen_q=queries, kv_len=ints(rows), max_kv_len=512, kv=view,
        visibility=Visibility(causal=causal, window=window),
    )  # fmt: skip
    request = ask(head_dim=kind.head_dim, v_head_dim=kind.v_head_dim, page_size=page_size or 1, **HALF)
    kernel = FlashAttention4()
    q = torch.empty(segment.tokens, heads[0], kind.head_dim, dtype=dtype, device=CUDA)
    k = torch.empty(segment.tokens if view is None else 4096, heads[1], kind.head_dim, dtype=dtype, device=CUDA)
    v = torch.empty(*k.shape[:2], kind.v_head_dim, dtype=dtype, device=CUDA)
    out = torch.empty(*q.shape[:2], kind.v_head_dim, dtype=dtype, device=CUDA)
    bias = None if sinks is None else torch.empty(heads[0], dtype=sinks, device=CUDA)
    prepared = kernel.prepare(segment, kind, request, ws)
    found = kernel.attend(prepared, q, prepared.paged.pages(k), prepared.paged.pages(v), out, bias, lse)
    assert found is None or (found.shape, found.dtype) == ((heads[0], segment.tokens), torch.float32)
    assert found is not None or not lse


CALLS = {
    "decode": {},
    "decode, pages of 1": {"page_size": 1},
    "decode, pages of 64, float16": {"page_size": 64, "dtype": torch.float16},
    "decode, window": {"window": (127, None)},
    "decode, softcap and log-sum-exp": {"softcap": 30.0, "lse": True},
    "decode, sinks": {"sinks": torch.bfloat16},
    "decode, float32 sinks, window, log-sum-exp": {"sinks": torch.float32, "window": (64, None), "lse": True},
    "extend": {"queries": 200},
    "extend, pages of 1, window": {"queries": 200, "page_size": 1, "window": (127, None)},
    "extend, padded tokens, sinks": {"queries": 200, "tokens": 900, "sinks": torch.bfloat16},
    "extend, softcap": {"queries": 200, "softcap": 50.0},
    "extend, dim 64, 9 heads on 3": {"queries": 200, "head_dim": 64, "heads": (9, 3)},
    "extend, dims 192 and 128": {"queries": 200, "head_dim": 192, "v_head_dim": 128},
    "extend, dim 256": {"queries": 200, "head_dim": 256},
    "both directions": {"queries": 200, "causal": False},
    "both directions, windows": {"queries": 200, "causal": False, "window": (16, 8)},
    "keys of the batch": {"queries": 200, "page_size": None},
    "keys of the batch, both directions, log-sum-exp": {
        "queries": 200,
        "page_size": None,
        "causal": False,
        "lse": True,
    },
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_compile(call, compiled):
    with Fake():
        run(**CALLS[call])
    assert compiled() == 1


def test_windows_and_pages_and_sizes_make_no_new_variants(compiled):
    with Fake():
        for window, page_size, tokens in ((127, 16, 4), (32, 16, 4), (4096, 64, 4), (16, 1, 7)):
            run(window=(window, None), page_size=page_size, tokens=tokens)
    assert compiled() == 1


def test_what_the_adapter_refuses_the_package_refuses():
    with Fake():
        with pytest.raises(Exception, match="(?i)fp8|float8"):
            run(dtype=torch.float8_e4m3fn)
        with pytest.raises(AssertionError, match="head_dim"):
            run(head_dim=288)
