"""Tokens per second of the Transformers generator, beside Transformers' own ways of serving the same requests.

    python benchmarks/engine.py --model llama-3-8b --json benchmarks/results/h200-engine.json
    python benchmarks/engine.py --model tiny --device cpu --requests 4 --new 8

`llama-3-8b` and `gemma-3-4b` have those models' sizes and random weights; `smollm2` is the real one. All requests come
at once, of lengths from a fixed series, and generate greedily the same number of tokens; real models are not stopped by
an end token, so that every way does the same work. Each way runs once to warm up, then is timed as a whole, prompts
included. Beside the times stand two checks of the greedy tokens against `sdpa`, one request at a time: in float32,
where every token must be equal, and in the measured dtype, where near ties may fall either way, by how many tokens come
before the first that differs.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from inspect import signature
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from faback.cli.bench import environment
from faback.core.files import write_json
from faback_transformers import PagedGenerator, PromptLookup
from faback_transformers.comparison import reference
from faback_transformers.weights import LoadedModel, random_model, smollm2

Tokens = list[list[int]]
Serve = Callable[[Sequence[Sequence[int]], int], tuple[Tokens, dict[str, Any]]]
"""Prompts and a number of new tokens -> what was generated, and what else is worth a column."""

SEED = 7
CHECKED_REQUESTS, CHECKED_TOKENS = 4, 24
LENGTHS = (128, 1024, 384, 64, 768, 256, 512, 96)
"""Prompt lengths, over and over."""


def llama_3_8b() -> PreTrainedModel:
    """Sizes of the model card; weights are random."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=8192,
        )
    )


def gemma_3_4b() -> PreTrainedModel:
    """Sizes of the model card: five layers with a window of 1024 tokens to one without; weights are random."""
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=262208,
            hidden_size=2560,
            intermediate_size=10240,
            num_hidden_layers=34,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=256,
            sliding_window=1024,
            max_position_embeddings=8192,
        )
    )


def drawn(make: Callable[[], PreTrainedModel], name: str, dtype: torch.dtype, device: str) -> LoadedModel:
    """A random model, made where it runs."""
    before = torch.get_default_dtype()
    torch.manual_seed(SEED)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = make().eval()
    finally:
        torch.set_default_dtype(before)
    return LoadedModel(name=name, model=model, tokenizer=None, eos_token_ids=())


MODELS: dict[str, Callable[[torch.dtype, str], LoadedModel]] = {
    "llama-3-8b": partial(drawn, llama_3_8b, "Llama-3-8B-shaped, random"),
    "gemma-3-4b": partial(drawn, gemma_3_4b, "Gemma-3-4B-shaped, random"),
    "smollm2": lambda dtype, device: smollm2(dtype=dtype, device=device),
    "tiny": lambda dtype, device: random_model(dtype=dtype, device=device),
}


def prompts_of(loaded: LoadedModel, requests: int, longest: int) -> list[list[int]]:
    """Token lists. A real model gets text that repeats itself, as records, code and edits do."""
    draw = torch.Generator().manual_seed(SEED)
    lengths = [min(longest, LENGTHS[n % len(LENGTHS)]) for n in range(requests)]
    if loaded.tokenizer is None:
        vocabulary = loaded.model.config.get_text_config().vocab_size
        return [torch.randint(1, vocabulary, (length,), generator=draw).tolist() for length in lengths]
    lines = [f'{{"id": {n}, "name": "item {n}", "shelf": {n % 7}, "in_stock": true}},\n' for n in range(200)]
    found = []
    for number, length in enumerate(lengths):
        tokens = loaded.tokenizer("".join(lines[number : number + 80]))["input_ids"]
        found.append(list(tokens[:length]))
    return found


