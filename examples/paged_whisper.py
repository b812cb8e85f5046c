"""Whisper of Transformers with all of its attention through faback: encoder, decoder, and between the two.

What an encoder-decoder model asks of an engine is all here:

- Three kinds of layers. The encoder's see the whole sound in both directions and keep nothing; the decoder's are causal
  and paged; cross layers (`cross=True`) see the encoder's states, whose keys and values are paged too.
- One row of the request table per sound: the slots of its E encoder states first, those of its text behind them.
- The first pass of the decoder brings the encoder's keys, and `encoder_out_cache_loc` says where they go. Later passes
  bring none. `encoder_lens` is needed in each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

import attrs
import torch
from transformers import WhisperForConditionalGeneration

from faback import AttentionBackend, AttentionLayer, BackendConfig, ForwardBatch, Pools
from faback.pools import MHAPool, PageAllocator, ReqToTokenPool
from faback_transformers import attending

Tensor = torch.Tensor


@attrs.define(eq=False)
class Request:
    """One sound while it is transcribed.

    Attributes:
        row: of the request table.
        states: [E, d_model] of the encoder.
        tokens: the prompt, and what was generated behind it.
        slots: of the E states, and then of the tokens that have run.
        done: whether the last token ends the text.
    """

    row: int
    states: Tensor
    tokens: list[int]
    slots: list[int] = attrs.field(factory=list)
    done: bool = False

    @property
    def encoded(self) -> int:
        """E, the states of the encoder."""
        return self.states.shape[0]

    @property
    def cached(self) -> int:
        """Tokens of text that have run."""
        return max(0, len(self.slots) - self.encoded)


@attrs.frozen(eq=False)
class Context:
    """What Transformers' attention modules talk to: their layers, by module, and the backend that serves them."""

    backend: AttentionBackend
    layers: Mapping[torch.nn.Module, AttentionLayer]

    def attend(self, module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]) -> Tensor:
        """One layer of one pass; cross layers get no keys when there are no new states of the encoder."""
        layer = self.layers[module]
        if layer.cross and not len(k):
            return self.backend.forward(q, None, None, layer)
        return self.backend.forward(q, k, v, layer)


