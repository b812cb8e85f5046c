"""`faback demo`: a real model serves several prompts at once, and every token is compared with Transformers' own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from faback.core.errors import FabackError

if TYPE_CHECKING:
    from faback_transformers.comparison import Comparison
    from faback_transformers.requests import Event
    from faback_transformers.weights import LoadedModel

STORY = (
    "The lighthouse keeper wrote every evening into the same grey book. On the first of March he noted that the wind "
    "had turned to the north, that two fishing boats had come back late, and that the lamp had burned a litre more oil "
    "than usual. On the second he noted nothing, because the storm had broken the window above his desk and the rain "
    "had soaked the paper. On the third he dried the pages by the stove, one by one, and found between them a letter "
    "that was not his. It was addressed to a woman in the village, it was forty years old, and it had never been "
    "opened. He put on his coat, walked down the long stairs and along the causeway, and knocked at her door."
)

PROMPTS: tuple[tuple[bool, str], ...] = (
    (True, "What is the capital of France?"),
    (False, "The largest planet in the solar system is"),
    (True, f"Who found the letter in this story, and what did he do with it?\n\n{STORY}"),
    (False, "Once upon a time, in a small village by the sea,"),
    (True, "Write one sentence about the moon."),
    (False, "def fibonacci(n):\n    "),
    (True, "Give me three tips for staying healthy."),
    (False, "1, 2, 3, 4, 5,"),
)
"""Whether the chat template is used, and the text."""


VERSE = """\
Ten green bottles hanging on the wall,
Ten green bottles hanging on the wall,
And if one green bottle should accidentally fall,
There'll be nine green bottles hanging on the wall.

