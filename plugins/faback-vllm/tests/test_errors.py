"""What vLLM may get wrong is found when the pass is planned, and named by vLLM's field."""

import pytest
import torch
from vllm_world import World, config_of, layer

from faback import BatchError, ConfigError, FabackError, NoKernelError, PoolError
from faback_vllm.layers import configuration

META = torch.device("meta")


def world(**settings):
    made = World([layer("a")], **settings)
    made.add(), made.add()
    made.step([(0, 20), (1, 3)])
    return made


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("field", "changes", "message"),
    [
        ("seq_lens", {"seq_lens": None}, "wanted a tensor on cpu, got None"),
        ("seq_lens", {"seq_lens": int32(21, 4, 1)}, r"wanted \[2\] with num_reqs=2, got \[3\]"),
        ("seq_lens", {"seq_lens": torch.ones(2)}, "torch.int32 or torch.int64"),
        ("seq_lens", {"seq_lens": torch.ones(2, dtype=torch.int32, device=META)}, "like the KV cache, got meta"),
        ("query_start_loc", {"query_start_loc": torch.tensor([0, 1, 2])}, "wanted torch.int32, got torch.int64"),
        ("query_start_loc", {"query_start_loc": int32(0, 1)}, r"wanted \[3\]"),
        ("query_start_loc_cpu", {"query_start_loc_cpu": int32(0, 2)}, r"a CPU tensor \[3\]"),
        ("slot_mapping", {"slot_mapping": None}, "wanted a tensor"),
        ("slot_mapping", {"slot_mapping": torch.zeros(2)}, "torch.float32"),
        ("slot_mapping", {"slot_mapping": torch.zeros(4, dtype=torch.int64)[::2]}, "side by side"),
        ("block_table_tensor", {"block_table_tensor": torch.zeros(1, 9, dtype=torch.int32)}, "a row for each of"),
        ("block_table_tensor", {"block_table_tensor": int32(1, 2)}, r"\[2, blocks\]"),
        ("causal", {"causal": torch.tensor([True, False])}, "causal for some requests only"),
        ("mm_req_doc_ranges", {"mm_req_doc_ranges": {0: [(0, 3)]}}, "bidirectional within images"),
        ("rswa_prefix_lens", {"rswa_prefix_lens": int32(1, 1)}, "reference sliding window"),
        ("dcp_local_seq_lens", {"dcp_local_seq_lens": int32(1, 1)}, "decode context parallelism"),
    ],
)
def test_always(field, changes, message):
    made = world()
    common = made.common([(0, 1), (1, 1)])
    for name, value in changes.items():
        setattr(common, name, value)
    with pytest.raises(BatchError, match=message) as caught:
        made.builder.build(0, common)
    assert caught.value.what == f"common_attn_metadata.{field}"


@pytest.mark.parametrize(
    ("field", "changes", "message"),
    [
        ("query_start_loc", {"query_start_loc": int32(0, 2, 2)}, r"as in query_start_loc_cpu: \[0, 1, 2\]"),
        ("query_start_loc", {name: int32(0, 2, 1) for name in ("query_start_loc", "query_start_loc_cpu")}, "ascending"),
        ("query_start_loc", {name: int32(0, 1, 9) for name in ("query_start_loc", "query_start_loc_cpu")}, "at most"),
        ("max_query_len", {"max_query_len": 0}, "wanted 1 or more"),
        ("seq_lens", {"seq_lens": int32(21, 0)}, r"at least the query lengths \[1, 1\]"),
        ("max_seq_len", {}, ""),
        ("seq_lens", {"max_seq_len": 20}, "at most max_seq_len=20, got 21"),
        ("block_table_tensor", {"block_table_tensor": torch.ones(2, 1, dtype=torch.int32)}, "wanted 2 blocks of 16"),
        ("block_table_tensor", {"block_table_tensor": torch.full((2, 3), 200, dtype=torch.int32)}, "from 0 to 199"),
        ("slot_mapping", {"slot_mapping": torch.tensor([3200, -1])}, "slots below 3200"),
    ],
)
def test_in_checked_mode(field, changes, message):
    made = world(checks=True)
    common = made.common([(0, 1), (1, 1)])
    for name, value in changes.items():
        setattr(common, name, value)
    if not changes:
        made.builder.build(0, common)
        return
    with pytest.raises(BatchError, match=message) as caught:
        made.builder.build(0, common)
    assert caught.value.what == f"common_attn_metadata.{field}"


def test_the_environment_switches_checks_on(monkeypatch):
    monkeypatch.setenv("FABACK_CHECK", "1")
    made = world()
    common = made.common([(0, 1), (1, 1)])
    common.slot_mapping[0] = 1 << 20
    with pytest.raises(BatchError, match="slot_mapping"):
        made.builder.build(0, common)


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (torch.zeros(9, 2, 8, 32), r"wanted \[num_blocks, 2, 16, 32\], got \[9, 2, 8, 32\]"),
        (torch.zeros(9, 2, 16, 31), "wanted"),
        (torch.zeros(2, 9, 16, 2, 16), "wanted"),
        (torch.zeros(9, 2, 16, 32, dtype=torch.float16), "wanted torch.float32, got torch.float16"),
        (torch.zeros(9, 2, 16, 32, device=META), "got meta"),
        (torch.zeros(9 * 2 * 16 * 32 + 99).as_strided((9, 2, 16, 32), (1030, 512, 32, 1)), "multiple"),
        (torch.zeros(9, 2, 32, 16).transpose(2, 3), "multiple"),
        (torch.zeros(9, 2, 16, 32), "9 blocks"),
    ],
)
def test_caches_that_cannot_be_read_in_place(cache, message):
    made = world()
    metadata = made.builder.build(0, made.common([(0, 1)]))
    one, q, kv = made.layers[0], torch.zeros(1, 4, 16), torch.zeros(1, 2, 16)
    with pytest.raises(PoolError, match=message):
        one.impl.forward(one, q, kv, kv, cache, metadata, torch.zeros(1, 4, 16))


def test_layers_that_nobody_serves():
    with pytest.raises(ConfigError, match="alibi_slopes"):
        layer("a", alibi_slopes=[0.5] * 4)
    with pytest.raises(ConfigError, match="sliding_window of a"):
        World([layer("a", sliding_window=0)])
    with pytest.raises((ConfigError, NoKernelError)):
        World([layer("a")], kernels="no such kernel")
    with pytest.raises(NotImplementedError, match="fused_output_quant_supported"):
        layer("a").impl.forward(None, None, None, None, None, None, None, output_scale=torch.ones(1))


def test_settings():
    config = configuration(config_of([], kernels="reference", checks=True), batch_invariant=False)
    assert (config.kernels, config.checks, config.context_len) == ("reference", True, 128)
    with pytest.raises(ConfigError, match=r"additional_config\['faback'\].*got dtype"):
        configuration(config_of([], dtype="x"), batch_invariant=False)
    without = config_of([])
    without.additional_config = object()  # vLLM allows anything that can be hashed
    assert configuration(without, batch_invariant=True).deterministic


def test_the_forward_mode_must_be_there(monkeypatch):
    monkeypatch.setenv("FABACK_DISABLE_PLUGINS", "vllm")
    with pytest.raises(FabackError, match="required plugin 'vllm'"):
        World([layer("a")])