class PagedWhisper:
    """Transcribes several sounds at once, greedily.

    Args:
        model: on its device, in its dtype.
        requests: sounds that are transcribed at once at most.
        page_size: tokens per page. States and text of a sound share their pages: nothing has to be aligned.
    """

    def __init__(self, model: WhisperForConditionalGeneration, *, requests: int = 4, page_size: int = 16) -> None:
        self.model, config = model, model.config
        numbers = count()
        encoder = {block.self_attn: describe(block.self_attn, next(numbers)) for block in model.model.encoder.layers}
        decoder = {
            module: describe(module, next(numbers), cross=module is block.encoder_attn)
            for block in model.model.decoder.layers
            for module in (block.self_attn, block.encoder_attn)
        }
        columns = config.max_source_positions + config.max_target_positions
        pages = requests * -(-columns // page_size)
        self.rows = ReqToTokenPool(requests, columns, model.device)
        self.allocator = PageAllocator(pages + 1, page_size)  # page 0 is padding
        kv = MHAPool(
            num_pages=pages + 1,
            page_size=page_size,
            layers=tuple(decoder.values()),
            dtype=model.dtype,
            device=model.device,
        )
        pools = Pools(req_to_token=self.rows.req_to_token, kv=kv)
        longest = max(config.max_source_positions, config.max_target_positions)
        settings = BackendConfig(context_len=longest, dtype=model.dtype)
        # Two backends, since a plan is for all layers of its backend, and encoder and decoder run on different batches.
        self.encoder = Context(AttentionBackend(settings, pools, encoder.values()), encoder)
        self.decoder = Context(AttentionBackend(settings, pools, decoder.values()), decoder)

    @torch.inference_mode()
    def encode(self, features: Tensor) -> Tensor:
        """The encoder's states of one sound.

        Args:
            features: [num_mel_bins, frames] of `WhisperFeatureExtractor`.

        Returns:
            [max_source_positions, d_model].
        """
        length = self.model.config.max_source_positions
        lengths = torch.tensor([length], device=self.model.device)
        rows = torch.zeros_like(lengths)  # none is looked at
        batch = ForwardBatch(
            forward_mode="embedding",
            req_pool_indices=rows,
            seq_lens=lengths,
            extend_seq_lens=lengths,
            num_tokens=length,
        )
        self.encoder.backend.plan(batch)
        with attending(self.model):
            mel = features[None].to(self.model.device, self.model.dtype)
            return self.model.model.encoder(mel, faback_context=self.encoder).last_hidden_state[0]

    @torch.inference_mode()
    def decode(
        self, states: Sequence[Tensor], prompts: Sequence[Sequence[int]], *, eos: int, max_new_tokens: int
    ) -> list[list[int]]:
        """The texts of several sounds, as tokens, without prompt and end.

        Args:
            states: each [encoder tokens, d_model], not all of one length.
            prompts: the first tokens of each text, at least one.
            eos: the token that ends a text.
            max_new_tokens: of each text.
        """
        rows = self.rows.alloc(len(states))
        requests = [Request(*fields) for fields in zip(rows, states, map(list, prompts), strict=True)]
        with attending(self.model):
            for _ in range(max_new_tokens):
                running = [request for request in requests if not request.done]
                if not running:
                    break
                for request, token in zip(running, self._step(running), strict=True):
                    request.done = token == eos
                    request.tokens += [] if request.done else [token]
        for request in requests:
            self.allocator.free(request.slots)
        self.rows.free(rows)
        self.decoder.backend.release(torch.tensor(rows, device=self.model.device))
        return [request.tokens[len(prompt) :] for request, prompt in zip(requests, prompts, strict=True)]

    def _step(self, requests: list[Request]) -> list[int]:
        """One pass of the decoder over the tokens that have not run, and the next token of each request."""
        first = not requests[0].slots
        ids = [token for request in requests for token in request.tokens[request.cached :]]
        states = torch.cat([request.states if first else request.states[:0] for request in requests])
        batch = self._batch(requests, first)
        self.decoder.backend.plan(batch)
        assert batch.positions is not None and batch.extend_seq_lens is not None
        hidden = self.model.model.decoder(
            input_ids=torch.tensor([ids], device=self.model.device),
            position_ids=batch.positions[None],
            encoder_hidden_states=states[None],  # empty in later passes; None would leave the cross layers out
            use_cache=False,
            faback_context=self.decoder,
        ).last_hidden_state[0]
        last = batch.extend_seq_lens.cumsum(0) - 1
        return self.model.proj_out(hidden[last]).argmax(-1).tolist()

    def _batch(self, requests: list[Request], first: bool) -> ForwardBatch:
        """Describes a pass, and gives its tokens their slots; in the first one the encoder's states too."""
        prefix = [request.cached for request in requests]
        for request in requests:
            self._allocate(request)
        new = [request.cached - before for request, before in zip(requests, prefix, strict=True)]

        def index(values: Iterable[int]) -> Tensor:
            return torch.tensor(list(values), dtype=torch.int64, device=self.model.device)

        return ForwardBatch(
            forward_mode="extend" if first else "decode",
            req_pool_indices=index(request.row for request in requests),
            seq_lens=index(request.cached for request in requests),  # of the text
            out_cache_loc=index(slot for request, n in zip(requests, new, strict=True) for slot in request.slots[-n:]),
            positions=index(before + i for before, n in zip(prefix, new, strict=True) for i in range(n)),
            extend_seq_lens=index(new),
            extend_prefix_lens=index(prefix),
            encoder_lens=index(request.encoded for request in requests),
            encoder_out_cache_loc=index(s for r in requests for s in r.slots[: r.encoded]) if first else None,
        )

    def _allocate(self, request: Request) -> None:
        """Extends a request's slots to all of its states and tokens, and writes them into its row."""
        have, length = len(request.slots), request.encoded + len(request.tokens)
        slots = self.allocator.alloc_extend([have], [length], request.slots[-1:] or None)
        self.rows.write(request.row, have, slots)
        request.slots += slots.tolist()


def describe(module: Any, layer_id: int, *, cross: bool = False) -> AttentionLayer:
    """A layer, from its module: those that know no `layer_idx` are the encoder's."""
    encoder = module.layer_idx is None
    return AttentionLayer(
        layer_id=layer_id,
        num_q_heads=module.num_heads,
        num_kv_heads=module.num_heads,
        head_dim=module.head_dim,
        scale=1.0,  # Whisper scales its queries itself
        causal=not encoder,
        cross=cross,
        kv_group="none" if encoder else "full",
    )
