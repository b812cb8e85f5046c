"""A batch named on the command line, as `faback show` and `faback modes --plan` look at it: a scenario, on the CPU."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import attrs
import typer

from faback.cli.check import choose, load_registry
from faback.core.backend import AttentionBackend
from faback.core.batch import ForwardBatch
from faback.core.errors import ConfigError
from faback.core.registry import Registry
from faback.testing import MODES, OVERLAYS, Options, Scenario, impossible

ModeName = Annotated[str, typer.Option("--mode", help="Forward mode: " + ", ".join(MODES))]
OverlayName = Annotated[
    str | None,
    typer.Option("--overlay", help=f"Which layers there are: {', '.join(OVERLAYS)} (default: as the others say)."),
]
PageSize = Annotated[int, typer.Option("--page-size", min=1, help="Tokens per page.")]
Lengths = Annotated[
    str | None,
    typer.Option("--lengths", help="Tokens per request, CACHED+NEW or N, like 8+1,3+6 (default: drawn)."),
]
EncoderLengths = Annotated[str | None, typer.Option("--encoder-lengths", help="Encoder tokens per request, like 5,9.")]
Window = Annotated[int | None, typer.Option("--window", min=0, help="Sliding window: tokens seen to the left.")]
Chunk = Annotated[int | None, typer.Option("--chunk", min=1, help="Local attention: tokens per chunk.")]
Sinks = Annotated[bool, typer.Option("--sinks", help="A sink logit per head.")]
Hybrid = Annotated[bool, typer.Option("--hybrid", help="Layers with a window or chunk have a smaller pool.")]
Topk = Annotated[int, typer.Option("--topk", min=1, help="Speculation: branches; more than one make a tree.")]
DraftTokens = Annotated[int, typer.Option("--draft-tokens", min=1, help="Speculation: steps, and tokens to verify.")]
PaddedRows = Annotated[int, typer.Option("--padded-rows", min=0, help="Rows of padding behind the requests.")]
Seed = Annotated[int, typer.Option("--seed", help="Of what is drawn.")]
KernelName = Annotated[str, typer.Option("--kernel", help="A kernel's name, or auto.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help='Settings of a plugin, like \'streaming-llm={"sinks": 2, "window": 5}\'.'),
]


@attrs.frozen(eq=False)
class Scene:
    """A backend that is about to plan a batch.

    Attributes:
        backend: passes before this one are planned already.
        batch: the one that is looked at.
        name: what makes it again.
    """

    backend: AttentionBackend
    batch: ForwardBatch
    name: str


def described(
    mode: str,
    overlay: str | None,
    *,
    lengths: str | None = None,
    encoder_lengths: str | None = None,
    window: int | None = None,
    chunk: int | None = None,
    draft_tokens: int = 4,
    **more: Any,
) -> Options:
    """What the options of a command describe.

    Args:
        mode: the forward mode.
        overlay: which layers; where it is None, what window, chunk and encoder call for.
        lengths: "CACHED+NEW" or "N" per request, with commas between them.
        encoder_lengths: one number per request.
        window, chunk: of the layers that have one.
        draft_tokens: steps of drafting, and tokens to verify.
        more: fields of `Options` as they are.

    Raises:
        ConfigError: unknown names, numbers that are none, or a combination that means nothing.
    """
    choose("--mode", [mode], MODES)
    usual = "cross" if encoder_lengths else "window" if window is not None else "local" if chunk is not None else "full"
    layers = usual if overlay is None else choose("--overlay", [overlay], OVERLAYS)[0]
    for option, given, fitting in (
        ("--window", window, ("window", "prefill_aware", "cross", "mla", "encoder_only")),
        ("--chunk", chunk, ("local",)),
        ("--encoder-lengths", encoder_lengths, ("cross",)),
    ):
        if given is not None and layers not in fitting:
            raise ConfigError(option, wanted=f"overlay {' or '.join(fitting)}", got=f"overlay {layers}")
    texts = None if lengths is None else tuple(_length(mode, word) for word in lengths.split(","))
    encoders = None if encoder_lengths is None else tuple(_numbers("--encoder-lengths", encoder_lengths, ","))
    if layers == "cross" and encoders is not None and len(encoders) != len(texts or ()):
        wanted = f"{len(encoders)} requests, one for each of --encoder-lengths"
        raise ConfigError("--lengths", wanted=wanted, got=lengths or "none given")
    options = Options(
        mode=mode,
        overlay=layers,
        lengths=texts,
        encoder_lengths=encoders,
        windows=None if window is None else (window,),
        chunk=chunk,
        num_steps=draft_tokens,
        num_draft_tokens=draft_tokens,
        **more,
    )
    reason = impossible(options)
    if reason is not None:
        raise ConfigError(f"mode {mode} with overlay {layers}", wanted="a batch that means something", got=reason)
    return options


def set_up(
    options: Options, kernel: str = "auto", settings: Sequence[str] = (), registry: Registry | None = None
) -> Scene:
    """Makes the scenario, a backend for it, and plans the passes before the one that is asked about.

    Args:
        options: of the scenario; the last pass in its mode is the one, or the last of all where it has none.
        kernel: "auto", or the kernel that is pinned.
        settings: of plugins, NAME=JSON.
        registry: plugins; the built-in and the installed ones unless given.

    Raises:
        FabackError: whatever the backend raises.
    """
    scenario = Scenario.make(**attrs.asdict(options, recurse=False))
    chosen = dict(_setting(text) for text in settings)
    config = attrs.evolve(scenario.config, kernels=kernel, options={**scenario.config.options, **chosen})
    pools = scenario.pools()
    backend = AttentionBackend(config, pools, scenario.layers, registry=registry or load_registry())
    there = [number for number, step in enumerate(scenario.steps) if step.batch.forward_mode == options.mode]
    last = there[-1] if there else len(scenario.steps) - 1
    for step in scenario.steps[:last]:
        step.enter(pools)
        backend.plan(step.batch)
    scenario.steps[last].enter(pools)
    more = "".join(f", {name}={value}" for name, value in chosen.items())
    return Scene(backend, scenario.steps[last].batch, f"{scenario}, kernel {kernel}{more}")


def _length(mode: str, word: str) -> tuple[int, int]:
    """(cached, new); of N tokens, the mode's usual ones are new."""
    numbers = _numbers("--lengths", word, "+")
    if len(numbers) == 2:
        return numbers[0], numbers[1]
    if len(numbers) != 1:
        raise ConfigError("--lengths", wanted="CACHED+NEW or N for each request", got=repr(word))
    if mode in ("decode", "idle"):
        return max(0, numbers[0] - 1), 1
    return (numbers[0], 0) if mode in ("draft_decode", "target_verify") else (0, numbers[0])


def _numbers(option: str, text: str, separator: str) -> list[int]:
    words = [word.strip() for word in text.split(separator)]
    if not all(word.isdecimal() for word in words):
        raise ConfigError(option, wanted=f"numbers with {separator!r} between them", got=repr(text))
    return [int(word) for word in words]


def _setting(text: str) -> tuple[str, Mapping[str, Any]]:
    name, equals, value = text.partition("=")
    try:
        found = json.loads(value if equals else "{}")
    except ValueError as error:
        raise ConfigError("--set", wanted="NAME=JSON", got=repr(text), hint=str(error)) from error
    if not name or not isinstance(found, dict):
        raise ConfigError("--set", wanted="NAME={...}, a JSON object", got=repr(text))
    return name, found
