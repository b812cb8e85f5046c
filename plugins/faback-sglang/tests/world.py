"""A small model life on SGLang's own objects, and the attention that each token should get, in plain torch.

What a query must see is told token by token, by who the tokens are: no slot, page, table or length of a batch enters
the expected result.
"""

from types import SimpleNamespace

import attrs
import sglang_here as sg
import torch

from faback_sglang.registration import make_backend

CONTEXT = 96
HEADS, KV_HEADS, DIM = 4, 2, 16


@attrs.define(eq=False)
class Token:
    """One token: where it stands, and its true key and value in each layer."""

    position: int
    kv: dict = attrs.field(factory=dict)


@attrs.define(eq=False)
class Text:
    """A request: its row, its encoder's tokens and its own, in order."""

    row: int
    encoder: list = attrs.field(factory=list)
    tokens: list = attrs.field(factory=list)
    slots: list = attrs.field(factory=list)


@attrs.frozen
class Query:
    """A row of q: its token, and the tokens that full layers let it see. None is padding."""

    token: Token
    seen: tuple
    encoder: tuple = ()


class Block(torch.nn.Module):
    """What owns an attention layer in SGLang's models."""

    def __init__(self, attn, sinks=None):
        super().__init__()
        self.attn = attn
        self.sinks = None if sinks is None else torch.nn.Parameter(sinks)


