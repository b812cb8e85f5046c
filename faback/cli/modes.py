"""`faback modes`: what there is, and where it comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import attrs
import torch
import typer
from rich.console import Console

from faback.builtins import BUILTINS
from faback.cli import contributions
from faback.cli.output import AsJson, DeviceName, first_line, main_console, parse_device, print_json, table
from faback.cli.scenes import (
    Chunk,
    DraftTokens,
    EncoderLengths,
    Hybrid,
    KernelName,
    Lengths,
    ModeName,
    OverlayName,
    PageSize,
    Seed,
    Settings,
    Sinks,
    Topk,
    Window,
    described,
    set_up,
)
from faback.core.config import BackendConfig
from faback.core.errors import ConfigError, FabackError
from faback.core.registry import Contribution, Registry


@attrs.frozen
class Entry:
    """One contribution.

    Attributes:
        key: its name.
        plugin: the plugin that brings it.
        distribution: the package that the plugin comes from.
        summary: first line of its docstring.
        optional: it is there only if `BackendConfig.options` has an entry for its plugin.
    """

    key: str
    plugin: str
    distribution: str
    summary: str
    optional: bool = False


@attrs.frozen
class Catalogue:
    """Everything that plugins contribute, each list in the order that counts."""

    modes: list[Entry]
    overlays: list[Entry]
    lowerings: list[Entry]
    kernels: list[Entry]


class Asked(Mapping[str, Mapping[str, Any]]):
    """No options at all, and a note of which ones plugins ask for.

    Attributes:
        names: their names.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        self.names.add(name)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def command(
    ctx: typer.Context,
    plan: Annotated[bool, typer.Option("--plan", help="Instead, who contributes what to a batch, on the CPU.")] = False,
    mode: ModeName = "decode",
    overlay: OverlayName = None,
    page_size: PageSize = 4,
    lengths: Lengths = None,
    encoder_lengths: EncoderLengths = None,
    window: Window = None,
    chunk: Chunk = None,
    sinks: Sinks = False,
    hybrid: Hybrid = False,
    topk: Topk = 1,
    draft_tokens: DraftTokens = 4,
    seed: Seed = 0,
    kernel: KernelName = "auto",
    settings: Settings = None,
    as_json: AsJson = False,
    device: DeviceName = None,
) -> None:
    """List forward modes, overlays, lowerings and kernels, and who brings them; or what they make of a batch."""
    _check_given(ctx, plan)
    if plan:
        options = described(
            mode,
            overlay,
            lengths=lengths,
            encoder_lengths=encoder_lengths,
            window=window,
            chunk=chunk,
            draft_tokens=draft_tokens,
            page_size=page_size,
            sinks=sinks,
            hybrid=hybrid,
            topk=topk,
            seed=seed,
        )
        scene = set_up(options, kernel, settings or ())
        kinds = contributions.contributions(scene)
        if as_json:
            print_json(contributions.as_data(kinds))
        else:
            contributions.show(kinds, scene.name, main_console())
        return
    found = catalogue(parse_device(device))
    if as_json:
        print_json(attrs.asdict(found))
    else:
        show(found, main_console())


def _check_given(ctx: typer.Context, plan: bool) -> None:
    """Raises for an option that would not be heeded."""
    unheeded = {"device"} if plan else set(ctx.params) - {"plan", "as_json", "device"}
    given = sorted(name for name in unheeded if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE")
    if given:
        options = ", ".join("--" + {"settings": "set"}.get(name, name).replace("_", "-") for name in given)
        raise ConfigError(options, wanted="no --plan, which is made on the CPU" if plan else "--plan as well", got=None)


def catalogue(device: torch.device) -> Catalogue:
    """Lists the contributions of all installed plugins, those that an option switches on included.

    Raises:
        PluginError: two plugins bring the same thing.
    """
    asked = Asked()
    usual = collect(BackendConfig(context_len=1, options=asked), device)
    legal = [name for name in sorted(asked.names) if _accepts(name, device)]
    every = collect(BackendConfig(context_len=1, options={name: {} for name in legal}), device)
    return Catalogue(**{name: _marked(getattr(usual, name), getattr(every, name)) for name in _SECTIONS})


def _accepts(option: str, device: torch.device) -> bool:
    """Whether an empty entry in the options suffices; some parts need more than that, a process group for instance."""
    try:
        collect(BackendConfig(context_len=1, options={option: {}}), device)
    except FabackError:
        return False
    return True


def collect(config: BackendConfig, device: torch.device, registry: Registry | None = None) -> Catalogue:
    """Lists what plugins contribute under a configuration. Raises like `catalogue`."""
    registry = Registry.load(config, BUILTINS) if registry is None else registry
    return Catalogue(
        modes=[_entry(c) for c in registry.modes(config).values()],
        overlays=[_entry(c) for c in registry.overlays(config)],
        lowerings=[_entry(c) for c in registry.lowerings(config)],
        kernels=[_entry(c) for c in registry.kernels(device)],
    )


def show(found: Catalogue, console: Console) -> None:
    """Prints a catalogue as tables."""
    for name, title in _SECTIONS.items():
        entries: list[Entry] = getattr(found, name)
        rows = [(e.key, e.distribution, e.plugin, e.summary + _note(e)) for e in entries]
        console.print(table(title, ("key", "distribution", "plugin", "what it is"), rows))


_SECTIONS = {
    "modes": "Forward modes",
    "overlays": "Overlays, in the order in which they apply",
    "lowerings": "Lowerings, the first to be tried first",
    "kernels": "Kernels, by rank",
}


def _entry(contribution: Contribution[Any]) -> Entry:
    value = contribution.value
    key = getattr(value, "key", None) or value.name
    return Entry(key, contribution.plugin, contribution.distribution, first_line(value))


def _marked(usual: list[Entry], every: list[Entry]) -> list[Entry]:
    """All entries, optional ones marked; the usual ones alone where options drove some of them away."""
    known = {entry.key for entry in usual}
    if known - {entry.key for entry in every}:
        return usual
    return [attrs.evolve(entry, optional=entry.key not in known) for entry in every]


def _note(entry: Entry) -> str:
    return " (switched on by an entry in config.options)" if entry.optional else ""
