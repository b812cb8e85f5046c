"""Every recorded scenario equals its oracle: natively, through lowerings on the poorest kernel, and replayed.

"replayed" captures a plan on a batch of nothing and replays it on the recorded one.
"""

import pytest
import torch

from faback import AttentionBackend, AttentionLayer, BackendConfig, ForwardBatch, Pools, SpeculativeConfig, hookimpl
from faback.builtins import BUILTINS
from faback.core.registry import Registry
from faback.kernels.reference import Reference
from faback.testing import poor
from faback.testing.late import Late, blank
from golden_data import Call, Scenario, scenarios, tolerance

WITH_BATCH = [scenario for scenario in scenarios() if scenario.forward_mode is not None]
PER_REQUEST = ("seq_lens", "extend_seq_lens", "extend_seq_lens_cpu", "seq_lens_cpu", "encoder_lens")


class LatePlugin:
    @hookimpl
    def faback_kernels(self):
        return [Late(Reference())]


class RecordedPool:
    """The recorded storage of each layer, as a KVPool."""

    def __init__(self, scenario: Scenario, layers: dict[Call, AttentionLayer]) -> None:
        self.page_size = scenario.cfg["page_size"]
        self._dtype = torch.float8_e4m3fn if scenario.cfg["kv_dtype"] == "fp8_e4m3" else torch.float32
        self._map = torch.from_numpy(scenario.arrays["full_to_swa"]) if "full_to_swa" in scenario.arrays else None
        self._buffers = {}
        for call, layer in layers.items():
            arrays = scenario.of(call)
            if layer.latent:
                k = self._stored(arrays["kvpool"])
                self._buffers[layer.layer_id] = k, k[..., : layer.v_head_dim]
            else:
                self._buffers[layer.layer_id] = self._stored(arrays["kpool"]), self._stored(arrays["vpool"])
        self.num_slots = k.shape[0] if layer.latent else self._buffers[layer.layer_id][0].shape[0]

    def _stored(self, array):
        return torch.from_numpy(array).float().to(self._dtype)

    def buffers(self, layer):
        return self._buffers[layer.layer_id]

    def dtype(self, kind):
        return self._dtype

    def slot_map(self, group):
        return self._map if group == "window" else None


def describe(scenario: Scenario, call: Call) -> AttentionLayer:
    cfg, arrays = scenario.cfg, scenario.of(call)
    windowed = call.kind in ("swa", "local")
    return AttentionLayer(
        layer_id=call.layer,
        num_q_heads=cfg["heads"],
        num_kv_heads=1 if cfg["mla"] else cfg["kv_heads"],
        head_dim=arrays["q"].shape[-1],
        v_head_dim=cfg["vdim"],
        softcap=cfg["softcap"],
        window=cfg["window"] if call.kind == "swa" else None,
        chunk=cfg["chunk"] if call.kind == "local" else None,
        cross=call.kind == "cross",
        causal=call.kind != "enc_only",
        sinks=cfg["sinks"],
        latent=cfg["mla"],
        k_scale=cfg["k_scale"],
        v_scale=cfg["k_scale"] and cfg["k_scale"] / 2,
        kv_group="window" if windowed and cfg["hybrid"] else "full",
    )


def describe_batch(scenario: Scenario, tokens: int) -> ForwardBatch:
    cfg = scenario.cfg
    fields = {k.removeprefix("fb."): torch.from_numpy(a) for k, a in scenario.arrays.items() if k.startswith("fb.")}
    rows = fields["req_pool_indices"].shape[0]
    known = {"req_pool_indices", "out_cache_loc", "custom_mask", *PER_REQUEST} & fields.keys()
    batch = {name: fields[name] for name in known}
    if "ragged_verify_lens" in fields:
        batch["verify_lens"] = fields["ragged_verify_lens"]
    for name in {"verify_lens", *PER_REQUEST} & batch.keys():
        batch[name] = torch.nn.functional.pad(batch[name], (0, rows - batch[name].shape[0]))
    mode = scenario.forward_mode
    if cfg["embedding"]:
        mode = "embedding"
        del batch["out_cache_loc"]
    if mode == "draft_extend":
        batch["token_stride"] = tokens // rows
    if mode == "draft_decode":
        slots = fields["out_cache_loc"].view(-1, cfg["num_steps"])[: fields["step_loc"].shape[0]]
        (batch["draft_step"],) = (s for s in range(cfg["num_steps"]) if torch.equal(slots[:, s], fields["step_loc"]))
    return ForwardBatch(forward_mode=mode, num_tokens=tokens, **batch)


def configure(scenario: Scenario, kernel: str) -> BackendConfig:
    cfg = scenario.cfg
    speculative = None
    if cfg["topk"]:
        sizes = {"num_steps": cfg["num_steps"] or 1, "num_draft_tokens": cfg["ndt"] or 1}
        speculative = SpeculativeConfig(topk=cfg["topk"], **sizes)
    options = {"prefill_aware_swa": {"inclusive": cfg["pa_inclusive"]}} if cfg["pa_swa"] else {}
    return BackendConfig(
        context_len=cfg["context_len"], dtype=torch.float32, kernels=kernel, speculative=speculative, options=options
    )


def make_backend(scenario: Scenario, kernel: str, layers: dict[Call, AttentionLayer]) -> AttentionBackend:
    config = configure(scenario, kernel)
    registry = Registry.load(config, BUILTINS, entry_points=[])
    registry.register(poor, "poor")
    registry.register(LatePlugin(), "late")
    pools = Pools(req_to_token=torch.from_numpy(scenario.arrays["req_to_token"]), kv=RecordedPool(scenario, layers))
    return AttentionBackend(config, pools, layers.values(), registry=registry)