class World:
    """Pools, a model of attention layers, and texts.

    Args:
        layers: keyword arguments of `RadixAttention` for each layer, besides its number; "sinks" gives the block some.
        page_size: tokens per page.
        hybrid: sliding layers live in a pool of their own.
        dtype: of the pool.
        mla: (latent, rope) dims of a pool of latents.
        draft: the runner is a draft model's.

    Attributes:
        sees: of a layer, a query's token and a key's, besides the layer's window: for other overlays.
    """

    sees = None

    def __init__(self, layers, page_size=1, hybrid=False, dtype=torch.float32, mla=None, draft=False, pages=64):
        self.page_size, self.random = page_size, torch.Generator().manual_seed(page_size + len(layers))
        slots = (pages - 1) * page_size
        self.rows = sg.ReqToTokenPool(12, CONTEXT, "cpu", False)
        blocks = [self._block(number, **layer) for number, layer in enumerate(layers)]
        self.model = torch.nn.ModuleList(blocks)
        common = dict(size=slots, page_size=page_size, dtype=dtype, device="cpu", enable_memory_saver=False)
        if mla:
            self.pool = sg.MLATokenToKVPool(
                **common, kv_lora_rank=mla[0], qk_rope_head_dim=mla[1], layer_num=len(layers)
            )
        elif hybrid:
            sliding = [n for n, b in enumerate(blocks) if b.attn.sliding_window_size > -1]
            full = [n for n in range(len(layers)) if n not in sliding]
            self.pool = sg.SWAKVPool(
                **common, size_swa=slots, head_num=KV_HEADS, head_dim=DIM, swa_attention_layer_ids=sliding,
                full_attention_layer_ids=full, enable_alt_stream=False,
            )  # fmt: skip
            self.pool.register_mapping(torch.cat([torch.zeros(slots + page_size), torch.tensor([-1])]).long())
        else:
            self.pool = sg.MHATokenToKVPool(**common, head_num=KV_HEADS, head_dim=DIM, layer_num=len(layers))
        self.hybrid, self._pages = hybrid, torch.randperm(pages - 1, generator=self.random).add(1).tolist()
        self._window_pages = torch.randperm(pages - 1, generator=self.random).add(1).tolist()
        # What lies beyond a text must not matter.
        self.rows.req_to_token[1:] = torch.randint(0, slots, (12, CONTEXT), generator=self.random)
        self._poison()
        self.runner = SimpleNamespace(
            model=self.model, dtype=torch.float32, kv_cache_dtype=dtype, kv_cache_dtype_str="auto", device="cpu",
            page_size=page_size, req_to_token_pool=self.rows, token_to_kv_pool=self.pool, is_draft_worker=draft,
            use_mla_backend=bool(mla), sliding_window_size=None, attention_chunk_size=None, prefill_aware_swa=False,
            model_config=SimpleNamespace(context_len=CONTEXT - 8, is_local_attention_model=False),
            kv_index_translator=sg.KVIndexTranslator(
                req_to_token=self.rows.req_to_token, token_to_kv_pool_allocator=None, token_to_kv_pool=self.pool,
                page_size=page_size, device="cpu",
            ),
        )  # fmt: skip
        self.mla = mla

    def _block(self, number, sinks=False, k_scale=None, v_scale=None, **layer):
        attn = sg.RadixAttention(**{
            "num_heads": HEADS, "head_dim": DIM, "scaling": DIM**-0.5, "num_kv_heads": KV_HEADS, "layer_id": number,
            **layer,
        })  # fmt: skip
        attn.k_scale, attn.v_scale = k_scale, v_scale
        return Block(attn, torch.randn(HEADS, generator=self.random) if sinks else None)

    def _poison(self):
        parts = (self.pool.full_kv_pool, self.pool.swa_kv_pool) if hasattr(self.pool, "swa_kv_pool") else (self.pool,)
        for part in parts:
            for buffer in part.kv_buffer if hasattr(part, "kv_buffer") else (*part.k_buffer, *part.v_buffer):
                # Not the padding page, which may be read by nobody but is zero in SGLang.
                buffer[self.page_size :] = 0x7F if buffer.dtype == torch.uint8 else float("nan")

    def backend(self, **options):
        """The backend that SGLang's registry makes."""
        if options:
            from faback_sglang.backend import FabackBackend

            return FabackBackend(self.runner, **options)
        return make_backend(self.runner)

    def text(self, length=0, encoder=0):
        """A new text, with encoder tokens and tokens of its own that nobody has seen yet."""
        text = Text(self.rows.free_slots.pop(0))
        text.encoder = [Token(i) for i in range(encoder)]
        self._reserve(text, encoder)
        self.grow(text, length)
        return text

    def grow(self, text, count):
        """New tokens at the end; their slots."""
        start = len(text.encoder) + len(text.tokens)
        text.tokens += [Token(len(text.tokens) + i) for i in range(count)]
        self._reserve(text, start + count)
        return text.slots[start : start + count]

    def reserve(self, text, count):
        """Slots behind a text's tokens, as drafts get them; the tokens are the caller's."""
        start = len(text.encoder) + len(text.tokens)
        self._reserve(text, start + count)
        return text.slots[start : start + count]

    def page(self):
        """The slots of a page that no text has."""
        return self._new_page()

    def _reserve(self, text, length):
        while len(text.slots) < length:
            text.slots += self._new_page()
        self.rows.req_to_token[text.row, : len(text.slots)] = torch.tensor(text.slots, dtype=torch.int32)

    def _new_page(self):
        first = self._pages.pop() * self.page_size
        slots = list(range(first, first + self.page_size))
        if self.hybrid:
            window = self._window_pages.pop() * self.page_size
            self.pool.full_to_swa_index_mapping[slots] = torch.arange(window, window + self.page_size)
        return slots

    def attend(self, backend, fb, queries, padding=0, layers=None):
        """Runs every layer and compares with what the tokens themselves say.

        Args:
            backend: SGLang's.
            fb: the batch, its metadata made.
            queries: one per row of q.
            padding: rows of q behind them.
            layers: the blocks to run; all unless given.
        """
        for block in self.model if layers is None else layers:
            attn = block.attn
            q = self.randn(len(queries) + padding, HEADS, attn.qk_head_dim)
            k, v = self._new_kv(attn, fb, queries, padding)
            options = {} if block.sinks is None else {"sinks": block.sinks}
            with sg.forward_context(sg.ForwardContext(attn_backend=backend), forward_batch=fb), torch.no_grad():
                out = attn(q.flatten(1), k, v, fb, **options)
            assert out.shape == (len(q), HEADS * attn.v_head_dim)
            wanted = torch.stack([self.wanted(block, q[i], query) for i, query in enumerate(queries)])
            torch.testing.assert_close(out[: len(queries)], wanted.flatten(1).float(), atol=2e-5, rtol=1e-4)

    def _new_kv(self, attn, fb, queries, padding):
        if attn.is_cross_attention:
            new = [t for query in queries for t in query.encoder if attn.layer_id not in t.kv]
            new = list({id(t): t for t in new}.values())
            if not new:
                return None, None
            padding = 0
        else:
            new = [query.token for query in queries]
        latent = self.mla is not None
        k = self.randn(len(new) + padding, 1 if latent else KV_HEADS, attn.qk_head_dim)
        v = k[..., : attn.v_head_dim] if latent else self.randn(len(new) + padding, KV_HEADS, attn.v_head_dim)
        for token, key, value in zip(new, k, v, strict=False):  # k and v may be padded
            token.kv[attn.layer_id] = self.stored(key, attn.k_scale), self.stored(value, attn.v_scale)
        return k.clone(), v.clone()

    def stored(self, x, scale):
        """What is left of a value in the pool."""
        if self.pool.dtype == torch.float32:
            return x.clone()
        scale = 1.0 if scale is None else float(scale)
        return (x / scale).to(self.pool.dtype).float() * scale

    def wanted(self, block, q, query):
        """[heads, v_head_dim] of one query, in double precision."""
        attn = block.attn
        seen = query.encoder if attn.is_cross_attention else query.seen
        left = attn.sliding_window_size
        if self.sees is not None:
            seen = [token for token in seen if self.sees(attn, query.token, token)]
        elif left > -1 and not attn.is_cross_attention:
            seen = [token for token in seen if token.position >= query.token.position - left]
        if not seen:
            return torch.zeros(HEADS, attn.v_head_dim)
        keys, values = (torch.stack([t.kv[attn.layer_id][i] for t in seen]).double() for i in (0, 1))
        group = HEADS // keys.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("hd,khd->hk", q.double(), keys) * attn.scaling
        if attn.logit_cap:
            scores = attn.logit_cap * torch.tanh(scores / attn.logit_cap)
        if block.sinks is not None:
            scores = torch.cat([scores, block.sinks.detach().double()[:, None]], 1)
        weights = scores.softmax(1)[:, : len(seen)]
        return torch.einsum("hk,khd->hd", weights, values)

    def randn(self, *shape):
        return torch.randn(*shape, generator=self.random)


