"""All steps of a draft from one build: the same numbers as step by step, and no more launches than for one."""

import collections

import attrs
import pytest
import torch

from faback import (
    AttentionBackend,
    BackendConfig,
    BatchError,
    ConfigError,
    MultiStepDraft,
    SpeculativeConfig,
    hookimpl,
)
from faback.builtins import BUILTINS
from faback.core.registry import Registry
from faback.kernels.torch_ops import TorchOps
from faback.testing import Scenario, run_scenario
from faback.testing.poor import Poor

OVERLAYS = ("full", "window", "local", "cross", "mla")
FILLS = (
    "lens", "offsets", "step_lens", "row_lens", "tree", "branch_positions", "sum", "positions",
    "page_table", "slot_table", "virtual_batches", "query_rows", "compact", "translate",
)  # fmt: skip


class Counting(TorchOps):
    """Counts its own fills."""

    def __init__(self):
        self.counts = collections.Counter()

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if name not in FILLS:
            return found

        def counted(*args, **kwargs):
            self.counts[name] += 1
            return found(*args, **kwargs)

        return self.__dict__.setdefault(f"counted_{name}", counted)


class Plugin:
    def __init__(self, ops=None):
        self._ops = ops

    @hookimpl
    def faback_kernels(self):
        return [Poor()]

    @hookimpl
    def faback_device_ops(self):
        return self._ops


def registry(config, ops=None):
    loaded = Registry.load(config, BUILTINS, entry_points=[])
    loaded.register(Plugin(ops), "test")
    return loaded


class AllSteps:
    """A `MultiStepDraft` that answers as the backend of the batch's own step."""

    def __init__(self, config, pools, layers):
        steps = config.speculative.num_steps
        self.draft = MultiStepDraft(config, pools, layers, steps, registry=registry(config))

    def plan(self, batch):
        self.step = batch.draft_step
        self.draft.plan(batch)

    def forward(self, q, k, v, layer, **options):
        return self.draft.forward(self.step, q, k, v, layer, **options)


@pytest.mark.parametrize("kernel", ["reference", "poor"])
@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_step_equals_the_oracle(overlay, topk, page, kernel):
    def make(config, pools, layers):
        return AllSteps(attrs.evolve(config, kernels=kernel), pools, layers)

    for step in range(3):
        hybrid = overlay == "window" and step != 1
        options = {"mode": "draft_decode", "draft_step": step, "overlay": overlay, "hybrid": hybrid}
        scenario = Scenario.make(topk=topk, page_size=page, sinks=True, padded_rows=step, seed=step, **options)
        for result in run_scenario(scenario, make):
            assert result.status == "equal", str(result)


def whole_round(scenario, plan, forward):
    """Every step of a round in order, with the same new numbers each time; what came out, and the pool after it."""
    generator = torch.Generator().manual_seed(5)
    batch, found = scenario.steps[0].batch, []
    plan(batch)
    for step in range(scenario.config.speculative.num_steps - 1):
        for call in scenario.steps[0].calls:
            q, k, v = (torch.randn(x.shape, generator=generator) for x in (call.q, call.k, call.v))
            found.append(forward(step, q, k, v, call.layer))
    return found


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("topk", [1, 3])
def test_a_round_equals_the_backend_step_by_step(topk, page):
    """Full and sliding layers, a hybrid pool: outputs and every bit of the pool."""
    options = {"mode": "draft_decode", "draft_step": 3, "num_steps": 4, "overlay": "window", "hybrid": True}
    scenario = Scenario.make(topk=topk, page_size=page, batch_size=3, seed=2, evict=False, **options)
    one, other = scenario.pools(), scenario.pools()
    backend = AttentionBackend(scenario.config, one, scenario.layers, registry=registry(scenario.config))

    def forward(step, *tensors):
        backend.plan(attrs.evolve(scenario.steps[0].batch, draft_step=step))
        return backend.forward(*tensors)

    wanted = whole_round(scenario, lambda batch: None, forward)
    draft = MultiStepDraft(scenario.config, other, scenario.layers, registry=registry(scenario.config))
    got = whole_round(scenario, draft.plan, draft.forward)
    assert len(got) == 3 * len(scenario.layers)
    assert all(bool(torch.isfinite(out).all()) for out in got)
    for mine, others in zip(got, wanted, strict=True):
        assert torch.equal(mine, others)
    for layer in scenario.layers:
        for mine, others in zip(one.kv.buffers(layer), other.kv.buffers(layer), strict=True):
            assert torch.equal(mine.contiguous().view(torch.int32), others.contiguous().view(torch.int32))