def remember_prompts(scenario: Scenario, backend: AttentionBackend) -> None:
    """Prompts were extended before the recorded pass: the lengths are all that it left behind."""
    rows, lens = (torch.from_numpy(scenario.arrays[name]) for name in ("req_rows", "req_prefill"))
    none = torch.zeros(0, dtype=torch.int64)
    fields = {"req_pool_indices": rows, "seq_lens": lens, "extend_seq_lens": torch.zeros_like(lens)}
    backend.plan(ForwardBatch(forward_mode="extend", out_cache_loc=none, **fields))


@pytest.mark.parametrize("kernel", ["reference", "poor", "replayed"])
@pytest.mark.parametrize("scenario", WITH_BATCH, ids=lambda scenario: scenario.name)
def test_scenario_equals_its_oracle(scenario: Scenario, kernel: str):
    calls = scenario.reproducible_calls()
    layers = {call: describe(scenario, call) for call in calls}
    backend = make_backend(scenario, "late reference" if kernel == "replayed" else kernel, layers)
    batch = describe_batch(scenario, scenario.of(calls[0])["q"].shape[0])
    if scenario.cfg["pa_swa"] and scenario.forward_mode == "decode":
        remember_prompts(scenario, backend)
    if kernel == "replayed":
        backend.capture(blank(batch, backend.config))
        backend.replay(batch)
    else:
        backend.plan(batch)
    sinks = torch.from_numpy(scenario.arrays["sinks"]) if scenario.cfg["sinks"] else None
    for call, layer in layers.items():
        arrays = {key: torch.from_numpy(array).float() for key, array in scenario.of(call).items()}
        q = arrays["q"]
        if scenario.cfg["kv_dtype"] == "fp8_e4m3" and scenario.cfg["ver"] == 3 and layer.head_dim <= 256:
            q = q.to(
                torch.float8_e4m3fn
            ).float()  # the recorded kernel wants q in the cache's dtype; ours keep it whole
        rope = {"k_rope": arrays["v"]} if layer.latent else {}
        out = backend.forward(q, arrays.get("k"), None if rope else arrays.get("v"), layer, sinks=sinks, **rope)
        expected = arrays["oracle"]
        torch.testing.assert_close(out[: expected.shape[0]], expected, atol=tolerance(), rtol=0)


def raw_layer(heads: int, dim: int) -> AttentionLayer:
    sizes = {"num_q_heads": heads, "num_kv_heads": heads, "head_dim": dim}
    return AttentionLayer(layer_id=0, kv_group="none", **sizes)


@pytest.mark.parametrize("kernel", ["reference", "poor"])
@pytest.mark.parametrize("scenario", [s for s in scenarios() if s.forward_mode is None], ids=lambda s: s.name)
def test_unabsorbed_mla_equals_its_oracle(scenario: Scenario, kernel: str):
    """Calls against keys that come along: the new tokens, chunks of the prefix, or both at once."""
    rows = torch.from_numpy(scenario.arrays["req_rows"])
    lens = torch.from_numpy(scenario.arrays["req_len"])
    first = scenario.of(scenario.calls[0])
    layer = raw_layer(*first["q"].shape[1:])
    suffix = next((scenario.of(call)["cu_seqlens_k"] for call in scenario.calls if call.tag == "suffix"), [0, 5, 8])
    new = torch.as_tensor(suffix).diff()
    config = BackendConfig(context_len=64, dtype=torch.float32, kernels=kernel)
    registry = Registry.load(config, BUILTINS, entry_points=[])
    registry.register(poor, "poor")
    table = torch.from_numpy(scenario.arrays["req_to_token"])
    pools = Pools(req_to_token=table, kv=RecordedPoolOfNothing())
    backend = AttentionBackend(config, pools, [layer], registry=registry)
    common = {"req_pool_indices": rows, "seq_lens": lens, "extend_seq_lens": new, "num_tokens": int(new.sum())}
    starts = torch.zeros_like(lens)
    for call in scenario.calls:
        arrays = {key: torch.from_numpy(array) for key, array in scenario.of(call).items()}
        keys = arrays["cu_seqlens_k"].long().diff()
        mode = {"suffix": "embedding", "one_shot": "one_shot"}.get(call.tag, "prefix_chunk")
        extras = {"chunk_lens": keys, "chunk_starts": starts.clone()} if mode == "prefix_chunk" else {}
        backend.plan(ForwardBatch(forward_mode=mode, extras=extras, **common))
        q, k, v = (arrays[name].float() for name in "qkv")
        out, lse = backend.forward(q, k, v, layer, return_lse=True)
        torch.testing.assert_close(out, arrays["oracle"], atol=tolerance(), rtol=0)
        torch.testing.assert_close(lse, arrays["oracle_lse"], atol=tolerance(), rtol=0)
        starts += keys if mode == "prefix_chunk" else 0


class RecordedPoolOfNothing:
    """What layers without a cache need of a pool."""

    page_size, num_slots = 1, 0

    def buffers(self, layer):
        raise AssertionError("a layer without a cache has no buffers")

    def dtype(self, kind):
        raise AssertionError("a layer without a cache has no storage dtype")

    def slot_map(self, group):
        raise AssertionError("a layer without a cache has no slots")
