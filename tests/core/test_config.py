"""BackendConfig and Pools refuse what they cannot use, by name."""

import attrs
import pytest
import torch

from faback import BackendConfig, ConfigError, Pools, SpeculativeConfig


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8", None])
def test_context_len_is_a_positive_integer(value):
    with pytest.raises(ConfigError) as caught:
        BackendConfig(context_len=value)
    assert caught.value.what == "BackendConfig.context_len"
    assert caught.value.got == repr(value)


@pytest.mark.parametrize("field", ["topk", "num_steps", "num_draft_tokens"])
@pytest.mark.parametrize("value", [0, 1.0, False])
def test_speculative_sizes(field, value):
    sizes = {"topk": 1, "num_steps": 1, "num_draft_tokens": 1}
    SpeculativeConfig(**sizes)
    with pytest.raises(ConfigError, match=f"SpeculativeConfig.{field}"):
        SpeculativeConfig(**{**sizes, field: value})


@pytest.mark.parametrize("value", [torch.float64, torch.int32, torch.float8_e4m3fn, "float16"])
def test_dtype(value):
    with pytest.raises(ConfigError, match="BackendConfig.dtype.*float16.*KV cache"):
        BackendConfig(context_len=1, dtype=value)


@pytest.mark.parametrize("value", [None, ["reference"], {"decode": 1}, {1: "reference"}])
def test_kernels(value):
    with pytest.raises(ConfigError, match="BackendConfig.kernels"):
        BackendConfig(context_len=1, kernels=value)


def test_kernel_for_each_mode():
    assert BackendConfig(context_len=1).kernel_for("decode") == "auto"
    assert BackendConfig(context_len=1, kernels="fa3").kernel_for("decode") == "fa3"
    mapped = BackendConfig(context_len=1, kernels={"decode": "fa3", "default": "triton"})
    assert (mapped.kernel_for("decode"), mapped.kernel_for("extend")) == ("fa3", "triton")
    assert BackendConfig(context_len=1, kernels={"decode": "fa3"}).kernel_for("extend") == "auto"


@pytest.mark.parametrize(("value", "checks"), [("1", True), ("0", False), (None, False)])
def test_checks_follow_the_environment(monkeypatch, value, checks):
    monkeypatch.delenv("FABACK_CHECK", raising=False)
    if value is not None:
        monkeypatch.setenv("FABACK_CHECK", value)
    assert BackendConfig(context_len=1).checks is checks


def test_frozen():
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        BackendConfig(context_len=1).context_len = 2


@pytest.mark.parametrize("field", ["allow_plugins", "disable_plugins", "require_plugins"])
def test_a_string_is_no_list_of_plugins(field):
    with pytest.raises(ConfigError):
        BackendConfig(context_len=1, **{field: "name"})


@pytest.mark.parametrize(
    "table", [torch.zeros(4, dtype=torch.int32), torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.int16)]
)
def test_request_table(world, layer, table):
    pool = world([layer()], [1], [1]).pool
    with pytest.raises(ConfigError, match="pools.req_to_token.*int32 or int64"):
        Pools(req_to_token=table, kv=pool)


def test_pool_without_the_protocol_is_told_what_it_lacks():
    class Half:
        page_size = 1
        num_slots = 1

    with pytest.raises(ConfigError) as caught:
        Pools(req_to_token=torch.zeros(1, 1, dtype=torch.int32), kv=Half())
    assert "buffers" in str(caught.value)
    assert "page_size" not in str(caught.value.got)
