"""`faback doctor`: what works on this machine, and why the rest does not."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib import import_module
from typing import Any

import attrs
import torch
from rich.console import Console
from rich.text import Text

import faback
from faback.builtins import BUILTINS
from faback.cli.output import AsJson, DeviceName, main_console, parse_device, print_json, table
from faback.core.config import BackendConfig
from faback.core.errors import FabackError
from faback.core.kernel import Capabilities, KernelProvider, KernelRequest
from faback.core.registry import Contribution, PluginRecord, Registry


@attrs.frozen
class KernelReport:
    """One kernel provider.

    Attributes:
        name: its name.
        plugin, distribution: where it comes from.
        available: whether it can run on this machine.
        problem: why not.
        abilities: its capabilities in words, by aspect.
        objections: why it would not serve an ordinary decode step, if it would not.
    """

    name: str
    plugin: str
    distribution: str
    available: bool
    problem: str = ""
    abilities: dict[str, str] = attrs.field(factory=dict)
    objections: list[str] = attrs.field(factory=list)


@attrs.frozen
class Diagnosis:
    """What the doctor found.

    Attributes:
        environment: versions and the device, in words.
        kernels: all kernels, best first.
        plugins: all plugins and what became of them.
        problems: what is wrong beyond single plugins, for example two that bring the same mode.
    """

    environment: dict[str, str]
    kernels: list[KernelReport]
    plugins: list[PluginRecord]
    problems: list[str]


def command(as_json: AsJson = False, device: DeviceName = None) -> None:
    """Show the environment, the kernels and the plugins, with every reason why something is not available."""
    found = examine(parse_device(device))
    if as_json:
        print_json(attrs.asdict(found))
    else:
        show(found, main_console())


def examine(device: torch.device, registry: Registry | None = None) -> Diagnosis:
    """Looks at the machine and at all plugins; whatever they do wrong becomes part of the diagnosis.

    Args:
        device: where kernels would run.
        registry: plugins; the built-in and the installed ones unless given.
    """
    config = BackendConfig(context_len=1)
    registry = Registry.load(config, BUILTINS) if registry is None else registry
    problems: list[str] = []
    for collect in (registry.modes, registry.overlays, registry.lowerings):
        _attempt(problems, collect, config)
    kernels = _attempt(problems, registry.kernels, device) or []
    _attempt(problems, registry.device_ops, device)
    reports = [_kernel(contribution, device) for contribution in kernels]
    return Diagnosis(environment(device), reports, list(registry.records), problems)


def environment(device: torch.device) -> dict[str, str]:
    """Versions and the device, in words."""
    found = {
        "faback": faback.__version__,
        "python": f"{platform.python_version()} on {platform.platform(terse=True)}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none (this torch is built without it)",
        "triton": _version("triton"),
        "device": str(device),
        "processor": f"{os.cpu_count()} CPUs, torch uses {torch.get_num_threads()} threads",
    }
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        found[f"gpu {index}"] = f"{properties.name}, sm_{properties.major}{properties.minor}, {memory:.0f} GiB"
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith("FABACK_")}
    return found | variables


def show(found: Diagnosis, console: Console) -> None:
    """Prints a diagnosis."""
    console.print(table("Environment", ("what", "found"), found.environment.items()))
    columns = ("kernel", "state", "distribution", "notes")
    console.print(table("Kernels, by rank", columns, map(_kernel_row, found.kernels)))
    rows = [(p.name, _state(p.status), p.distribution, p.path, _last_line(p.problem)) for p in found.plugins]
    console.print(table("Plugins", ("plugin", "state", "distribution", "file", "problem"), rows))
    for plugin in found.plugins:
        if plugin.problem:
            console.print(Text(f"{plugin.name} ({plugin.distribution}) is broken:", style="bold red"))
            console.print(Text(plugin.problem.rstrip()))
    for problem in found.problems:
        console.print(Text(problem, style="bold red"))


def _kernel(contribution: Contribution[KernelProvider], device: torch.device) -> KernelReport:
    kernel = contribution.value
    report = KernelReport(kernel.name, contribution.plugin, contribution.distribution, available=False)
    try:
        problem = contribution.guard(kernel.probe, device)
        if problem is not None:
            return attrs.evolve(report, problem=problem)
        abilities = _abilities(contribution.guard(kernel.capabilities, device))
        rejections = contribution.guard(kernel.reject, _ordinary_decode(device), device)
    except FabackError as error:
        return attrs.evolve(report, problem=str(error))
    objections = [str(reason).removeprefix(f"{kernel.name}: ") for reason in rejections]
    return attrs.evolve(report, available=True, abilities=abilities, objections=objections)


def _ordinary_decode(device: torch.device) -> KernelRequest:
    """A decode step as most models need it."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return KernelRequest(
        forward_mode="decode",
        device=device.type,
        arch=major * 10 + minor,
        q_dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16,
        num_q_heads=32,
        num_kv_heads=8,
        head_dim=128,
        v_head_dim=128,
        page_size=16,
        features=frozenset(),
    )


def _abilities(can: Capabilities) -> dict[str, str]:
    def names(values: frozenset[Any]) -> str:
        return ", ".join(sorted(str(v).removeprefix("torch.") for v in values)) or "none"

    dims = f"up to {can.max_head_dim}" if can.max_head_dim else "any"
    return {
        "devices": names(can.devices),
        "architectures": f"{can.min_arch or 'any'} to {can.max_arch or 'any'}",
        "q dtypes": names(can.q_dtypes),
        "kv dtypes": names(can.kv_dtypes),
        "head dims": dims + (f", multiples of {can.head_dim_multiple}" if can.head_dim_multiple > 1 else ""),
        "page sizes": f"multiples of {can.page_multiple}" if can.page_multiple > 1 else "any",
        "features": names(can.features),
    }


def _kernel_row(kernel: KernelReport) -> tuple[object, ...]:
    if not kernel.available:
        return kernel.name, _state("not here"), kernel.distribution, kernel.problem
    notes = [f"{aspect}: {ability}" for aspect, ability in kernel.abilities.items()]
    notes += [f"refuses an ordinary bfloat16 decode with pages of 16: {reason}" for reason in kernel.objections]
    return kernel.name, _state("available"), kernel.distribution, "\n".join(notes)


def _state(word: str) -> Text:
    colour = {"available": "green", "loaded": "green", "broken": "bold red"}.get(word, "yellow")
    return Text(word, style=colour)


def _attempt(problems: list[str], call: Callable[..., Any], *args: Any) -> Any:
    """The call's result; None, and a problem noted, if faback or a plugin refuses."""
    try:
        return call(*args)
    except FabackError as error:
        problems.append(str(error))
    except Exception as error:  # noqa: BLE001 - the doctor reports whatever goes wrong and goes on
        problems.append(f"{getattr(call, '__name__', call)} raised {error!r}")
    return None


def _version(package: str) -> str:
    try:
        return str(import_module(package).__version__)
    except Exception as error:  # noqa: BLE001 - an installed package may fail to import in any way
        return f"not usable: {error!r}"


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]
