"""`tools/engine_contracts/vllm.py` on a wheel of a few lines."""

import ast
import importlib.util
import json
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[3] / "tools" / "engine_contracts" / "vllm.py"
SOURCE = """
LIMIT: int = -1

@dataclass(frozen=True)
class Spec(Base[T], Other):
    size: int
    name: str = "none"

    @property
    def width(self) -> int:
        return 3

    @staticmethod
    def make(a: int, b: "str | None" = None, *rest: int, key: float = 0.5, **more) -> "Spec":
        return a

def register(backend: Enum | str, path: str | None = None) -> None:
    pass
"""


@pytest.fixture
def tool(monkeypatch):
    if not TOOL.exists():
        pytest.skip("the repository's tools are not beside the plugin here")
    monkeypatch.syspath_prepend(str(TOOL.parent))  # as when it runs as a script
    spec = importlib.util.spec_from_file_location("contract_tool", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_recorded(tool):
    found = tool.described(ast.parse(SOURCE), ("LIMIT", "Spec", "register"), "module")
    assert found["LIMIT"] == {"constant": "-1"}
    assert found["register"] == {"function": "backend, path=None"}
    spec = found["Spec"]
    assert spec["class"] == ["Base[T]", "Other"] and spec["decorators"] == ["dataclass(frozen=True)"]
    assert spec["fields"] == {"size": None, "name": "'none'"}
    assert spec["methods"]["make"]["arguments"] == "a, b=None, *rest, key=0.5, **more"
    assert spec["methods"]["width"]["decorators"] == ["property"]


def test_a_name_that_is_gone(tool):
    with pytest.raises(SystemExit, match="module has no Gone"):
        tool.described(ast.parse(SOURCE), ("LIMIT", "Gone"), "module")


def test_the_record_is_of_what_is_wanted(tool):
    recorded = json.loads(tool.RECORDED.read_text())["modules"]
    assert {module: set(entries) for module, entries in recorded.items()} == {
        module: set(names) for module, names in tool.WANTED.items()
    }