Nine green bottles"""

RECORDS = """\
[
  {"id": 1, "name": "Anna", "role": "engineer", "city": "Paris"},
  {"id": 2, "name": "Ben", "role": "designer", "city": "Rome"},
  {"id": 3, "name": "Clara", "role": "engineer", "city": "Paris"},
  {"id": 4,"""

REPETITIVE: tuple[tuple[bool, str], ...] = (
    (True, f"Correct the spelling of this text and change nothing else.\n\n{STORY}"),
    (False, VERSE),
    (False, RECORDS),
    (True, "What is the capital of France?"),
)
"""Prompts for speculation by look-up: it lives on answers that repeat what is there, as three of these do."""


def demo(
    prompts: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="A question; may be given several times.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for each prompt.")] = 48,
    as_json: Annotated[bool, typer.Option("--json", help="Print the final table alone, as JSON.")] = False,
    speculative: Annotated[
        bool,
        typer.Option("--speculative", help="Verify trees of drafts from prompt look-up; compare with plain decoding."),
    ] = False,
    random_weights: Annotated[bool, typer.Option("--random", help="A small random model; needs no weights.")] = False,
    device: Annotated[str, typer.Option(help="'auto' takes the GPU where there is one.")] = "auto",
    kernels: Annotated[str, typer.Option(help="'auto', or the name of a kernel.")] = "auto",
    graphs: Annotated[bool, typer.Option(help="On a GPU, run decode and verify passes as CUDA graphs.")] = True,
    num_pages: Annotated[int, typer.Option(min=1, help="Pages of the KV pool.")] = 128,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens per page.")] = 16,
    tokens_per_step: Annotated[int, typer.Option(min=1, help="Tokens of one forward pass at most.")] = 128,
) -> None:
    """Serve several prompts at once with a real model, and compare every token with Transformers' own attention.

    Exits with 1 if any token differs.
    """
    console = Console(stderr=as_json)
    try:
        from faback_transformers import PromptLookup
        from faback_transformers.comparison import compare
    except ModuleNotFoundError as error:
        console.print(f"[red]The demo needs the package faback-transformers[/] ({error}).")
        console.print("From a checkout: pip install -e plugins/faback-transformers")
        raise typer.Exit(2) from None
    try:
        loaded = _load(device, random_weights, console)
        asked = [(True, text) for text in prompts] if prompts else list(REPETITIVE if speculative else PROMPTS)
        view = _Answers(console, asked, loaded)
        with view.live:
            result = compare(
                loaded,
                view.tokens,
                max_new_tokens=max_new_tokens,
                on_event=view.show,
                on_note=view.note,
                drafter=PromptLookup() if speculative else None,
                kernels=kernels,
                graphs=graphs and loaded.model.device.type == "cuda",
                num_pages=num_pages,
                page_size=page_size,
                max_requests=len(asked),
                tokens_per_step=tokens_per_step,
            )
    except FabackError as error:
        console.print(f"[red]{type(error).__name__}[/]: {error}", highlight=False)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(result.as_dict(), indent=2))
    else:
        _report(console, asked, result)
    if not result.equal:
        raise typer.Exit(1)


class _Answers:
    """The answers as they grow, one row per prompt."""

    def __init__(self, console: Console, asked: list[tuple[bool, str]], loaded: LoadedModel) -> None:
        self.tokens = [_encode(loaded, chat, text) for chat, text in asked]
        self._asked = asked
        self._texts = [""] * len(asked)
        self._counts = [0] * len(asked)
        self._note = "serving"
        self._real = loaded.tokenizer is not None
        self.live = Live(get_renderable=self._table, console=console, refresh_per_second=8)

    def show(self, event: Event) -> None:
        """Takes in one event."""
        self._counts[event.request_id] += event.token is not None
        self._texts[event.request_id] += event.text if self._real or event.token is None else f"{event.token} "

    def note(self, note: str) -> None:
        """Says what is going on."""
        self._note = note

    def _table(self) -> Table:
        table = Table(title=self._note, show_lines=True, expand=True)
        table.add_column("prompt", ratio=2)
        table.add_column("answer", ratio=5)
        table.add_column("tokens", justify="right")
        for (_, prompt), text, count in zip(self._asked, self._texts, self._counts, strict=True):
            table.add_row(Text(_short(prompt)), Text(text.strip()), str(count))
        return table


def _load(device: str, random_weights: bool, console: Console) -> LoadedModel:
    """The real model, or a random one where there are no weights.

    float32 on every device: tokens are compared one by one, and in 16 bits a different order of the same sums already
    turns near ties around.
    """
    from faback_transformers.weights import random_model, smollm2

    place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    console.print(f"float32 on {place}: exact enough for every token to be compared", style="dim", highlight=False)
    if not random_weights:
        try:
            return smollm2(device=place, say=lambda message: console.print(message, style="dim", highlight=False))
        except FabackError as error:
            console.print(f"[yellow]No real weights, so a small random model is used.[/] {error}", highlight=False)
    return random_model(device=place)


def _encode(loaded: LoadedModel, chat: bool, text: str) -> list[int]:
    tokenizer: Any = loaded.tokenizer
    if tokenizer is None:
        return [1 + byte % 500 for byte in text.encode()]
    if chat:
        turns = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text)["input_ids"])


def _report(console: Console, asked: list[tuple[bool, str]], result: Comparison) -> None:
    """The final tables."""
    table = Table(title=f"{result.model}, {result.dtype} on {result.device}: tokens against sdpa")
    for name in ("prompt", "prompt tokens", "new tokens", "ended by", "equal to sdpa"):
        table.add_column(name, justify="right" if name.endswith("tokens") else "left")
    for (_, prompt), row in zip(asked, result.prompts, strict=True):
        verdict = "[green]all[/]" if row.equal else f"[red]differs from token {row.first_difference}[/]"
        table.add_row(Text(_short(prompt)), str(row.prompt_tokens), str(row.new_tokens), row.finished, verdict)
    console.print(table)
    stats, cost = result.stats, result.overhead
    facts = Table(show_header=False)
    facts.add_row("faback, all prompts at once", f"{result.faback_tokens_per_second:.1f} tokens/s, {stats.steps} steps")
    if stats.graph_steps:
        facts.add_row("of these as CUDA graphs", str(stats.graph_steps))
    gain = result.speculation
    if gain is not None:
        plain = f"{gain.plain_tokens_per_second:.1f} tokens/s, {gain.plain_steps} steps"
        facts.add_row("faback without speculation", plain)
        facts.add_row("speed-up by speculation", f"{gain.speed_up:.2f}")
        accepted = f"{gain.acceptance_length:.2f} tokens per request and verify pass"
        facts.add_row("acceptance length", accepted)
        facts.add_row("drafts", f"{stats.drafted_tokens} verified, {stats.accepted_tokens} accepted")
    facts.add_row("sdpa, one prompt at a time", f"{result.sdpa_tokens_per_second:.1f} tokens/s")
    facts.add_row("KV pages", f"{stats.pages_peak} of {stats.pages_total} at the peak, {stats.pages_used} in use now")
    facts.add_row("preemptions", str(stats.preemptions))
    facts.add_row("facade's host time", f"{cost.forward_us:.1f} us per layer, {cost.plan_us:.0f} us per step to plan")
    facts.add_row("kernel", result.kernel)
    for reason in result.reasons:
        facts.add_row("", Text(reason, style="dim"))
    console.print(facts)
    both = "sdpa's" if gain is None else "sdpa's, and that of plain decoding"
    console.print(f"[green]Every token equals {both}.[/]" if result.equal else "[red]Tokens differ.[/]")


def _short(text: str, limit: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 3]}..."
