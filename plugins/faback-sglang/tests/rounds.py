"""A round of speculation as SGLang's workers bring it: drafting, then verification."""

import sglang_here as sg
import torch
from world import Query, Token, batch, index

STEPS, DRAFTS = 3, 5


def drafting(world, texts, topk):
    """SGLang's batch of a round of drafting, and each branch's future tokens."""
    branches, slots = [], []
    for text in texts:
        length = len(text.tokens)
        if topk == 1:
            rows = [world.reserve(text, STEPS)]
        else:
            rows = [(world.page() + world.page() + world.page())[:STEPS] for _ in range(topk)]
        slots += [slot for row in rows for slot in row]
        branches += [(text, [Token(length + s) for s in range(STEPS)]) for _ in rows]
    lens = [len(text.tokens) for text in texts]
    fb = batch(sg.ForwardMode.DECODE, texts, lens, slots, spec_info=sg.EagleDraftInput(), positions=index(lens))
    return fb, branches


def steps(world, backend, fb, branches, topk):
    """What the worker's loop does: each step's backend, and each step's own slots in the batch."""
    every = fb.out_cache_loc
    for step in range(STEPS - 1):
        fb.out_cache_loc = every.view(-1, STEPS)[:, step]
        queries = [
            Query(tokens[step], (*text.tokens, *tokens[: step + 1]), tuple(text.encoder)) for text, tokens in branches
        ]
        world.attend(backend.attn_backends[step], fb, queries)
    fb.out_cache_loc = every


def tree(world, text):
    """Parents of drafted tokens, their tokens and who sees whom; token 0 is the root."""
    parents = [-1, 0, 0, 1, 2]
    depths = [0, 1, 1, 2, 2]
    tokens = [Token(len(text.tokens) + depth) for depth in depths]
    mask = torch.eye(DRAFTS, dtype=torch.bool)
    for child, parent in enumerate(parents):
        if parent >= 0:
            mask[child] |= mask[parent]
    return tokens, mask


def verify_input(mask, topk, width=DRAFTS):
    none = index([])
    return sg.EagleVerifyInput(
        draft_token=none, custom_mask=mask, positions=none, retrieve_index=none, retrieve_next_token=none,
        retrieve_next_sibling=none, retrieve_cum_len=None, spec_steps=STEPS, topk=topk, draft_token_num=width,
        capture_hidden_mode=sg.CaptureHiddenMode.FULL, seq_lens_sum=0, seq_lens_cpu=none,
    )  # fmt: skip


def verification(world, texts, topk, width=DRAFTS):
    """SGLang's batch of a verification, and its queries."""
    slots, queries, masks = [], [], []
    for text in texts:
        length = len(text.tokens)
        slots += world.reserve(text, width)
        if topk == 1:
            tokens, mask = [Token(length + i) for i in range(width)], torch.ones(width, width).tril().bool()
        else:
            tokens, mask = tree(world, text)
            tokens, mask = tokens[:width], mask[:width, :width]
        for i, token in enumerate(tokens):
            drafts = [other for j, other in enumerate(tokens) if mask[i, j]]
            queries.append(Query(token, (*text.tokens, *drafts), tuple(text.encoder)))
        masks.append(torch.cat([torch.ones(width, length, dtype=torch.bool), mask], 1).flatten())
    lens = [len(text.tokens) for text in texts]
    info = verify_input(torch.cat(masks), topk, width)
    return batch(sg.ForwardMode.TARGET_VERIFY, texts, lens, slots, spec_info=info), queries
