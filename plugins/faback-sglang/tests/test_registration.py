"""SGLang's own loader, registries and factory find faback."""

import argparse
from importlib import metadata

import pytest

sg = pytest.importorskip("sglang_here", exc_type=ImportError, reason="SGLang's modules are not importable here")

from rounds import STEPS  # noqa: E402
from sglang.srt import plugins  # noqa: E402
from sglang.srt.arg_groups import choices  # noqa: E402
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402
from sglang.srt.speculative.draft_utils import DraftBackendFactory  # noqa: E402
from world import World  # noqa: E402

from faback_sglang import register  # noqa: E402
from faback_sglang.backend import FabackBackend  # noqa: E402
from faback_sglang.multi_step import FabackMultiStepBackend  # noqa: E402

LISTS = [
    choices.ATTENTION_BACKEND_CHOICES,
    choices.DRAFT_ATTENTION_BACKEND_CHOICES,
    choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
    choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
    choices.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS,
]


@pytest.fixture
def loaded(monkeypatch):
    """SGLang's plugins, loaded as a process of its does."""
    if not any(p.name == "faback" for p in metadata.entry_points(group="sglang.srt.plugins")):
        pytest.skip("faback-sglang is not installed, so SGLang's loader cannot find it")
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    monkeypatch.setenv("SGLANG_PLUGINS", "faback")
    plugins.load_plugins()


@pytest.mark.usefixtures("loaded")
def test_the_loader_registers_faback():
    assert all(names.count("faback") == 1 for names in LISTS)
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    options = ["--prefill-attention-backend", "faback", "--speculative-draft-attention-backend", "faback"]
    args = parser.parse_args(["--model-path", "x", "--attention-backend", "faback", *options])
    assert args.attention_backend == args.prefill_attention_backend == "faback"


@pytest.mark.usefixtures("loaded", "served")
def test_the_registry_makes_a_backend():
    assert isinstance(ATTENTION_BACKENDS["faback"](World([{}]).runner), FabackBackend)


@pytest.mark.usefixtures("loaded")
def test_the_draft_factory_makes_both_of_its_backends(topk):
    """It knows its backends by a fixed list, which the hook adds to."""
    runner = World([{}], draft=True).runner
    runner.draft_attention_backend = "faback"
    runner.model_config.hf_config = runner.model_config.hf_text_config = None
    factory = DraftBackendFactory(runner, topk, STEPS)
    drafting = factory.create_decode_backend()
    assert isinstance(drafting, FabackMultiStepBackend)
    assert [step.decode_attention_backend_str for step in drafting.attn_backends] == ["faback"] * (STEPS - 1)
    assert isinstance(factory.create_draft_extend_backend(), FabackBackend)


def test_other_names_are_served_where_asked_for(monkeypatch):
    """For models that SGLang runs with backends of certain names only."""
    monkeypatch.setenv("FABACK_SGLANG_AS", "fa3, fa4")
    monkeypatch.setattr(HookRegistry, "_hooks", {name: list(hooks) for name, hooks in HookRegistry._hooks.items()})
    monkeypatch.setattr(HookRegistry, "register", classmethod(lambda *args: None))
    for name in ("faback", "fa3", "fa4"):
        monkeypatch.setitem(ATTENTION_BACKENDS, name, None)
    register()
    assert ATTENTION_BACKENDS["fa3"] is ATTENTION_BACKENDS["fa4"] is ATTENTION_BACKENDS["faback"] is not None


@pytest.mark.usefixtures("served")
def test_what_the_engine_asks_of_a_backend():
    """Answers that SGLang acts on before any pass."""
    backend = World([{}]).backend()
    modes = sg.ForwardMode
    ends = {mode: backend.shared_read_ends(mode).name for mode in (modes.DECODE, modes.TARGET_VERIFY, modes.EXTEND)}
    assert ends == {modes.DECODE: "POST_REPLAY", modes.TARGET_VERIFY: "POST_REPLAY", modes.EXTEND: "UNKNOWN"}
    assert backend.get_cuda_graph_seq_len_fill_value() == 1
    assert not backend.needs_cpu_seq_lens
    assert not backend.supports_ragged_verify_graph
    assert backend.max_context_len == 88
    assert backend.verify_mask is None


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_inference_reaches_faback(deterministic):
    with sg.get_context().override_server_args(enable_deterministic_inference=deterministic):
        assert World([{}]).backend().setup.config.deterministic == deterministic


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("phase", ["attention_backend", "prefill_attention_backend", "decode_attention_backend"])
def test_a_server_s_arguments_resolve_to_faback(phase):
    """As a server resolves them before it publishes them."""
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(model_path="dummy", **{"attention_backend": "torch_native", phase: "faback"})
    args.resolve_once()
    prefill, decoding = attention_backends_of(resolved_view(args))
    assert (prefill == "faback") == (phase != "decode_attention_backend")
    assert (decoding == "faback") == (phase != "prefill_attention_backend")
