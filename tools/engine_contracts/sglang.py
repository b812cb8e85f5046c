"""Reads the names and signatures that `plugins/faback-sglang` relies on off an SGLang wheel, without importing it.

    pip download --no-deps -d DIR sglang==0.5.23
    python tools/engine_contracts/sglang.py DIR/sglang-*.whl            compares with the record, fails if it differs
    python tools/engine_contracts/sglang.py DIR/sglang-*.whl --record   writes plugins/faback-sglang/tests/contract.json

Where SGLang cannot be imported, the plugin's tests hold its source to that record.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wheels import run, trees

RECORDED = Path(__file__).parents[2] / "plugins" / "faback-sglang" / "tests" / "contract.json"
WANTED: Mapping[str, tuple[str, ...]] = {
    "sglang.srt.arg_groups.choices": (
        "ATTENTION_BACKEND_CHOICES",
        "DRAFT_ATTENTION_BACKEND_CHOICES",
        "DETERMINISTIC_ATTENTION_BACKEND_CHOICES",
        "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND",
        "CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS",
        "add_attention_backend_choices",
        "add_draft_attention_backend_choices",
        "add_deterministic_attention_backend_choices",
        "add_radix_supported_deterministic_attention_backend_choices",
        "add_chunked_prefix_cache_attention_backend",
    ),
    "sglang.srt.layers.attention.attention_registry": ("register_attention_backend",),
    "sglang.srt.layers.attention.base_attn_backend": ("AttentionBackend", "SharedReadEnds"),
    "sglang.srt.layers.attention.verify_mask": ("VerifyMask", "tree_mask_numel"),
    "sglang.srt.layers.radix_attention": ("AttentionType", "RadixAttention"),
    "sglang.srt.model_executor.forward_batch_deepseek_mha_mixin": ("ForwardBatchDeepSeekMHAMixin",),
    "sglang.srt.model_executor.forward_batch_info": ("ForwardBatch", "ForwardMode"),
    "sglang.srt.models.deepseek_common.attention_backend_handler": ("AttentionBackendRegistry", "handle_attention_fa3"),
    "sglang.srt.models.deepseek_common.utils": ("FORWARD_ABSORB_CORE_ATTENTION_BACKENDS",),
    "sglang.srt.plugins": ("GENERAL_PLUGINS_GROUP", "load_plugins"),
    "sglang.srt.plugins.hook_registry": ("HookRegistry", "HookType"),
    "sglang.srt.runtime_context": (
        "get_exec",
        "get_memory",
        "get_model",
        "get_parallel",
        "get_schedule",
        "get_spec",
    ),
    "sglang.srt.speculative.draft_utils": ("DraftBackendFactory",),
    "sglang.srt.speculative.eagle_info": ("EagleVerifyInput",),
    "sglang.srt.speculative.eagle_utils": ("TreeMaskMode",),
    "sglang.srt.speculative.ragged_verify": ("RaggedVerifyLayout",),
}
"""Module -> classes, functions and names."""
FLASH_ATTENTION = "sglang.srt.layers.attention.flashattention_backend"
OWNERS = ("forward_batch", "layer", "model_runner", "spec_info", "get_spec()", "get_exec()", "get_model()")
OWNERS += ("get_schedule()", "get_memory()", "get_parallel()")
"""What SGLang's own backend reads of these is in the table of the plugin's README."""


def contract(wheel: Path) -> dict[str, Any]:
    """What is wanted of every module."""
    found = trees(wheel, [*WANTED, FLASH_ATTENTION])
    modules = {module: described(found[module], wanted, module) for module, wanted in WANTED.items()}
    return {"modules": modules, "flash_attention_reads": fields_read(found[FLASH_ATTENTION])}


def fields_read(tree: ast.Module) -> dict[str, list[str]]:
    """Attributes of each owner that are read, by name or through `getattr`."""
    found: dict[str, set[str]] = {owner: set() for owner in OWNERS}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner, name = ast.unparse(node.value), node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and len(node.args) > 1:
            owner, name = ast.unparse(node.args[0]), ast.unparse(node.args[1]).strip("'")
        else:
            continue
        last = owner.rpartition(".")[2]
        if last in OWNERS:
            found[last].add(name)
    return {owner: sorted(names) for owner, names in found.items()}


def described(tree: ast.Module, wanted: tuple[str, ...], module: str) -> dict[str, Any]:
    """Each wanted name: a function's arguments, a class's methods and attributes, or None for others and imported ones.

    Raises:
        SystemExit: one that the module does not have.
    """
    found: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = described_class(node)
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = arguments(node)
        elif isinstance(node, ast.ImportFrom):
            found |= dict.fromkeys(alias.asname or alias.name for alias in node.names)
        else:
            found |= dict.fromkeys(assigned(node))
    missing = sorted(set(wanted) - set(found))
    if missing:
        raise SystemExit(f"{module} has no {', '.join(missing)}")
    return {name: found[name] for name in wanted}


def described_class(node: ast.ClassDef) -> dict[str, Any]:
    """Methods with their arguments, and attributes: of the class, and those that its methods give `self`."""
    methods = [child for child in node.body if isinstance(child, ast.FunctionDef)]
    attributes = {name for child in node.body for name in assigned(child)}
    own = (
        child.attr
        for method in methods
        for child in ast.walk(method)
        if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store) and ast.unparse(child.value) == "self"
    )
    return {
        "attributes": sorted(attributes | set(own)),
        "methods": {method.name: arguments(method) for method in methods},
    }


def assigned(node: ast.stmt) -> list[str]:
    """Names that a statement gives a value or a type."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def arguments(node: ast.FunctionDef) -> list[str]:
    """Names of a function's arguments, those that may be left out with `=`, stars in front."""
    args = node.args
    plain = [*args.posonlyargs, *args.args]
    optional = {arg.arg for arg in plain[len(plain) - len(args.defaults) :]}
    optional |= {arg.arg for arg, value in zip(args.kwonlyargs, args.kw_defaults, strict=True) if value is not None}
    names = [arg.arg + "=" * (arg.arg in optional) for arg in (*plain, *args.kwonlyargs)]
    stars = [("*", args.vararg), ("**", args.kwarg)]
    return names + [star + arg.arg for star, arg in stars if arg is not None]


if __name__ == "__main__":
    sys.exit(run(__doc__, RECORDED, contract))
