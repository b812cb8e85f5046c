"""Plans whose cost on the host is measured: a batch of each mode, over layers of several kinds."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from faback.core.backend import AttentionBackend
from faback.core.batch import ForwardBatch
from faback.core.config import BackendConfig, SpeculativeConfig
from faback.core.layer import AttentionLayer
from faback.core.multi_step import MultiStepDraft
from faback.core.plan import Plan
from faback.core.pools import Pools
from faback.pools import MHAPool, MLAPool

Tensor = torch.Tensor

REQUESTS = (1, 64, 256)
CONTEXT, PAGE = 512, 16
DRAFTS, TOPK, STEPS = 8, 4, 5
NEW = 4
HEADS, KV_HEADS, DIM = 32, 8, 128


@attrs.frozen(kw_only=True)
class Build:
    """One kind of plan.

    Attributes:
        name: what the report calls it.
        mode: forward mode; "multi_step" is a whole round of `draft_decode`.
        layer: what its layer has besides heads and dims.
        options: of the configuration's plugins.
        topk: branches, where it drafts or verifies.
    """

    name: str
    mode: str
    layer: dict[str, Any] = attrs.field(factory=dict)
    options: dict[str, Any] = attrs.field(factory=dict)
    topk: int = 1

    def make(self, requests: int, kernel: str, device: str = "cuda") -> Made:
        """Pools, a batch and a backend for that many requests.

        Args:
            requests: all of them live, of random lengths.
            kernel: the provider.
            device: where it lies.
        """
        return Made(self, requests, kernel, torch.device(device))


BUILDS = (
    Build(name="decode", mode="decode"),
    Build(name="decode window", mode="decode", layer={"window": 100}),
    Build(name="decode local", mode="decode", layer={"chunk": 128}),
    Build(name="decode prefill-aware", mode="decode", layer={"window": 100}, options={"prefill_aware_swa": {}}),
    Build(name="decode cross", mode="decode", layer={"cross": True}),
    Build(name="decode mla", mode="decode", layer={"latent": True}),
    Build(name="extend", mode="extend"),
    Build(name="extend local", mode="extend", layer={"chunk": 128}),
    Build(name="mixed", mode="mixed"),
    Build(name="draft extend", mode="draft_extend"),
    Build(name="embedding", mode="embedding", layer={"kv_group": "none", "causal": False}),
    Build(name="verify chain", mode="target_verify"),
    Build(name="verify tree", mode="target_verify", topk=TOPK),
    Build(name="draft decode", mode="draft_decode", topk=TOPK),
    Build(name="multi-step draft", mode="multi_step", topk=TOPK),
)


class Made:
    """A backend and a batch of one kind of plan. Nothing has been planned yet."""

    def __init__(self, build: Build, requests: int, kernel: str, device: torch.device) -> None:
        self._build, self._device = build, device
        self._random = torch.Generator(device).manual_seed(requests)
        latent = build.layer.get("latent", False)
        dims: dict[str, Any] = {"num_q_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM}
        if latent:
            dims = {"num_q_heads": 16, "num_kv_heads": 1, "head_dim": 576, "v_head_dim": 512}
        self.layer = AttentionLayer(layer_id=0, **dims, **build.layer)
        table = torch.arange((requests + 1) * CONTEXT, dtype=torch.int32, device=device).view(-1, CONTEXT)
        stored = attrs.evolve(self.layer, kv_group="full")
        pool = MLAPool if latent else MHAPool
        kv = pool(num_pages=table.numel() // PAGE, page_size=PAGE, layers=[stored], device=device)
        if self.layer.cached:
            for buffer in kv.buffers(self.layer):
                buffer.normal_(generator=self._random)
        speculative = SpeculativeConfig(topk=build.topk, num_steps=STEPS, num_draft_tokens=DRAFTS)
        config = BackendConfig(context_len=CONTEXT, kernels=kernel, speculative=speculative, options=build.options)
        kind: Any = MultiStepDraft if build.mode == "multi_step" else AttentionBackend
        self.backend: AttentionBackend | MultiStepDraft = kind(config, Pools(req_to_token=table, kv=kv), [self.layer])
        self.batch = self._batch(requests)
        self.q = self._noise(self.rows, self.layer.num_q_heads, self.layer.head_dim)
        self.k = self._noise(self.rows, self.layer.num_kv_heads, self.layer.head_dim)

    @property
    def rows(self) -> int:
        """Query tokens of one pass."""
        drafting = self._build.mode in ("multi_step", "draft_decode")
        return self.batch.bs * self._build.topk if drafting else self.batch.num_tokens

    def plan(self) -> Plan:
        """An eager plan; the last of several."""
        return _last(self.backend.plan(self.batch))

    def capture(self) -> None:
        """Makes the captured plan that `replay` brings up to date."""
        self.backend.capture(self.batch)

    def replay(self) -> Plan:
        """The captured plan, filled anew from the batch's own tensors."""
        return _last(self.backend.replay(self.batch))

    def answer(self, plan: Plan) -> Tensor:
        """float32 [tokens, heads, v_head_dim]: what a layer answers under a plan; nothing is written."""
        fresh = None if self.layer.cached else self.k
        backend = self.backend.backend if isinstance(self.backend, MultiStepDraft) else self.backend
        found = backend.forward(self.q, fresh, fresh, self.layer, save_kv_cache=False, plan=plan)
        assert isinstance(found, Tensor)
        return found.float()

    def _batch(self, requests: int) -> ForwardBatch:
        build = self._build
        lens = torch.randint(NEW, CONTEXT - DRAFTS, (requests,), device=self._device, generator=self._random)
        rows = torch.arange(1, requests + 1, device=self._device)
        each = {"target_verify": DRAFTS, "draft_decode": build.topk * STEPS, "multi_step": build.topk * STEPS}
        count = each.get(build.mode, 1 if build.mode == "decode" else NEW)
        fields: dict[str, Any] = {}
        if build.mode in ("extend", "mixed", "draft_extend", "embedding"):
            fields["extend_seq_lens"] = torch.full_like(rows, NEW)
            fields["extend_prefix_lens"] = lens - NEW
        if build.mode == "target_verify" and build.topk > 1:
            fields["custom_mask"] = torch.ones(
                requests * DRAFTS * (CONTEXT + DRAFTS), dtype=torch.bool, device=self._device
            )
        if build.layer.get("cross"):
            fields |= {"encoder_lens": lens // 2 + 1, "encoder_out_cache_loc": None}
        return ForwardBatch(
            forward_mode="draft_decode" if build.mode == "multi_step" else build.mode,
            req_pool_indices=rows,
            seq_lens=lens,
            out_cache_loc=torch.arange(requests * count, device=self._device) + CONTEXT,
            draft_step=STEPS - 2 if build.mode in ("draft_decode", "multi_step") else None,
            **fields,
        )

    def _noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=self._device, generator=self._random)


def _last(plan: Plan | tuple[Plan, ...]) -> Plan:
    return plan if isinstance(plan, Plan) else plan[-1]
