"""Captured passes as SGLang's graph runners make them: over their own buffers, padded to a captured size.

What stands in for the graph is faback's own: kernels that read lengths when they run. A replay then runs the captured
batch, as a CUDA graph does, after the runner has filled its buffers and handed over its view of the live batch.
"""

from types import SimpleNamespace

import pytest
import torch

sg = pytest.importorskip("sglang_here", exc_type=ImportError, reason="SGLang's modules are not importable here")

from rounds import DRAFTS, STEPS, drafting, verification, verify_input  # noqa: E402
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import build_replay_fb_view  # noqa: E402
from world import Query, World, batch, causal, extend, index  # noqa: E402

from faback import BackendConfig, BatchError, CapacityError, hookimpl  # noqa: E402
from faback.builtins import BUILTINS  # noqa: E402
from faback.core.registry import Registry  # noqa: E402
from faback.kernels.reference import Reference  # noqa: E402
from faback.testing.host_reads import HostReads  # noqa: E402
from faback.testing.late import Late  # noqa: E402
from faback_sglang.multi_step import FabackMultiStepBackend  # noqa: E402

LAYERS = [{}, {"sliding_window_size": 4}, {"sinks": True}]
MOST = 4
SIZES = (4, 2)


class LateKernel:
    @hookimpl
    def faback_kernels(self):
        return [Late(Reference())]


@pytest.fixture(autouse=True)
def late(monkeypatch):
    monkeypatch.setenv("FABACK_SGLANG_KERNELS", "late reference")


def registry():
    found = Registry.load(BackendConfig(context_len=8), BUILTINS, entry_points=[])
    found.register(LateKernel(), "late kernels")
    return found


class Runner:
    """The buffers of SGLang's decode graph runner, and what it does with them.

    Args:
        backend: whose passes are captured.
        mode: of the captured passes.
        width: tokens of each request.
        spec: makes the input of speculation of a captured pass.
    """

    def __init__(self, backend, mode, width=1, spec=lambda size: None, slots=None):
        self.backend, self.mode, self.width, self.slots = backend, mode, width, slots or width
        self.req_pool_indices = torch.zeros(MOST, dtype=torch.int64)
        self.seq_lens = torch.ones(MOST, dtype=torch.int64)
        self.seq_lens_cpu = torch.ones(MOST, dtype=torch.int64)
        self.out_cache_loc = torch.zeros(MOST * self.slots, dtype=torch.int64)
        self.input_ids = self.positions = torch.zeros(MOST * width, dtype=torch.int64)
        self.extend_seq_lens = torch.full((MOST,), width)
        self.encoder_lens = self.mamba_track_indices = None
        backend.init_cuda_graph_state(MOST, MOST * width)
        self.captured = {}
        for size in SIZES:
            fb = self.captured[size] = sg.ForwardBatch(
                forward_mode=mode, batch_size=size, input_ids=self.input_ids[: size * width], seq_lens_sum=size,
                req_pool_indices=self.req_pool_indices[:size], seq_lens=self.seq_lens[:size], spec_info=spec(size),
                seq_lens_cpu=self.seq_lens_cpu[:size], out_cache_loc=self.out_cache_loc[: size * self.slots],
                extend_seq_lens=self.extend_seq_lens[:size] if mode.is_draft_extend_v2() else None,
            )  # fmt: skip
            with HostReads([self.req_pool_indices, self.seq_lens, self.out_cache_loc, self.extend_seq_lens]):
                backend.init_forward_metadata_out_graph(fb, in_capture=True)
                backend.init_forward_metadata_in_graph(fb)

    def fill(self, fb):
        """Copies a live batch into the buffers; the size that it is padded to."""
        size = min(size for size in SIZES if size >= fb.batch_size)
        self.req_pool_indices.zero_()
        self.seq_lens.fill_(self.fill_value)
        self.seq_lens_cpu.fill_(self.fill_value)
        self.out_cache_loc.zero_()
        self.extend_seq_lens.fill_(self.width)
        for name in ("req_pool_indices", "seq_lens", "seq_lens_cpu", "out_cache_loc"):
            getattr(self, name)[: len(getattr(fb, name))] = getattr(fb, name)
        return size

    @property
    def fill_value(self):
        steps = getattr(self.backend, "attn_backends", [self.backend])
        return steps[0].get_cuda_graph_seq_len_fill_value()

    def replay(self, fb):
        """As before `graph.replay()`; the batch that the graph was captured with."""
        size = self.fill(fb)
        view = build_replay_fb_view(
            fb, self, size, fb.batch_size, size * self.width, None, self.fill_value, self.mode, False
        )
        self.backend.init_forward_metadata_out_graph(view)
        return self.captured[size]


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
def test_decode(page_size, hybrid):
    world = World(LAYERS, page_size, hybrid)
    backend = world.backend(registry=registry())
    runner = Runner(backend, sg.ForwardMode.DECODE)
    texts = [world.text() for _ in range(3)]
    extend(world, backend, texts, [6, 1, 9])
    for chosen in (texts, texts[:2], texts[2:], texts):
        slots = [slot for text in chosen for slot in world.grow(text, 1)]
        fb = batch(sg.ForwardMode.DECODE, chosen, [len(text.tokens) for text in chosen], slots)
        captured = runner.replay(fb)
        queries = [query for text in chosen for query in causal(text, 1)]
        world.attend(backend, captured, queries, padding=captured.batch_size - len(chosen))