@contextmanager
def paged(loaded: LoadedModel, options: dict[str, Any]) -> Iterator[Serve]:
    """faback's generator; graphs, if it has any, are recorded on entering."""
    with PagedGenerator(loaded.model, eos_token_ids=(), tokenizer=loaded.tokenizer, **options) as generator:

        def serve(prompts: Sequence[Sequence[int]], new: int) -> tuple[Tokens, dict[str, Any]]:
            done = generator.generate(prompts, max_new_tokens=new)
            stats = generator.reset_stats()
            more = {"kernel": generator.explain().kernel, "steps": stats.steps, "graph_steps": stats.graph_steps}
            if stats.verify_steps:
                more["acceptance_length"] = round(stats.acceptance_length, 2)
            return [list(completion.tokens) for completion in done], more

        yield serve


@contextmanager
def padded(loaded: LoadedModel, implementation: str) -> Iterator[Serve]:
    """`model.generate` on one batch, padded on the left."""
    loaded.model.set_attn_implementation(implementation)

    def serve(prompts: Sequence[Sequence[int]], new: int) -> tuple[Tokens, dict[str, Any]]:
        longest = max(map(len, prompts))
        ids = torch.zeros((len(prompts), longest), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(list(prompt))
            mask[row, longest - len(prompt) :] = 1
        device = loaded.model.device
        found = loaded.model.generate(  # type: ignore[operator]
            ids.to(device), attention_mask=mask.to(device), generation_config=greedy(new)
        )
        return found[:, longest:].tolist(), {}

    yield serve


@contextmanager
def continuous(loaded: LoadedModel, implementation: str) -> Iterator[Serve]:
    """Transformers' own continuous batching, its manager kept from the first call to the last where it can be."""
    loaded.model.set_attn_implementation(implementation)
    generate = loaded.model.generate_batch  # type: ignore[operator]
    kept = {"persistent_manager": True} if "persistent_manager" in signature(generate).parameters else {}

    def serve(prompts: Sequence[Sequence[int]], new: int) -> tuple[Tokens, dict[str, Any]]:
        asked = [list(prompt) for prompt in prompts]
        found = generate(asked, generation_config=greedy(new), progress_bar=False, **kept)
        failed = [answer.error for answer in found.values() if answer.error]
        if failed:
            raise RuntimeError(failed[0])
        by_prompt = {tuple(answer.prompt_ids): list(answer.generated_tokens) for answer in found.values()}
        return [by_prompt[tuple(prompt)] for prompt in prompts], {}

    try:
        yield serve
    finally:
        getattr(loaded.model, "destroy_cached_continuous_batching_manager", lambda: None)()


def greedy(new: int) -> GenerationConfig:
    """So many tokens, whatever they are."""
    return GenerationConfig(
        max_new_tokens=new, min_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=True
    )


def measure(name: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All ways on one model; it is checked in float32 once, and only if one of faback's ways is asked for."""
    loaded = MODELS[name](getattr(torch, args.dtype), args.device)
    prompts = prompts_of(loaded, args.requests, args.longest)
    for row in timed(loaded, prompts, cache(partial(exactly_equal, name, args)), args):
        yield {"model": loaded.name, "dtype": args.dtype, "requests": args.requests, "new_tokens": args.new} | row


def timed(
    loaded: LoadedModel, prompts: list[list[int]], exact: Callable[[], int], args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """A row per way, the slow ones last."""
    pages = sum(-(-(len(prompt) + args.new + 64) // 16) for prompt in prompts) + 64
    options: dict[str, Any] = {
        "num_pages": pages,
        "page_size": 16,
        "max_requests": args.requests,
        "tokens_per_step": args.tokens_per_step,
        "context_len": args.longest + args.new + 128,
    }
    on_gpu = loaded.model.device.type == "cuda"
    makers: list[tuple[str, Callable[[], AbstractContextManager[Serve]]]] = [("faback", lambda: paged(loaded, options))]
    drafting = options | {"drafter": PromptLookup()}
    makers.append(("faback, speculation", lambda: paged(loaded, drafting)))
    if on_gpu:
        makers.insert(1, ("faback, graphs", lambda: paged(loaded, options | {"graphs": True})))
        makers.append(("faback, graphs and speculation", lambda: paged(loaded, drafting | {"graphs": True})))
    makers.append(("transformers, continuous batching", lambda: continuous(loaded, args.continuous)))
    makers.append(("transformers, sdpa, one padded batch", lambda: padded(loaded, "sdpa")))
    wanted = [reference(loaded, prompt, args.new) for prompt in prompts[:CHECKED_REQUESTS]]
    for label, make in makers:
        if args.only not in label:
            continue
        row: dict[str, Any] = {"way": label}
        try:
            row |= figures(make, prompts, args.new, wanted)
        except Exception as error:  # noqa: BLE001  the other ways go on
            row["failed"] = f"{type(error).__name__}: {error}"[:300]
        if label.startswith("faback"):
            row[f"float32_equal_of_{CHECKED_REQUESTS}"] = exact()
        yield row


def figures(
    make: Callable[[], AbstractContextManager[Serve]], prompts: list[list[int]], new: int, wanted: list[list[int]]
) -> dict[str, Any]:
    """One way, warmed up and timed."""
    with make() as serve:
        serve(prompts, new)
        synchronise()
        start = perf_counter()
        found, more = serve(prompts, new)
        synchronise()
        seconds = perf_counter() - start
    count = sum(map(len, found))
    if count != new * len(prompts):
        raise RuntimeError(f"wanted {new * len(prompts)} tokens, got {count}")
    same = [first_difference(ours, theirs) for ours, theirs in zip(found, wanted, strict=False)]
    agreed = {"same_tokens_as_sdpa": sum(same), "of_tokens": new * len(wanted)}
    return {"tokens_per_second": round(count / seconds, 1), "seconds": round(seconds, 3), **agreed, **more}


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens are equal before one is not."""
    pairs = zip(ours, theirs, strict=False)
    return next((index for index, pair in enumerate(pairs) if pair[0] != pair[1]), min(len(ours), len(theirs)))


def exactly_equal(name: str, args: argparse.Namespace) -> int:
    """How many of a few requests have all tokens equal to `sdpa` in float32."""
    loaded = MODELS[name](torch.float32, args.device)
    prompts = prompts_of(loaded, CHECKED_REQUESTS, min(args.longest, 384))
    loaded.model.set_attn_implementation("sdpa")
    new = min(args.new, CHECKED_TOKENS)
    wanted = [reference(loaded, prompt, new) for prompt in prompts]
    with PagedGenerator(loaded.model, eos_token_ids=(), num_pages=256, max_requests=CHECKED_REQUESTS) as generator:
        found = [list(done.tokens) for done in generator.generate(prompts, max_new_tokens=new)]
    equal = sum(ours == theirs[: len(ours)] for ours, theirs in zip(found, wanted, strict=True))
    del loaded, generator
    gc.collect()
    torch.cuda.empty_cache()
    return equal


def synchronise() -> None:
    """Waits for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def arguments(line: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=sorted(MODELS), help="may be given several times")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--new", type=int, default=128, help="tokens to generate for each request")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of the longest prompt")
    parser.add_argument("--tokens-per-step", type=int, default=4096)
    parser.add_argument("--continuous", default="paged|sdpa", help="implementation of continuous batching")
    parser.add_argument("--only", default="", help="ways whose name contains this")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit")
    return parser.parse_args(line)


def main(line: Sequence[str] | None = None) -> None:
    """Measures, prints, and writes a report."""
    args = arguments(line)
    torch.backends.cuda.matmul.allow_tf32 = False
    rows: list[dict[str, Any]] = []
    gpu = environment(args.commit) if args.json and torch.cuda.is_available() else {"gpu": None}
    report = gpu | {"transformers": transformers.__version__, "suite": "engine", "rows": rows}
    for name in args.model or ("llama-3-8b", "gemma-3-4b"):
        for row in measure(name, args):
            print(row, flush=True)
            rows.append(row)
            if args.json:  # after each row: the slow ways come last
                write_json(args.json, report)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