def index(values):
    return torch.tensor(values, dtype=torch.int64)


def batch(mode, texts, lens, slots, **fields):
    """A `ForwardBatch` of SGLang's."""
    lens = index(lens)
    if any(text.encoder for text in texts):
        encoder = [len(text.encoder) for text in texts]
        fields = {"encoder_lens": index(encoder), "encoder_lens_cpu": encoder, **fields}
    return sg.ForwardBatch(
        forward_mode=mode, batch_size=len(texts), input_ids=None, req_pool_indices=index([t.row for t in texts]),
        seq_lens=lens, out_cache_loc=index(slots), seq_lens_sum=int(lens.sum()), seq_lens_cpu=lens.clone(), **fields,
    )  # fmt: skip


def causal(text, new):
    """Queries of a text's last tokens."""
    count = len(text.tokens)
    return [Query(text.tokens[i], tuple(text.tokens[: i + 1]), tuple(text.encoder)) for i in range(count - new, count)]


def extend(world, backend, texts, news, mode=None, **more):
    """Grows texts by so many tokens each and runs them."""
    slots = [slot for text, new in zip(texts, news, strict=True) for slot in world.grow(text, new)]
    lens = [len(text.tokens) for text in texts]
    prefix = [total - new for total, new in zip(lens, news, strict=True)]
    encoder = [slot for text in texts for slot in text.slots[: len(text.encoder)] if text.encoder and not prefix[0]]
    if encoder:
        more["encoder_out_cache_loc"] = index(encoder)
    fb = batch(
        mode or sg.ForwardMode.EXTEND, texts, lens, slots, extend_num_tokens=sum(news), extend_seq_lens=index(news),
        extend_seq_lens_cpu=news, extend_prefix_lens=index(prefix), extend_prefix_lens_cpu=prefix,
        extend_start_loc=index([0, *news]).cumsum(0)[:-1], **more,
    )  # fmt: skip
    backend.init_forward_metadata(fb)
    world.attend(backend, fb, [query for text, new in zip(texts, news, strict=True) for query in causal(text, new)])


def decode(world, backend, texts):
    slots = [slot for text in texts for slot in world.grow(text, 1)]
    fb = batch(sg.ForwardMode.DECODE, texts, [len(text.tokens) for text in texts], slots)
    backend.init_forward_metadata(fb)
    world.attend(backend, fb, [query for text in texts for query in causal(text, 1)])