def test_verification(topk):
    """Trees come in the tensor that SGLang's kernel writes, or in one of their own, which is copied."""
    world = World(LAYERS, 4)
    backend = world.backend(registry=registry())
    runner = Runner(
        backend,
        sg.ForwardMode.TARGET_VERIFY,
        DRAFTS,
        spec=lambda size: verify_input(torch.ones(size * DRAFTS * 60, dtype=torch.bool), topk),
    )
    texts = [world.text() for _ in range(3)]
    extend(world, backend, texts, [6, 2, 9])
    for number, chosen in enumerate((texts, texts[1:], texts[:2])):
        fb, queries = verification(world, chosen, topk)
        mask = backend.verify_mask
        assert mask.is_read == (topk > 1)
        if topk > 1 and number != 1:
            mask.buffer[: fb.spec_info.custom_mask.shape[0]] = fb.spec_info.custom_mask
            fb.spec_info.custom_mask = mask.buffer
        captured = runner.replay(fb)
        world.attend(backend, captured, queries, padding=captured.batch_size * DRAFTS - len(queries))


def test_drafting(topk):
    """All steps of a round in one graph. The runner's view has the live slots where the batch is not padded."""
    world = World(LAYERS, 4, draft=True)
    backend = world.backend(registry=registry())
    drafts = FabackMultiStepBackend(world.runner, topk, STEPS, registry=registry())
    spec = sg.EagleDraftInput()
    runner = Runner(drafts, sg.ForwardMode.DECODE, topk, spec=lambda size: spec, slots=topk * STEPS)
    texts = [world.text() for _ in range(3)]
    extend(world, backend, texts, [6, 2, 9])
    for chosen in (texts, texts[1:], texts[:2]):
        fb, branches = drafting(world, chosen, topk)
        size = runner.fill(fb)
        captured, padded = runner.captured[size], size != fb.batch_size
        live = vars(captured) | ({} if padded else {"out_cache_loc": fb.out_cache_loc})
        drafts.init_forward_metadata_out_graph(SimpleNamespace(**live, num_padding=size - fb.batch_size))
        for step in range(STEPS - 1):
            queries = [Query(tokens[step], (*text.tokens, *tokens[: step + 1])) for text, tokens in branches]
            world.attend(drafts.attn_backends[step], captured, queries, padding=size * topk - len(queries))


