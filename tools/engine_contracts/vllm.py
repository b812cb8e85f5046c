"""Reads the signatures that `plugins/faback-vllm` relies on off a vLLM wheel, without importing it.

    pip download --no-deps -d DIR vllm==0.33.0
    python tools/engine_contracts/vllm.py DIR/vllm-*.whl           compares with the record; fails if it differs
    python tools/engine_contracts/vllm.py DIR/vllm-*.whl --record  writes plugins/faback-vllm/tests/contract.json

The plugin's tests take the base classes from there where vLLM cannot be imported.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wheels import run, trees

RECORDED = Path(__file__).parents[2] / "plugins" / "faback-vllm" / "tests" / "contract.json"
WANTED: Mapping[str, tuple[str, ...]] = {
    "vllm.v1.attention.backend": (
        "AttentionType",
        "MultipleOf",
        "AttentionBackend",
        "AttentionMetadata",
        "CommonAttentionMetadata",
        "AttentionCGSupport",
        "AttentionMetadataBuilder",
        "AttentionLayer",
        "AttentionImplBase",
        "AttentionImpl",
        "subclass_attention_backend_with_overrides",
    ),
    "vllm.v1.attention.backends.registry": ("AttentionBackendEnum", "register_backend"),
    "vllm.v1.attention.backends.utils": ("PAD_SLOT_ID", "NULL_BLOCK_ID", "create_fast_prefill_custom_backend"),
    "vllm.v1.kv_cache_layout": ("KVCacheLayout",),
    "vllm.v1.kv_cache_interface": ("KVCacheSpec", "AttentionSpec", "FullAttentionSpec", "SlidingWindowSpec"),
    "vllm.model_executor.layers.attention.attention": ("Attention", "unified_attention_with_output"),
    "vllm.plugins": ("DEFAULT_PLUGINS_GROUP",),
    "vllm.envs": ("VLLM_BATCH_INVARIANT",),
}
"""Module -> classes, functions and constants."""


def contract(wheel: Path) -> dict[str, Any]:
    """What is wanted of every module, in the order in which it stands there."""
    found = trees(wheel, WANTED)
    return {"modules": {module: described(found[module], wanted, module) for module, wanted in WANTED.items()}}


def described(tree: ast.Module, wanted: tuple[str, ...], module: str) -> dict[str, Any]:
    """Each wanted name.

    Raises:
        SystemExit: one that the module does not have.
    """
    found: dict[str, Any] = {}
    for node in ast.walk(tree) if module == "vllm.envs" else tree.body:
        if isinstance(node, ast.ClassDef) and node.name in wanted:
            found[node.name] = described_class(node)
        elif isinstance(node, ast.FunctionDef) and node.name in wanted:
            found[node.name] = {"function": arguments(node)}
        else:
            found |= {name: {"constant": value} for name, value in assigned(node) if name in wanted}
    missing = set(wanted) - set(found)
    if missing:
        raise SystemExit(f"{module} has no {', '.join(sorted(missing))}")
    return found


def described_class(node: ast.ClassDef) -> dict[str, Any]:
    """Bases, what stands in the class's body as fields, and methods with their arguments."""
    methods = [child for child in node.body if isinstance(child, ast.FunctionDef)]
    return {
        "class": [ast.unparse(base) for base in node.bases],
        "decorators": [ast.unparse(decorator) for decorator in node.decorator_list],
        "fields": {name: value for child in node.body for name, value in assigned(child)},
        "methods": {
            method.name: {
                "arguments": arguments(method),
                "decorators": [ast.unparse(decorator) for decorator in method.decorator_list],
            }
            for method in methods
        },
    }


def assigned(node: ast.AST) -> list[tuple[str, str | None]]:
    """Names that a statement gives a value or a type, with the value's source."""
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [(node.target.id, None if node.value is None else ast.unparse(node.value))]
    if isinstance(node, ast.Assign):
        value = ast.unparse(node.value)
        return [(target.id, value) for target in node.targets if isinstance(target, ast.Name)]
    return []


def arguments(node: ast.FunctionDef) -> str:
    """A function's arguments as source, without types."""
    bare = ast.parse(ast.unparse(node.args).join(("def f(", "): ..."))).body[0]
    assert isinstance(bare, ast.FunctionDef)
    for argument in (*bare.args.posonlyargs, *bare.args.args, *bare.args.kwonlyargs, bare.args.vararg, bare.args.kwarg):
        if argument is not None:
            argument.annotation = None
    return ast.unparse(bare.args)


if __name__ == "__main__":
    sys.exit(run(__doc__, RECORDED, contract))
