"""vLLM's classes: its own where they can be imported, else stand-ins made from the recorded contract.

The contract has signatures, fields and constants; what a base class does beyond them is written out below, for the
few methods that the plugin calls. `tools/engine_contracts/vllm.py` compares the contract with a wheel.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import importlib
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any, Generic, TypeVar

CONTRACT = json.loads((Path(__file__).parent / "contract.json").read_text())["modules"]
REAL = importlib.util.find_spec("vllm") is not None
BACKEND = "vllm.v1.attention.backend"
REGISTRY = "vllm.v1.attention.backends.registry"


def recorded(module: str, name: str, arguments: str, names: dict[str, Any], decorators: list[str]) -> Any:
    """A function of the recorded signature."""
    body = f"raise NotImplementedError({f'{module}.{name} is recorded as a signature alone'!r})"
    made: dict[str, Any] = {}
    exec(f"def {name}({arguments}): {body}", names, made)
    function = made[name]
    for decorator in reversed(decorators):
        wrap = {"abstractmethod": abc.abstractmethod, "staticmethod": staticmethod, "classmethod": classmethod}
        function = {**wrap, "property": property}.get(decorator, lambda f: f)(function)
    return function


def made_class(module: str, name: str, entry: dict[str, Any], names: dict[str, Any]) -> type:
    """A class of the recorded fields and methods."""
    fields = {key: eval(value, names) for key, value in entry["fields"].items() if value is not None}
    if "Enum" in entry["class"]:
        mixin = {"type": str} if "str" in entry["class"] else {}
        return enum.Enum(name, fields, module=module, **mixin)
    if any(decorator.startswith("dataclass") for decorator in entry["decorators"]):
        given = [
            (key, Any) if value is None else (key, Any, dataclasses.field(default=fields[key]))
            for key, value in entry["fields"].items()
        ]
        made = dataclasses.make_dataclass(name, given, frozen="frozen=True" in entry["decorators"][0])
        made.__module__ = module
        return made
    methods = {
        key: recorded(f"{module}.{name}", key, method["arguments"], names, method["decorators"])
        for key, method in entry["methods"].items()
        if key != "__new__"  # which asks vLLM's process groups for ranks
    }
    bases = [names[base.split("[")[0]] for base in entry["class"] if base.split("[")[0] in names]
    generic = (Generic[TypeVar("T")],) if any("[" in base for base in entry["class"]) else ()
    annotated = {"__annotations__": {key: Any for key in entry["fields"]}, "__module__": module}
    return types.new_class(name, (*bases, *generic), exec_body=lambda body: body.update(fields, **methods, **annotated))


def stand_in() -> None:
    """Puts the modules that the plugin imports into `sys.modules`."""
    import torch

    common = {"torch": torch, "ABC": abc.ABC, "AttentionImplBase": None, "Enum": enum.Enum}
    modules = {
        name: types.ModuleType(name) for name in (BACKEND, REGISTRY, "vllm.envs", "vllm.v1.attention.backends.utils")
    }
    backend = modules[BACKEND]
    names: dict[str, Any] = dict(common)
    for name, entry in CONTRACT[BACKEND].items():
        if "class" in entry and "Protocol" not in entry["class"]:
            names[name] = made_class(BACKEND, name, entry, names)
            setattr(backend, name, names[name])
    behave(backend)
    registry(modules[REGISTRY])
    modules["vllm.envs"].VLLM_BATCH_INVARIANT = False
    utils = modules["vllm.v1.attention.backends.utils"]
    utils.PAD_SLOT_ID = int(CONTRACT[utils.__name__]["PAD_SLOT_ID"]["constant"])
    for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"):
        package = types.ModuleType(name)
        package.__path__ = []
        modules[name] = package
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    sys.modules.update(modules)


def behave(backend: Any) -> None:
    """What the base classes do, as far as the plugin relies on it."""

    def init(self: Any, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        self.kv_cache_spec, self.layer_names, self.vllm_config, self.device = (
            kv_cache_spec,
            layer_names,
            vllm_config,
            device,
        )

    init.__isabstractmethod__ = True
    backend.AttentionMetadataBuilder.__init__ = init


def registry(module: Any) -> None:
    """Names and class paths of backends; names can be added, and paths overridden."""
    overrides: dict[Any, str] = {}

    class AttentionBackendEnum(enum.Enum):
        TRITON_ATTN = "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"
        CUSTOM = None

        def get_path(self, include_classname: bool = True) -> str:
            return overrides.get(self, self.value)

        def get_class(self) -> type:
            path, _, name = self.get_path().rpartition(".")
            return getattr(importlib.import_module(path), name)

        def is_overridden(self) -> bool:
            return self in overrides

        def clear_override(self) -> None:
            overrides.pop(self, None)

    def register_backend(backend: Any, class_path: str | None = None, is_mamba: bool = False) -> Any:
        if isinstance(backend, str):
            if backend in AttentionBackendEnum.__members__:
                raise ValueError(f"Backend {backend} already exists")
            member = object.__new__(AttentionBackendEnum)
            member._name_, member._value_ = backend, class_path
            AttentionBackendEnum._member_map_[backend] = member
            AttentionBackendEnum._member_names_.append(backend)
            backend = member
        overrides[backend] = class_path

    module.AttentionBackendEnum, module.register_backend = AttentionBackendEnum, register_backend


if not REAL:
    stand_in()
