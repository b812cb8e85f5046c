"""PagedGenerator: many requests at once through one Transformers model, its keys and values in faback's pages."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from time import perf_counter
from types import TracebackType
from typing import Any

import torch
from transformers import PreTrainedModel

from faback import AttentionBackend, BackendConfig, BatchError, Pools
from faback.core.explain import Explanation
from faback.pools import MHAPool, PageAllocator, ReqToTokenPool
from faback_transformers.attention import PagedContext, attending
from faback_transformers.drafting import Drafter
from faback_transformers.graphs import StepGraphs
from faback_transformers.layers import layers_of
from faback_transformers.packing import PackedBatch, pack, pack_drafts
from faback_transformers.requests import Completion, Event, Request, Sampling
from faback_transformers.sampling import sample
from faback_transformers.scheduler import Chunk, Scheduler
from faback_transformers.speculation import Draft, Speculation, sizes
from faback_transformers.stats import Stats
from faback_transformers.text import TextStream


class PagedGenerator:
    """Serves requests with continuous batching and chunked prefill. A context manager; `close` gives the model back.

    Args:
        model: a decoder-only model of Transformers; its attention implementation is "faback_packed" until `close`.
        eos_token_ids: tokens that end a request. Say them: models' own settings are not consulted.
        tokenizer: for prompts given as text and for text in events.
        num_pages: pages of the KV pool.
        page_size: tokens per page.
        max_requests: requests that run at once; more may wait.
        tokens_per_step: tokens of one forward pass at most; longer prompts run in chunks.
        context_len: longest request in tokens; the model's own bound unless given.
        kernels: as in `BackendConfig`.
        kv_dtype: storage of keys and values; the model's dtype unless given.
        drafter: guesses tokens ahead, which are then verified many at once, for instance `PromptLookup()`. The tokens
            stay the same. Greedy requests only.
        graphs: run decode and verify passes as CUDA graphs, recorded here. They then take as long on the host as one
            copy of the batch, but each number of requests has its own, padded to the next.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_token_ids: Iterable[int],
        tokenizer: Any | None = None,
        num_pages: int = 512,
        page_size: int = 16,
        max_requests: int = 16,
        tokens_per_step: int = 256,
        context_len: int | None = None,
        kernels: str | Mapping[str, str] = "auto",
        kv_dtype: torch.dtype | None = None,
        drafter: Drafter | None = None,
        graphs: bool = False,
    ) -> None:
        if tokens_per_step < 1:
            raise BatchError("tokens_per_step", wanted="at least 1", got=tokens_per_step)
        self.model, self.tokenizer = model, tokenizer
        self.layers = layers_of(model)
        length = context_len or _context_len(model, num_pages * page_size)
        rows = ReqToTokenPool(max_requests, length, model.device)
        described = tuple(self.layers.values())
        kv = MHAPool(
            num_pages=num_pages + 1,  # page 0 is padding
            page_size=page_size,
            layers=described,
            dtype=kv_dtype or model.dtype,
            device=model.device,
        )
        speculative = None if drafter is None else sizes(drafter)
        config = BackendConfig(context_len=length, dtype=model.dtype, kernels=kernels, speculative=speculative)
        self.backend = AttentionBackend(config, Pools(req_to_token=rows.req_to_token, kv=kv), described)
        self.stats = Stats(pages_total=num_pages)
        self.last_batch: PackedBatch | None = None
        self._scheduler = Scheduler(rows, PageAllocator(num_pages + 1, page_size), tokens_per_step)
        self._speculation = None if drafter is None else Speculation(drafter, self._scheduler, kv)
        self._context = PagedContext(self.backend, self.layers)
        self._eos = frozenset(eos_token_ids)
        self._requests: dict[int, Request] = {}
        self._texts: dict[int, TextStream] = {}
        self._events: deque[Event] = deque()
        self._submitted = 0
        self._slices_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._open = ExitStack()
        self._open.enter_context(attending(model))
        self.graphs: StepGraphs | None = None
        if graphs:
            with torch.inference_mode():
                self.graphs = StepGraphs.record(self.backend, self._forward, max_requests)

    def submit(self, prompt: str | Sequence[int], *, max_new_tokens: int, sampling: Sampling | None = None) -> int:
        """Queues a request and returns its id.

        Raises:
            BatchError: the request could never be served by this generator.
        """
        sampling = sampling or Sampling()
        if self._speculation is not None and sampling.temperature > 0:
            hint = "Drafts are accepted greedily: make the generator without a drafter."
            raise BatchError("sampling.temperature", wanted="0 with a drafter", got=sampling.temperature, hint=hint)
        tokens = self._tokens(prompt)
        request = Request(
            request_id=self._submitted,
            tokens=tokens,
            prompt_len=len(tokens),
            max_new_tokens=max_new_tokens,
            eos=self._eos,
            sampling=sampling,
        )
        self._scheduler.submit(request)
        self._requests[request.request_id] = request
        self._texts[request.request_id] = TextStream(self.tokenizer)
        self._submitted += 1
        return request.request_id

    def cancel(self, request_id: int) -> bool:
        """Ends a request and frees its pages; tokens that came before stay, and a last event says "cancelled".

        Returns:
            False if it had finished already.

        Raises:
            BatchError: there is no such request.
        """
        request = self._known(request_id)
        if request.finished is not None:
            return False
        request.finished = "cancelled"
        self._scheduler.release(request)
        self._events.append(Event(request_id=request_id, token=None, text="", finished="cancelled"))
        self._count_pages()
        return True

    def stream(self) -> Iterator[Event]:
        """Runs until no request is left, event by event. Requests may be submitted and cancelled meanwhile."""
        while self._events or self._scheduler.busy:
            if not self._events:
                self.step()
            while self._events:
                yield self._events.popleft()

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        progress: bool = False,
    ) -> list[Completion]:
        """Serves prompts together and returns their completions in order.

        Args:
            prompts: texts or token lists.
            max_new_tokens: for each.
            sampling: for each.
            progress: show a bar (needs rich).
        """
        ids = [self.submit(prompt, max_new_tokens=max_new_tokens, sampling=sampling) for prompt in prompts]
        events: Iterable[Event] = self.stream()
        if progress:
            from faback_transformers.progress import shown

            events = shown(events, len(ids), max_new_tokens)
        for _ in events:
            pass
        return [self.collect(request_id) for request_id in ids]

    def collect(self, request_id: int) -> Completion:
        """A finished request's completion; the generator forgets it.

        Raises:
            BatchError: no such request, or it has not finished.
        """
        request = self._known(request_id)
        if request.finished is None:
            hint = "Iterate over stream() until its last event."
            raise BatchError(f"request {request_id}", wanted="finished", got="still served", hint=hint)
        del self._requests[request_id], self._texts[request_id]
        return request.completion()

    @torch.inference_mode()
    def step(self) -> None:
        """One forward pass; its events go to `stream`. Does nothing where no request waits."""
        start, preempted = perf_counter(), self._scheduler.preemptions
        chunks = self._scheduler.schedule()
        if not chunks:
            assert not self._scheduler.busy
            return
        drafts = self._speculation.drafts(chunks) if self._speculation is not None else []
        if drafts:
            self._verify(drafts)
        else:
            self._advance(chunks)
        stats = self.stats
        stats.steps += 1
        stats.prompt_tokens += sum(max(0, min(c.end, c.request.prompt_len) - c.start) for c in chunks)
        stats.preemptions += self._scheduler.preemptions - preempted
        self._count_pages()
        stats.seconds += perf_counter() - start

    def reset_stats(self) -> Stats:
        """Starts counting anew; returns the counts so far."""
        before, self.stats = self.stats, Stats(pages_total=self.stats.pages_total)
        self._count_pages()
        return before

    def explain(self, layer_id: int | None = None) -> Explanation:
        """How faback serves a layer (the first unless given) in the last batch, and why so.

        Raises:
            BatchError: nothing has run yet.
        """
        if self.last_batch is None:
            raise BatchError("explain", wanted="a batch that has run", got=None)
        layer = self.layers[min(self.layers) if layer_id is None else layer_id]
        return self.backend.explain(self.last_batch.forward, layer)

    def close(self) -> None:
        """Gives the model its own attention implementation back."""
        self._open.close()

    def __enter__(self) -> PagedGenerator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _advance(self, chunks: list[Chunk]) -> None:
        """A plain step: one token for each request whose tokens have all run."""
        batch = pack(chunks, self._scheduler.allocate(chunks), self._scheduler.rows)
        self._count_pages()
        logits = self._run(batch)
        requests = [chunk.request for chunk in chunks if chunk.samples]
        for request, token in zip(requests, sample(logits, requests), strict=True):
            self._take(request, [token])

    def _verify(self, drafts: list[Draft]) -> None:
        """A step of speculation: one token or more for each request."""
        assert self._speculation is not None
        slots = self._scheduler.allocate([draft.chunk for draft in drafts])
        self._count_pages()
        choices = self._run(pack_drafts(drafts, slots, self._scheduler.rows)).argmax(-1).tolist()
        stats = self.stats
        stats.verify_steps += 1
        for draft, tokens in zip(drafts, self._speculation.settle(drafts, choices), strict=True):
            stats.verifications += 1
            stats.drafted_tokens += len(draft.tree) - 1
            stats.accepted_tokens += self._take(draft.chunk.request, tokens) - 1

    def _run(self, batch: PackedBatch) -> torch.Tensor:
        """[samples, vocabulary] logits of the tokens that are sampled after."""
        recorded = None if self.graphs is None else self.graphs.run(batch)
        if recorded is not None:
            self.stats.graph_steps += 1
            self.last_batch = batch
            return recorded[batch.sampled]
        planning, attending_before = perf_counter(), self._context.seconds
        self.backend.plan(batch.forward)
        self.stats.plan_seconds += perf_counter() - planning
        self.last_batch = batch
        arguments = {"logits_to_keep": batch.sampled} if self._slices_logits else {}
        logits = self._forward(batch.input_ids, batch.position_ids, **arguments)
        self.stats.attention_seconds += self._context.seconds - attending_before
        self.stats.layer_calls += len(self.layers)
        return logits if self._slices_logits else logits[batch.sampled]

    def _forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **arguments: torch.Tensor) -> torch.Tensor:
        """[tokens, vocabulary] logits of the planned batch."""
        context = {"use_cache": False, "faback_context": self._context}
        logits: torch.Tensor = self.model(
            input_ids=input_ids, position_ids=position_ids, **context, **arguments
        ).logits[0]
        return logits

    def _take(self, request: Request, tokens: Iterable[int]) -> int:
        """Takes new tokens up to the request's end; returns how many."""
        before = len(request.tokens)
        for token in tokens:
            request.append(token)
            text = self._texts[request.request_id].push(token, last=request.finished is not None)
            request.pieces.append(text)
            self._events.append(Event(request_id=request.request_id, token=token, text=text, finished=request.finished))
            if request.finished is not None:
                break
        if request.finished is not None:
            self._scheduler.release(request)
        taken = len(request.tokens) - before
        self.stats.new_tokens += taken
        return taken

    def _count_pages(self) -> None:
        used = self._scheduler.allocator.used_pages
        self.stats.pages_used = used
        self.stats.pages_peak = max(self.stats.pages_peak, used)

    def _known(self, request_id: int) -> Request:
        if request_id not in self._requests:
            raise BatchError("request_id", wanted=f"one of {sorted(self._requests)}", got=request_id)
        return self._requests[request_id]

    def _tokens(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]
        if self.tokenizer is None:
            raise BatchError("prompt", wanted="token ids", got="text", hint="Give the generator a tokenizer.")
        return list(self.tokenizer(prompt)["input_ids"])


def _context_len(model: PreTrainedModel, pool_tokens: int) -> int:
    """The model's longest sequence, or the pool's where that is shorter."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min(longest or pool_tokens, pool_tokens)
