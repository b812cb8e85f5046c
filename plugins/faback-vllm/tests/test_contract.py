"""The plugin against vLLM's signatures: recorded ones always, and its own classes where they are installed."""

from __future__ import annotations

import importlib
import inspect
import re
from importlib import metadata
from pathlib import Path

import pytest
import vllm_here
from vllm_here import BACKEND, CONTRACT

from faback import FabackError
from faback_vllm import NAME, PATH, register
from faback_vllm.backend import FabackAttentionBackend
from faback_vllm.builder import FabackMetadataBuilder
from faback_vllm.impl import FabackImpl

OURS = {
    "AttentionBackend": FabackAttentionBackend,
    "AttentionMetadataBuilder": FabackMetadataBuilder,
    "AttentionImpl": FabackImpl,
}
OVERRIDES = [
    (base, name) for base, cls in OURS.items() for name in CONTRACT[BACKEND][base]["methods"] if name in vars(cls)
]
needs_vllm = pytest.mark.skipif(not vllm_here.REAL, reason="vLLM is not installed here: these are its own classes")


def names_of(arguments: str) -> list[str]:
    """Names in a recorded signature, those with a default marked."""
    function = eval(f"lambda {re.sub(r'=[^,]+', '=None', arguments)}: None")
    return marked(function)


def marked(function) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name + ("=" if p.default is not p.empty else "") for p in parameters]


@pytest.mark.parametrize(("base", "name"), OVERRIDES, ids=lambda value: value)
def test_overrides_take_the_calls_of_what_they_override(base, name):
    """In the recorded order, and no argument of ours is demanded that vLLM does not give."""
    recorded = names_of(CONTRACT[BACKEND][base]["methods"][name]["arguments"])
    mine = marked(inspect.unwrap(getattr(vars(OURS[base])[name], "__func__", vars(OURS[base])[name])))
    assert [one.rstrip("=") for one in mine[: len(recorded)]] == [one.rstrip("=") for one in recorded]
    assert all(given.endswith("=") <= one.endswith("=") for given, one in zip(recorded, mine, strict=False))
    assert all(one.endswith("=") for one in mine[len(recorded) :])


def test_nothing_abstract_is_left():
    for cls in OURS.values():
        assert not getattr(cls, "__abstractmethods__", None)
    abstract = {
        (base, name)
        for base in OURS
        for name, method in CONTRACT[BACKEND][base]["methods"].items()
        if "abstractmethod" in method["decorators"]
    }
    assert abstract <= set(OVERRIDES)


def test_fields_that_are_read_are_there():
    """Every field of `common_attn_metadata` that the sources name."""
    sources = "".join(path.read_text() for path in (Path(inspect.getfile(FabackImpl)).parent).glob("*.py"))
    fields = set(CONTRACT[BACKEND]["CommonAttentionMetadata"]["fields"])
    read = set(re.findall(r"common(?:_attn_metadata)?\.([a-z_]+)", sources))
    assert read >= {"seq_lens", "slot_mapping"} and read <= fields
    from faback_vllm.checks import UNSUPPORTED

    assert set(UNSUPPORTED) <= fields


def test_entry_points():
    group = CONTRACT["vllm.plugins"]["DEFAULT_PLUGINS_GROUP"]["constant"].strip("'")
    (point,) = metadata.entry_points(group=group, name="faback")
    assert point.load() is register
    (mode,) = metadata.entry_points(group="faback", name="vllm")
    assert [made.key for made in mode.load().faback_modes(config=None)] == ["vllm"]


@pytest.fixture
def registry():
    """The registry, as it was afterwards."""
    from vllm.v1.attention.backends import registry

    enum = registry.AttentionBackendEnum
    yield enum
    enum.CUSTOM.clear_override()
    if NAME in enum.__members__:
        registry.register_backend(enum[NAME], PATH)


def test_registration(registry):
    register()
    register()
    assert registry[NAME].get_path() == registry.CUSTOM.get_path() == PATH
    assert registry[NAME].get_class() is FabackAttentionBackend
    assert FabackAttentionBackend.get_name() == NAME


def test_others_are_left_alone(registry):
    from vllm.v1.attention.backends.registry import register_backend

    register_backend(registry.CUSTOM, "somebody.else.Backend")
    register()
    assert registry.CUSTOM.get_path() == "somebody.else.Backend"
    register_backend(registry[NAME], "somebody.else.Backend")
    with pytest.raises(FabackError, match="vLLM's attention backend FABACK: wanted faback_vllm.backend"):
        register()


@needs_vllm
def test_the_recorded_contract_is_that_of_the_installed_vllm():
    for module, entries in CONTRACT.items():
        real = importlib.import_module(module)
        for name, entry in entries.items():
            for method, recorded in entry.get("methods", {}).items():
                found = inspect.getattr_static(getattr(real, name), method)
                found = getattr(found, "fget", None) or getattr(found, "__func__", found)
                if "=" not in recorded["arguments"].replace("=None", "").replace("=False", "").replace("=True", ""):
                    assert marked(inspect.unwrap(found)) == names_of(recorded["arguments"]), (name, method)


@needs_vllm
def test_vllms_own_loader_finds_the_plugin(monkeypatch, registry):
    import vllm.plugins

    monkeypatch.setenv("VLLM_PLUGINS", "faback")
    monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
    vllm.plugins.load_general_plugins()
    assert registry[NAME].get_class() is FabackAttentionBackend
