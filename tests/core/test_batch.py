"""ForwardBatch: every field is checked when the batch is made, and never written."""

import pytest
import torch

from faback import BatchError, ForwardBatch
from faback.core.batch import MIRRORED, PER_REQUEST, PER_TOKEN

INDEX_FIELDS = (*PER_REQUEST, *PER_TOKEN, "encoder_out_cache_loc")


def make(**fields):
    base = {"req_pool_indices": torch.tensor([1, 2]), "seq_lens": torch.tensor([3, 4])}
    return ForwardBatch(forward_mode="decode", **{**base, **fields})


@pytest.mark.parametrize("name", INDEX_FIELDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.uint8, torch.bool])
def test_wrong_dtype(name, dtype):
    with pytest.raises(BatchError) as caught:
        make(**{name: torch.ones(2, dtype=dtype)})
    assert (caught.value.what, caught.value.got) == (f"batch.{name}", dtype)


@pytest.mark.parametrize("name", INDEX_FIELDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_both_index_dtypes_are_accepted(name, dtype):
    value = torch.ones(2, dtype=dtype)
    assert getattr(make(**{name: value}), name) is value


@pytest.mark.parametrize("name", [n for n in PER_REQUEST if n != "req_pool_indices"])
def test_wrong_length(name):
    with pytest.raises(BatchError, match=rf"batch\.{name}: wanted \[2\], got \[3\].*req_pool_indices"):
        make(**{name: torch.ones(3, dtype=torch.int32)})


@pytest.mark.parametrize("name", [n for n in INDEX_FIELDS if n not in ("req_pool_indices", *PER_TOKEN)])
@pytest.mark.parametrize("shape", [(), (2, 1)])
def test_wrong_rank(name, shape):
    with pytest.raises(BatchError, match=f"batch.{name}"):
        make(**{name: torch.ones(shape, dtype=torch.int32)})


@pytest.mark.parametrize("name", [n for n in INDEX_FIELDS if n != "req_pool_indices"])
def test_a_list_is_no_tensor(name):
    with pytest.raises(BatchError, match=f"batch.{name}: wanted an int32 or int64 tensor, got list"):
        make(**{name: [1, 2]})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("req_pool_indices", [1, 2]),
        ("req_pool_indices", torch.tensor(1)),
        ("out_cache_loc", torch.tensor(1)),
        ("positions", torch.tensor(1)),
        ("custom_mask", [True]),
    ],
)
def test_odd_values_are_named_too(name, value):
    with pytest.raises(BatchError, match=f"batch.{name}"):
        make(**{name: value})


@pytest.mark.parametrize("name", MIRRORED)
def test_mirror_on_a_device(name):
    with pytest.raises(BatchError, match=f"batch.{name}_cpu: wanted a CPU tensor, got meta"):
        make(**{f"{name}_cpu": torch.ones(2, dtype=torch.int32, device="meta")})


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.float32])
def test_custom_mask_is_bool(dtype):
    with pytest.raises(BatchError, match=r"batch.custom_mask: wanted torch.bool, got .*\.bool\(\)"):
        make(custom_mask=torch.ones(4, dtype=dtype))


def test_token_count_comes_from_the_tokens():
    assert make().num_tokens == 2
    assert make(positions=torch.arange(5)).num_tokens == 5
    assert make(out_cache_loc=torch.arange(7)).num_tokens == 7
    assert make(out_cache_loc=torch.arange(7), num_tokens=9).num_tokens == 9


def test_bound_prefers_the_host_copy_and_needs_none_on_cpu():
    assert make().bound("seq_lens", 99) == 4
    assert make(seq_lens_cpu=torch.tensor([8, 2])).bound("seq_lens", 99) == 8
    assert make().bound("extend_seq_lens", 99) == 99
    on_device = make(
        req_pool_indices=torch.ones(2, dtype=torch.int32, device="meta"),
        seq_lens=torch.ones(2, dtype=torch.int32, device="meta"),
    )
    assert on_device.bound("seq_lens", 99) == 99
    empty = make(req_pool_indices=torch.zeros(0, dtype=torch.int32), seq_lens=torch.zeros(0, dtype=torch.int32))
    assert empty.bound("seq_lens", 99) == 0


def test_needed_fields_are_found_among_fields_and_extras():
    make(extras={"colour": 1}).check_fields(("seq_lens", "colour"))
    for name in ("out_cache_loc", "colour"):
        with pytest.raises(BatchError, match=f"batch.{name}.*'decode'"):
            make().check_fields(("seq_lens", name))


@pytest.mark.parametrize("name", [n for n in INDEX_FIELDS if not n.endswith("_cpu")] + ["custom_mask"])
def test_tensor_on_another_device(name):
    dtype = torch.bool if name == "custom_mask" else torch.int32
    batch = make(**{name: torch.ones(2, dtype=dtype, device="meta")})
    with pytest.raises(BatchError, match=f"batch.{name}: .*cpu.*got meta"):
        batch.check_device(torch.device("cpu"))


def test_host_copies_may_stay_on_the_host():
    on_device = {"req_pool_indices": torch.ones(2, dtype=torch.int32, device="meta")}
    on_device["seq_lens"] = on_device["req_pool_indices"]
    make(**on_device, seq_lens_cpu=torch.tensor([1, 2])).check_device(torch.device("meta"))
