"""A small model of unlike layers, an engine of a few lines around it, and plain attention to compare with."""

from __future__ import annotations

import torch

from faback import AttentionBackend, AttentionLayer, BackendConfig, ForwardBatch, Pools
from faback.builtins import BUILTINS
from faback.compiled import CompiledAttention
from faback.core.registry import Registry
from faback.pools import MHAPool, PageAllocator, ReqToTokenPool

HEADS, KV_HEADS, DIM, WIDTH, WORDS, CONTEXT = 4, 2, 16, 32, 50, 64
KINDS = ({}, {"window": 5, "sinks": True}, {"softcap": 20.0, "k_scale": 0.5, "v_scale": 2.0, "scale": 0.4})


def layers():
    return [AttentionLayer(layer_id=i, num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, **kind)
            for i, kind in enumerate(KINDS)]  # fmt: skip


class Block(torch.nn.Module):
    """Attention of one layer, by whatever `attention` is, and the sum of its output and its log-sum-exp."""

    def __init__(self, layer, attention):
        super().__init__()
        self.layer, self.attention = layer, attention
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * DIM)
        self.project = torch.nn.Linear(HEADS * DIM, WIDTH)
        self.sinks = torch.nn.Parameter(torch.randn(HEADS))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=-1)
        sinks = self.sinks if self.layer.sinks else None
        if self.layer.layer_id == 0:
            out, lse = self.attention.forward(q, k, v, self.layer, sinks=sinks, return_lse=True)
            x = x + lse.to(x.dtype).mean(-1, keepdim=True)
        elif self.layer.layer_id == 1:
            out = torch.empty(x.shape[0], HEADS, DIM, dtype=x.dtype, device=x.device)
            self.attention.forward(q, k, v, self.layer, sinks=sinks, out=out)
        else:
            self.attention.write_kv(k, v, self.layer)
            out = self.attention.forward(q, k, v, self.layer, save_kv_cache=False)
        return x + self.project(out.flatten(1))


class Model(torch.nn.Module):
    """Token ids [tokens] -> logits [tokens, WORDS]."""

    def __init__(self, attention):
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, WIDTH)
        self.blocks = torch.nn.ModuleList(Block(layer, attention) for layer in layers())

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x @ self.embed.weight.T


class Plain:
    """Attention over all tokens of one text, as it is defined, rounded to a dtype."""

    def __init__(self, dtype):
        self.dtype = dtype

    def forward(self, q, k, v, layer, *, out=None, sinks=None, save_kv_cache=True, return_lse=False):
        q, k, v = (x.unflatten(-1, (-1, DIM)).double() for x in (q, k, v))
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * layer.scale
        if layer.softcap:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        p = torch.arange(q.shape[0], device=q.device)
        seen = p[None] <= p[:, None]
        if layer.window is not None:
            seen &= p[None] >= p[:, None] - layer.window
        scores = scores.masked_fill(~seen, -torch.inf)
        lse = scores.logsumexp(-1)
        bottom = lse if sinks is None else torch.logaddexp(lse, sinks.double()[:, None])
        found = torch.einsum("hqk,khd->qhd", (scores - bottom[..., None]).exp(), v)
        if out is not None:
            out.copy_(found)
        found = found.to(self.dtype)
        return (found, lse.T.float()) if return_lse else found

    def write_kv(self, k, v, layer):
        return


class Engine:
    """Pools, a backend and the texts of two requests."""

    def __init__(self, kernels="auto", device="cpu", dtype=torch.float32, plugins=()):
        self.device = torch.device(device)
        self.rows = ReqToTokenPool(4, CONTEXT, self.device)
        self.slots = PageAllocator(64, 4)
        kv = MHAPool(num_pages=64, page_size=4, layers=layers(), dtype=dtype, device=self.device)
        config = BackendConfig(context_len=CONTEXT, dtype=dtype, kernels=kernels)
        registry = Registry.load(config, BUILTINS, entry_points=[])
        for plugin in plugins:
            registry.register(plugin, "test")
        pools = Pools(req_to_token=self.rows.req_to_token, kv=kv)
        self.backend = AttentionBackend(config, pools, layers(), registry=registry)
        self.attention = CompiledAttention(self.backend)
        self.requests, self.lens = self.rows.alloc(2), [0, 0]

    def batch(self, new):
        """The next pass: so many new tokens of each request, with slots of their own."""
        before, self.lens = self.lens, [n + more for n, more in zip(self.lens, new, strict=True)]
        table = self.rows.req_to_token
        last = table[self.requests, [n - 1 for n in before]].cpu()
        slots = self.slots.alloc_extend(before, self.lens, last)
        for row, start, part in zip(self.requests, before, slots.split(list(new)), strict=True):
            self.rows.write(row, start, part)

        def index(values):
            return torch.tensor(values, device=self.device)

        fields = {"extend_seq_lens": index(new)} if set(new) != {1} else {}
        return ForwardBatch(
            forward_mode="extend" if fields else "decode", req_pool_indices=index(self.requests),
            seq_lens=index(self.lens), out_cache_loc=slots.to(self.device), **fields,
        )  # fmt: skip


PASSES = ((7, 4), (1, 1), (3, 2), (1, 1), (9, 12), (1, 1))
"""New tokens of both requests, pass by pass."""


def texts(seed=0):
    """Token ids of both requests."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(WORDS, (sum(new),), generator=generator) for new in zip(*PASSES, strict=True)]


def expected(model, dtype):
    """Logits of both texts by plain attention, the rest of the model in this dtype."""
    plain = Model(Plain(dtype)).to(model.embed.weight.device, dtype)
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        return [plain(text.to(model.embed.weight.device)) for text in texts()]


def served(engine, run):
    """Logits of both texts, pass by pass; `run(batch, ids)` is one pass."""
    found, done = ([], []), [0, 0]
    for new in PASSES:
        parts = [text[begin : begin + n] for text, begin, n in zip(texts(), done, new, strict=True)]
        done = [begin + n for begin, n in zip(done, new, strict=True)]
        with torch.no_grad():
            logits = run(engine.batch(new), torch.cat(parts).to(engine.device)).clone()
        for mine, part in zip(found, logits.split(list(new)), strict=True):
            mine.append(part)
    return [torch.cat(parts) for parts in found]