@pytest.mark.parametrize("overlay", [*OVERLAYS, "prefill_aware"])
@pytest.mark.parametrize("topk", [1, 3])
def test_more_steps_launch_no_more_fills(topk, overlay):
    launched = []
    for steps in (2, 3, 9):
        scenario = Scenario.make(mode="draft_decode", draft_step=0, num_steps=steps, topk=topk, overlay=overlay)
        config, ops = attrs.evolve(scenario.config, kernels="reference"), Counting()
        draft = MultiStepDraft(config, scenario.pools(), scenario.layers, registry=registry(config, ops))
        assert len(draft.plan(scenario.steps[-1].batch)) == draft.num_steps == steps - 1
        launched.append(dict(ops.counts))
    assert launched[0] and launched[0] == launched[1] == launched[2]


@pytest.mark.parametrize("topk", [1, 3])
def test_the_batch_stays_what_it_is(topk):
    options = {"mode": "draft_decode", "draft_step": 0, "topk": topk, "overlay": "window"}
    scenario = Scenario.make(index_dtype=torch.int32, page_size=4, **options)
    batch = scenario.steps[0].batch
    tensors = {n: v for n, v in attrs.asdict(batch, recurse=False).items() if isinstance(v, torch.Tensor)}
    before = {name: value.clone() for name, value in tensors.items()}
    assert batch.seq_lens.dtype == torch.int32
    draft = MultiStepDraft(scenario.config, scenario.pools(), scenario.layers, registry=registry(scenario.config))
    whole_round(scenario, draft.plan, draft.forward)
    draft.plan(batch)
    for name, value in tensors.items():
        assert value.dtype == before[name].dtype and torch.equal(value, before[name]), name


@pytest.fixture
def scenario():
    return Scenario.make(mode="draft_decode", draft_step=0)


def test_speculation_must_be_configured(scenario):
    with pytest.raises(ConfigError, match="SpeculativeConfig"):
        MultiStepDraft(BackendConfig(context_len=9, dtype=torch.float32), scenario.pools(), scenario.layers)


@pytest.mark.parametrize("steps", [-1, 4])
def test_no_more_steps_than_configured(scenario, steps):
    with pytest.raises(ConfigError, match="0 to 3"):
        MultiStepDraft(scenario.config, scenario.pools(), scenario.layers, steps)


@pytest.mark.parametrize("step", [-1, 2, 7])
def test_a_step_must_be_planned(scenario, step):
    draft = MultiStepDraft(scenario.config, scenario.pools(), scenario.layers)
    call = scenario.steps[0].calls[0]
    with pytest.raises(BatchError, match="0 planned steps"):
        draft.forward(0, call.q, call.k, call.v, call.layer)
    draft.plan(scenario.steps[0].batch)
    with pytest.raises(BatchError, match="2 planned steps"):
        draft.forward(step, call.q, call.k, call.v, call.layer)


def test_a_plan_that_fails_leaves_none_behind(scenario):
    draft = MultiStepDraft(scenario.config, scenario.pools(), scenario.layers)
    batch, call = scenario.steps[0].batch, scenario.steps[0].calls[0]
    draft.plan(batch)
    with pytest.raises(BatchError, match="out_cache_loc"):
        draft.plan(attrs.evolve(batch, out_cache_loc=batch.out_cache_loc[:-1]))
    with pytest.raises(BatchError, match="0 planned steps"):
        draft.forward(0, call.q, call.k, call.v, call.layer)


def test_a_round_of_one_step_plans_nothing():
    scenario = Scenario.make(mode="draft_decode", draft_step=0, num_steps=1)
    draft = MultiStepDraft(scenario.config, scenario.pools(), scenario.layers)
    assert draft.num_steps == 0
    assert draft.plan(scenario.steps[0].batch) == ()


def test_branches_are_as_many_as_configured(scenario):
    sizes = SpeculativeConfig(topk=2, num_steps=3, num_draft_tokens=4)
    draft = MultiStepDraft(attrs.evolve(scenario.config, speculative=sizes), scenario.pools(), scenario.layers)
    with pytest.raises(BatchError, match="branches"):
        draft.plan(scenario.steps[0].batch)
