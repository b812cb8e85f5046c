"""Segments: what they ask of a kernel, and whose fault a malformed one is."""

import attrs
import pytest
import torch

from faback import ConfigError
from faback.core.segment import FEATURES, KVView, Segment, Tail, Visibility


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def make(**changes):
    table = torch.zeros(3, 8, dtype=torch.int32)
    base = {
        "rows": 2,
        "tokens": 2,
        "cu_seqlens_q": int32(0, 1, 2),
        "max_seqlen_q": 1,
        "kv_len": int32(3, 4),
        "max_kv_len": 4,
        "kv": KVView(table, int32(1, 2), 1),
    }
    return Segment(**{**base, **changes})


def view(**changes):
    return attrs.evolve(make().kv, **changes)


@pytest.mark.parametrize(
    ("changes", "features"),
    [
        ({}, set()),
        ({"kv": None}, {"raw_kv"}),
        ({"kv": view(start=int32(0, 0))}, {"start"}),
        ({"kv": view(slot_map=int32(0, 1))}, {"slot_map"}),
        ({"kv": view(dense=True)}, {"dense_table"}),
        ({"kv": view(page_stride=1)}, {"block_table"}),
        ({"positions": int32(0, 0)}, {"positions"}),
        ({"tail": Tail(2, int32(1, 2))}, {"tail"}),
        ({"tail": Tail(2, int32(1, 2), mask=torch.ones(2, 2, dtype=torch.bool))}, {"tail", "tree"}),
        ({"visibility": Visibility(causal=False)}, {"non_causal"}),
        ({"visibility": Visibility(window=(0, None))}, {"window"}),
        ({"visibility": Visibility(window=(None, 0))}, {"window_right"}),
        ({"visibility": Visibility(chunk=4, keep=int32(1, 1))}, {"chunk", "keep"}),
    ],
)
def test_features(changes, features):
    found = make(**changes).features()
    assert found == features
    assert found <= set(FEATURES)


def test_a_good_segment_passes():
    segment = make(kv_len=torch.tensor([3, 4]), visibility=Visibility(keep=torch.tensor([0, 1])))
    assert segment.check("me") is segment


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("cu_seqlens_q", {"cu_seqlens_q": int32(0, 1)}),
        ("cu_seqlens_q", {"cu_seqlens_q": torch.tensor([0, 1, 2])}),
        ("kv_len", {"kv_len": int32(1)}),
        ("kv_len", {"kv_len": torch.ones(2)}),
        ("kv_len", {"kv_len": int32(1, 2)[:, None]}),
        ("tail.lens", {"tail": Tail(1, int32(1, 1, 1))}),
        ("kv.req_pool_indices", {"kv": view(req_pool_indices=int32(1))}),
        ("kv.start", {"kv": view(start=torch.ones(2, dtype=torch.int16))}),
        ("visibility.keep", {"visibility": Visibility(keep=int32(1, 2, 3))}),
    ],
)
def test_a_malformed_one_names_field_and_contributor(field, changes):
    with pytest.raises(ConfigError) as caught:
        make(**changes).check("local_attention (acme 1.2)")
    assert caught.value.what == f"segment.{field} from local_attention (acme 1.2)"


@pytest.mark.parametrize(
    "changes",
    [
        {"tail": Tail(2, int32(1, 2), slots=torch.zeros(2, 2))},
        {"tail": Tail(2, int32(1, 2), slots=torch.zeros(5, 2, dtype=torch.int32))},
        {"tail": Tail(2, int32(1, 2), mask=torch.ones(2, 2))},
        {"tail": Tail(2, int32(1, 2), bits=torch.ones(2, 1, dtype=torch.int64))},
        {"positions": torch.ones(2)},
        {"kv": view(slot_map=torch.ones(4))},
        {"kv": view(page_size=4, page_stride=3)},
    ],
    ids=["slots dtype", "slots rows", "mask dtype", "bits dtype", "positions dtype", "slot_map dtype", "page_stride"],
)
def test_the_rest_of_a_malformed_segment_is_named_too(changes):
    with pytest.raises(ConfigError, match="from me"):
        make(**changes).check("me")
