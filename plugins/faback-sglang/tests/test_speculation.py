"""Drafting, verification and draft extend, as SGLang's workers call them, against plain torch over the true tokens."""

import pytest
import torch

sg = pytest.importorskip("sglang_here", exc_type=ImportError, reason="SGLang's modules are not importable here")

from rounds import DRAFTS, STEPS, drafting, steps, verification, verify_input  # noqa: E402
from world import Query, Token, World, batch, causal, decode, extend, index  # noqa: E402

from faback import BatchError  # noqa: E402
from faback_sglang.multi_step import FabackMultiStepBackend  # noqa: E402

LAYERS = [{}, {"sliding_window_size": 4}, {"logit_cap": 2.0}]


def prefilled(world, lengths, encoders=()):
    backend = world.backend()
    texts = [world.text(encoder=e) for e in encoders] or [world.text() for _ in lengths]
    extend(world, backend, texts, lengths)
    return backend, texts


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_round(topk, page_size, hybrid):
    """Drafting, verification, acceptance, draft extend, and decoding goes on."""
    world = World(LAYERS, page_size, hybrid, draft=True)
    backend, texts = prefilled(world, [9, 3])
    drafts = FabackMultiStepBackend(world.runner, topk, STEPS)
    fb, branches = drafting(world, texts, topk)
    drafts.init_forward_metadata(fb)
    steps(world, drafts, fb, branches, topk)

    fb, queries = verification(world, texts, topk)
    backend.init_forward_metadata(fb)
    world.attend(backend, fb, queries)

    # SGLang's draft extend has a window of as many tokens for every request.
    slots = [slot for text in texts for slot in world.grow(text, DRAFTS)]
    lens = [len(text.tokens) for text in texts]
    fb = batch(
        sg.ForwardMode.DRAFT_EXTEND_V2, texts, lens, slots, extend_seq_lens=index([DRAFTS] * 2),
        extend_seq_lens_cpu=[DRAFTS] * 2, spec_info=sg.EagleDraftExtendInput(num_tokens_per_req=DRAFTS),
    )  # fmt: skip
    backend.init_forward_metadata(fb)
    world.attend(backend, fb, [query for text in texts for query in causal(text, DRAFTS)])
    decode(world, backend, texts)


def test_rounds_with_an_encoder(topk):
    """Cross layers see the encoder, never the tree."""
    world = World([{}, {"is_cross_attention": True}], 4)
    backend, texts = prefilled(world, [5, 2], encoders=[3, 6])
    drafts = FabackMultiStepBackend(world.runner, topk, STEPS)
    fb, branches = drafting(world, texts, topk)
    drafts.init_forward_metadata(fb)
    steps(world, drafts, fb, branches, topk)
    fb, queries = verification(world, texts, topk)
    backend.init_forward_metadata(fb)
    world.attend(backend, fb, queries)


def test_a_verification_of_fewer_tokens_than_configured(topk):
    """Adaptive speculation verifies the root alone where it does not draft."""
    world = World(LAYERS, 4)
    backend, texts = prefilled(world, [6, 3])
    for width in (1, 3):
        fb, queries = verification(world, texts, topk, width)
        backend.init_forward_metadata(fb)
        world.attend(backend, fb, queries)


@pytest.mark.parametrize("topk", [1], indirect=True)
@pytest.mark.parametrize("on_host", [True, False])
def test_ragged_verification(topk, on_host):
    world = World(LAYERS, 4)
    backend, texts = prefilled(world, [6, 3, 4])
    widths = [3, 1, 5]
    slots, queries = [], []
    for text, width in zip(texts, widths, strict=True):
        slots += world.reserve(text, width)
        tokens = [Token(len(text.tokens) + i) for i in range(width)]
        queries += [Query(tokens[i], (*text.tokens, *tokens[: i + 1])) for i in range(width)]
    lens = index(widths)
    starts = lens.cumsum(0)
    info = verify_input(None, 1)
    info.ragged_verify_layout = sg.RaggedVerifyLayout(
        verify_lens=lens, graph_num_tokens=sum(widths), extend_start_loc=starts - lens,
        qo_indptr_device=torch.cat([index([0]), starts]), verify_lens_cpu=widths if on_host else None,
        total_verify_tokens=sum(widths) if on_host else None,
    )  # fmt: skip
    fb = batch(sg.ForwardMode.TARGET_VERIFY, texts, [len(t.tokens) for t in texts], slots, spec_info=info)
    backend.init_forward_metadata(fb)
    world.attend(backend, fb, queries)


def test_a_step_on_an_idle_rank_needs_no_plan(topk):
    world = World([{}])
    drafts = FabackMultiStepBackend(world.runner, topk, STEPS)
    fb = batch(sg.ForwardMode.IDLE, [], [], [])
    drafts.attn_backends[0].init_forward_metadata(fb)
    with sg.forward_context(sg.ForwardContext(attn_backend=drafts.attn_backends[0]), forward_batch=fb):
        assert world.model[0].attn(torch.zeros(0, 64), None, None, fb).shape == (0, 64)


def test_one_step_does_not_plan_alone(topk):
    world = World([{}])
    drafts = FabackMultiStepBackend(world.runner, topk, STEPS)
    fb, _ = drafting(world, [world.text(3)], topk)
    with pytest.raises(BatchError, match="multi-step backend"):
        drafts.attn_backends[0].init_forward_metadata(fb)