def test_draft_extend(topk):
    """The runner's view has whole buffers, the slots of the unpadded batch, and lengths in the input of speculation."""
    world = World(LAYERS, 4, draft=True)
    backend = world.backend(registry=registry())
    spec = sg.EagleDraftExtendInput(num_tokens_per_req=DRAFTS)
    runner = Runner(backend, sg.ForwardMode.DRAFT_EXTEND_V2, DRAFTS, spec=lambda size: spec)
    texts = [world.text() for _ in range(3)]
    extend(world, backend, texts, [6, 2, 9])
    for chosen in (texts, texts[1:], texts[:1]):
        slots = [slot for text in chosen for slot in world.grow(text, DRAFTS)]
        fb = batch(sg.ForwardMode.DRAFT_EXTEND_V2, chosen, [len(text.tokens) for text in chosen], slots)
        size = runner.fill(fb)
        spec.extend_seq_lens_tensor = runner.extend_seq_lens[:size]
        view = SimpleNamespace(
            batch_size=size, forward_mode=sg.ForwardMode.DRAFT_EXTEND_V2, req_pool_indices=runner.req_pool_indices,
            seq_lens=runner.seq_lens, seq_lens_cpu=runner.seq_lens_cpu, encoder_lens=None, spec_info=spec,
            out_cache_loc=runner.out_cache_loc[: len(slots)],
        )  # fmt: skip
        backend.init_forward_metadata_out_graph(view)
        queries = [query for text in chosen for query in causal(text, DRAFTS)]
        world.attend(backend, runner.captured[size], queries, padding=size * DRAFTS - len(queries))


@pytest.mark.usefixtures("served")
def test_a_second_graph_of_a_size_shares_its_plan():
    """SGLang records a size once with LoRA and once without."""
    world = World([{}])
    backend = world.backend(registry=registry())
    runner = Runner(backend, sg.ForwardMode.DECODE)
    plans = []
    for _ in range(2):
        backend.init_forward_metadata_out_graph(runner.captured[2], in_capture=True)
        plans.append(backend.forward_metadata.plan)
    assert plans[0] is plans[1]


@pytest.mark.usefixtures("served")
def test_sizes_that_were_not_captured():
    world = World([{}])
    backend = world.backend(registry=registry())
    runner = Runner(backend, sg.ForwardMode.DECODE)
    texts = [world.text(1) for _ in range(3)]
    fb = batch(sg.ForwardMode.DECODE, texts, [1, 1, 1], [text.slots[0] for text in texts])
    with pytest.raises(BatchError, match=r"forward_batch.batch_size: wanted a captured size .*\[2, 4\], got 3"):
        backend.init_forward_metadata_out_graph(fb)
    larger = [world.text(1) for _ in range(MOST + 1)]
    fb = batch(sg.ForwardMode.DECODE, larger, [1] * 5, [text.slots[0] for text in larger])
    backend.init_forward_metadata_out_graph(fb, in_capture=True)  # a decode needs no metadata of its own
    runner.seq_lens_cpu[:] = 97
    view = build_replay_fb_view(fb, runner, 4, 4, 4, None, 1, sg.ForwardMode.DECODE, False)
    with pytest.raises(BatchError, match="forward_batch.seq_lens: wanted at most 96, as captured, got 97"):
        backend.init_forward_metadata_out_graph(view)


@pytest.mark.usefixtures("served")
def test_whole_prefills_are_not_captured():
    world = World([{}])
    backend = world.backend(registry=registry())
    text = world.text(3)
    fb = batch(sg.ForwardMode.EXTEND, [text], [3], text.slots, extend_seq_lens=index([3]))
    with pytest.raises(BatchError, match="forward_batch.forward_mode.*cuda-graph-backend-prefill"):
        backend.init_forward_metadata_out_graph(fb, in_capture=True)


def test_what_was_not_reserved(topk):
    """Memory does not grow behind graphs that point into it."""
    world = World([{}], draft=True)
    backend = world.backend(registry=registry())
    backend.init_cuda_graph_state(2, 2 * DRAFTS)
    texts = [world.text(1) for _ in range(5)]
    fb = batch(
        sg.ForwardMode.DRAFT_EXTEND_V2, texts, [1] * 5, [0] * 5 * DRAFTS, extend_seq_lens=index([1] * 5),
        spec_info=sg.EagleDraftExtendInput(num_tokens_per_req=DRAFTS),
    )  # fmt: skip
    with pytest.raises(CapacityError, match="reserve"):
        backend.init_forward_metadata_out_graph(fb, in_capture=True)
