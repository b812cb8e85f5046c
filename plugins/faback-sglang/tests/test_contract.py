"""The plugin's source against names and signatures that were read off SGLang's wheel. Runs without SGLang."""

import ast
import json
import re
from pathlib import Path

import pytest

from faback_sglang.registration import add_draft_backends, names
from faback_sglang.terms import engine_name

HERE = Path(__file__).parent
CONTRACT = json.loads((HERE / "contract.json").read_text())
MODULES = CONTRACT["modules"]
SOURCES = {path.stem: ast.parse(path.read_text()) for path in (HERE.parent / "src/faback_sglang").glob("*.py")}
INFO = MODULES["sglang.srt.model_executor.forward_batch_info"]
MIXIN = MODULES["sglang.srt.model_executor.forward_batch_deepseek_mha_mixin"]["ForwardBatchDeepSeekMHAMixin"]
BASE = MODULES["sglang.srt.layers.attention.base_attn_backend"]["AttentionBackend"]


def read(*owners):
    """Attributes that our sources read off variables of these names, by name or through `getattr`."""
    found = set()
    for tree in SOURCES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in owners:
                found.add(node.attr)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
                owner, name = node.args[:2]
                if ast.unparse(owner) in owners and isinstance(name, ast.Constant):
                    found.add(name.value)
    return found


def test_what_is_imported_is_there():
    """From modules whose names are recorded."""
    found = []
    for tree in SOURCES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang"):
                for alias in node.names:
                    known = {**MODULES.get(node.module, {}), **submodules(node.module)}
                    assert alias.name in known, f"{node.module}.{alias.name}"
                    found.append(alias.name)
    assert len(found) > 15


def submodules(package):
    return {module.rpartition(".")[2]: None for module in MODULES if module.rpartition(".")[0] == package}


def test_fields_of_a_batch():
    from_mixin = set(MIXIN["attributes"])
    fields = set(INFO["ForwardBatch"]["attributes"]) | from_mixin
    used = read("fb", "forward_batch")
    assert len(used) > 15
    assert used <= fields


def test_fields_that_are_refused_exist():
    (refused,) = (
        node.value
        for node in SOURCES["batches"].body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "REFUSED"
    )
    assert set(ast.literal_eval(refused)) <= set(INFO["ForwardBatch"]["attributes"]) | set(MIXIN["attributes"])


def test_fields_of_a_layer():
    used = read("module")
    assert len(used) > 10
    assert used <= set(MODULES["sglang.srt.layers.radix_attention"]["RadixAttention"]["attributes"])


def test_inputs_of_a_verification():
    eagle = MODULES["sglang.srt.speculative.eagle_info"]["EagleVerifyInput"]["attributes"]
    assert {"custom_mask", "draft_token_num"} <= read("info") & set(eagle)
    layout = MODULES["sglang.srt.speculative.ragged_verify"]["RaggedVerifyLayout"]["attributes"]
    assert read("layout") - {"FULL_MASK", "QLEN_ONLY"} <= set(layout)


def methods_of(stem, name):
    (found,) = (node for node in SOURCES[stem].body if isinstance(node, ast.ClassDef) and node.name == name)
    return {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("stem", "name"), [("attending", "Attending"), ("backend", "FabackBackend")])
def test_methods_take_what_the_engine_gives(stem, name):
    """Positional arguments by the same names in the same order."""
    overridden = 0
    for method, node in methods_of(stem, name).items():
        wanted = BASE["methods"].get(method)
        if wanted is None or method == "__init__":
            continue
        mine = [arg.arg for arg in node.args.args]
        assert mine == [arg.rstrip("=") for arg in wanted if not arg.startswith("*")], method
        overridden += 1
    assert overridden >= 3


def test_nothing_is_overridden_under_a_name_that_the_engine_lost():
    """SGLang calls these by name, so that a renamed one would silently never run."""
    called = {"init_forward_metadata", "init_forward_metadata_out_graph", "init_cuda_graph_state", "forward_extend"}
    called |= {"forward_decode", "get_cuda_graph_seq_len_fill_value", "shared_read_ends", "verify_mask"}
    assert called <= set(BASE["methods"])
    mine = {**methods_of("attending", "Attending"), **methods_of("backend", "FabackBackend")}
    assert called <= set(mine)


def test_the_hook_takes_the_factory_s_arguments():
    factory = MODULES["sglang.srt.speculative.draft_utils"]["DraftBackendFactory"]["methods"]["_create_backend"]
    code = add_draft_backends.__code__
    mine = list(code.co_varnames[1 : code.co_argcount])
    assert mine == [argument.rstrip("=") for argument in factory[1:]]


def test_members_of_enumerations():
    modes = set(INFO["ForwardMode"]["attributes"])
    assert read("ForwardMode") and read("ForwardMode") <= modes
    kinds = MODULES["sglang.srt.layers.radix_attention"]["AttentionType"]["attributes"]
    assert read("AttentionType") <= set(kinds)


@pytest.mark.parametrize(
    ("given", "wanted"), [(None, ("faback",)), ("fa3, fa4", ("faback", "fa3", "fa4")), (",", ("faback",))]
)
def test_names_that_are_served(monkeypatch, given, wanted):
    if given is None:
        monkeypatch.delenv("FABACK_SGLANG_AS", raising=False)
    else:
        monkeypatch.setenv("FABACK_SGLANG_AS", given)
    assert names() == wanted


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("batch.verify_lens_cpu", "forward_batch.spec_info.ragged_verify_layout.verify_lens_cpu"),
        ("batch.seq_lens", "forward_batch.seq_lens"),
        ("layer.window", "layer.sliding_window_size"),
        ("q of layer 3", "q of layer 3"),
    ],
)
def test_names_in_errors(ours, theirs):
    assert engine_name(ours) == theirs


@pytest.mark.parametrize("owner", CONTRACT["flash_attention_reads"])
def test_the_readme_s_table_has_every_field_that_flash_attention_reads(owner):
    text = (HERE.parent / "README.md").read_text()
    fields = CONTRACT["flash_attention_reads"][owner]
    assert fields
    assert [name for name in fields if not re.search(rf"[`.]{name}\b", text)] == []
