"""Which plugins there are, what each contributes, and in which order it counts.

Built-ins come first, then entry points of group `faback`, one at a time, so that a broken one is recorded and the
others work on. Nothing depends on the order of registration.
"""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module, metadata
from typing import Any, Generic, Literal, Protocol, TypeVar

import attrs
import pluggy
import torch

from faback.core.config import BackendConfig
from faback.core.contracts import Lowering, Mode, Overlay
from faback.core.errors import CapacityError, FabackError, PluginError
from faback.core.hooks import CONTRACT, PROJECT, HookSpecs
from faback.core.kernel import KernelProvider, KernelRequest
from faback.core.workspace import DeviceOps

ENTRY_POINT_GROUP = "faback"
DISABLE_VARIABLE = "FABACK_DISABLE_PLUGINS"
"""Environment variable: names of plugins that are not loaded."""
ALLOW_VARIABLE = "FABACK_PLUGINS"
"""Environment variable: names of the only entry points that are loaded; empty for none."""

T = TypeVar("T")


@attrs.frozen
class PluginRecord:
    """One plugin and what became of it.

    Attributes:
        name: entry point name, or module name of a built-in.
        distribution: the installed package and its version that it comes from.
        status: "loaded", "broken" (see `problem`), "blocked" by name, or "not allowed" by a list of those that are.
        problem: traceback of a broken one.
        path: the file that was loaded, "" where none was.
    """

    name: str
    distribution: str
    status: Literal["loaded", "broken", "blocked", "not allowed"]
    problem: str = ""
    path: str = ""


@attrs.frozen(eq=False)
class Contribution(Generic[T]):
    """An object and the plugin that it came from."""

    value: T
    plugin: str
    distribution: str

    def __str__(self) -> str:
        return f"{getattr(self.value, 'key', None) or getattr(self.value, 'name', self.value)} ({self.distribution})"

    def guard(self, call: Callable[..., Any], *args: Any) -> Any:
        """Calls into the plugin; what it raises is what `fault` makes of it."""
        try:
            return call(*args)
        except Exception as error:
            fault = self.fault(call, error)
            if fault is error:
                raise
            raise fault from error

    def fault(self, call: Callable[..., Any], error: Exception) -> Exception:
        """What to raise for an exception of the plugin's `call`: a `PluginError` that names the plugin.

        Errors of faback pass as they are, and so does `torch.OutOfMemoryError`, which is nobody's fault and which
        engines answer by freeing memory.
        """
        if isinstance(error, CapacityError):
            return error if error.asked_by else error.of(f"{self}, plugin {self.plugin!r}")
        if isinstance(error, (FabackError, torch.OutOfMemoryError)):
            return error
        what = f"{getattr(call, '__name__', call)} of {self}, plugin {self.plugin!r}, raised"
        hint = f"The plugin is at fault; {DISABLE_VARIABLE}={self.plugin} switches it off."
        return PluginError(what, got=repr(error), hint=hint)


class EntryPoint(Protocol):
    """The part of `importlib.metadata.EntryPoint` that loading needs."""

    @property
    def name(self) -> str: ...

    def load(self) -> Any: ...


@attrs.define(eq=False)
class Registry:
    """All plugins of one backend.

    Attributes:
        records: every plugin that was found, with its fate.
    """

    records: list[PluginRecord] = attrs.field(factory=list)
    _required: frozenset[str] = frozenset()
    _manager: pluggy.PluginManager = attrs.field(factory=lambda: pluggy.PluginManager(PROJECT))

    def __attrs_post_init__(self) -> None:
        self._manager.add_hookspecs(HookSpecs)

    @classmethod
    def load(
        cls,
        config: BackendConfig,
        builtins: Sequence[str],
        entry_points: Iterable[EntryPoint] | None = None,
    ) -> Registry:
        """Loads the built-in modules, then the entry points that are allowed and not blocked. No others are imported.

        Args:
            config: `allow_plugins`, `disable_plugins` and `require_plugins` are honoured here.
            builtins: module names.
            entry_points: what to load instead of the installed group `faback`, for tests and embedding.

        Raises:
            PluginError: a required plugin is missing, broken or left out, or two plugins collide.
        """
        registry = cls(required=frozenset(config.require_plugins))
        blocked = registry._blocked(config)
        for module in builtins:
            registry._add(module, f"faback {_version()}", partial(import_module, module), blocked)
        points = metadata.entry_points(group=ENTRY_POINT_GROUP) if entry_points is None else entry_points
        allowed = _allowed(config)
        for point in sorted(points, key=lambda p: p.name):
            if allowed is None or point.name in allowed:
                registry._add(point.name, _distribution(point), point.load, blocked)
            else:
                registry.records.append(PluginRecord(point.name, _distribution(point), "not allowed"))
        registry._check_required()
        return registry

    def register(self, plugin: object, name: str, distribution: str = "registered by hand") -> None:
        """Adds a plugin object directly."""
        self._add(name, distribution, lambda: plugin, frozenset())
        if self.records[-1].status == "broken":
            raise PluginError(f"plugin {name!r}", got=self.records[-1].problem)

    def modes(self, config: BackendConfig) -> dict[str, Contribution[Mode]]:
        """Modes by `forward_mode`."""
        return self._keyed("faback_modes", Mode, config=config)

    def overlays(self, config: BackendConfig) -> list[Contribution[Overlay]]:
        """Overlays in the order in which they transform."""
        return _ordered(list(self._keyed("faback_overlays", Overlay, config=config).values()))

    def lowerings(self, config: BackendConfig) -> list[Contribution[Lowering]]:
        """Lowerings, the first to be tried first."""
        found: Iterable[Contribution[Lowering]] = self._keyed("faback_lowerings", Lowering, config=config).values()
        return sorted(found, key=lambda c: (-c.value.priority, c.value.key))

    def kernels(self, device: torch.device, config: BackendConfig | None = None) -> list[Contribution[KernelProvider]]:
        """Kernel providers, by priority and name; without options if no configuration is given."""
        asked = {"device": device, "config": _any(config)}
        found: Iterable[Contribution[KernelProvider]] = self._keyed("faback_kernels", KernelProvider, **asked).values()
        return sorted(found, key=lambda c: (-c.value.priority, c.value.name))

    def device_ops(self, device: torch.device) -> DeviceOps:
        """The operations for a device."""
        ops: DeviceOps | None = self._manager.hook.faback_device_ops(device=device)
        if ops is None:
            raise PluginError(f"operations for device {device}", wanted="a plugin that has them", got=None)
        return ops

    def rank(
        self, request: KernelRequest, candidates: list[KernelProvider], config: BackendConfig | None = None
    ) -> list[KernelProvider]:
        """Candidates as the `faback_rank` hook wants them; in the given order where no plugin cares."""
        ranked = self._late("faback_rank", request=request, candidates=tuple(candidates), config=_any(config))
        if ranked is None:
            return candidates
        added = [k for k in ranked if k not in candidates]
        if added:
            wanted, got = "a selection of the candidates", f"additions {[k.name for k in added]}"
            raise PluginError("faback_rank", wanted=wanted, got=got)
        return list(ranked)

    def planned(self, plan: object) -> None:
        """Tells the observers of a plan, if there are any."""
        if self._manager.hook.faback_planned.get_hookimpls():
            self._late("faback_planned", plan=plan)

    def _late(self, hook: str, **kwargs: Any) -> Any:
        """Calls a hook of all plugins at once; an exception names those that have it."""
        caller = getattr(self._manager.hook, hook)
        try:
            return caller(**kwargs)
        except (FabackError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            names = ", ".join(impl.plugin_name for impl in caller.get_hookimpls())
            hint = f"{DISABLE_VARIABLE} switches a plugin off."
            raise PluginError(f"{hook} of one of the plugins {names} raised", got=repr(error), hint=hint) from error

    def _blocked(self, config: BackendConfig) -> frozenset[str]:
        named = {*config.disable_plugins, *_listed(os.environ.get(DISABLE_VARIABLE, ""))}
        return frozenset(name.removeprefix("no:") for name in named)

    def _add(self, name: str, distribution: str, load: Callable[[], object], blocked: frozenset[str]) -> None:
        if name in blocked:
            self._manager.set_blocked(name)
            self.records.append(PluginRecord(name, distribution, "blocked"))
            return
        if self._manager.has_plugin(name):
            problem = f"another plugin is called {name!r} already"
            self.records.append(PluginRecord(name, distribution, "broken", problem))
            return
        try:
            plugin = load()
            hash(plugin)  # pluggy keeps plugins in sets
            contract = getattr(plugin, "faback_contract", CONTRACT)
            if contract != CONTRACT:
                hint = "Install a version of the plugin that was made for this version of faback."
                raise PluginError(f"contract of plugin {name!r}", wanted=CONTRACT, got=contract, hint=hint)
            self._manager.register(plugin, name)
            self._manager.check_pending()
        except Exception:  # noqa: BLE001 - whatever a plugin does wrong, the others work on
            if self._manager.has_plugin(name):
                self._manager.unregister(name=name)
            self.records.append(PluginRecord(name, distribution, "broken", traceback.format_exc()))
        else:
            self.records.append(PluginRecord(name, distribution, "loaded", path=_path(plugin)))

    def _check_required(self) -> None:
        fates = {record.name: record for record in reversed(self.records)}
        for name in sorted(self._required):
            record = fates.get(name)
            if record is None or record.status != "loaded":
                got = "not installed" if record is None else f"{record.status}\n{record.problem}"
                raise PluginError(f"required plugin {name!r}", wanted="loaded", got=got)

    def _collect(self, hook: str, kind: type, **kwargs: Any) -> list[Contribution[Any]]:
        """Asks one plugin at a time, so that a raising one is known and set aside."""
        found: list[Contribution[Any]] = []
        plugins = dict(self._manager.list_name_plugin())
        for index, record in enumerate(self.records):
            if record.status != "loaded":
                continue
            others = [p for n, p in plugins.items() if n != record.name and p is not None]
            caller = self._manager.subset_hook_caller(hook, remove_plugins=others)
            try:
                values = [value for batch in caller(**kwargs) for value in batch]
                strangers = [value for value in values if not isinstance(value, kind)]
                if strangers:
                    raise TypeError(f"wanted objects of class {kind.__name__}, got {strangers}")
            except FabackError:  # what a plugin has to say about the configuration
                raise
            except Exception:  # noqa: BLE001 - likewise
                problem = f"{hook} raised\n{traceback.format_exc()}"
                self.records[index] = attrs.evolve(record, status="broken", problem=problem)
                self._check_required()
                continue
            found += [Contribution(value, record.name, record.distribution) for value in values]
        return found

    def _keyed(self, hook: str, kind: type, **kwargs: Any) -> dict[str, Contribution[Any]]:
        found = self._collect(hook, kind, **kwargs)
        replaced = {c.value.replaces for c in found if c.value.replaces}
        result: dict[str, Contribution[Any]] = {}
        for contribution in found:
            key = getattr(contribution.value, "key", None) or contribution.value.name
            if key in replaced and contribution.value.replaces != key:
                continue
            if key in result:
                raise PluginError(
                    f"{kind.__name__} {key!r}",
                    wanted="one plugin that brings it",
                    got=f"{result[key].plugin!r} of {result[key].distribution} and "
                    f"{contribution.plugin!r} of {contribution.distribution}",
                    hint=f"Let one say `replaces = {key!r}`, or switch one off with {DISABLE_VARIABLE}.",
                )
            result[key] = contribution
        return result


def _any(config: BackendConfig | None) -> BackendConfig:
    """The configuration, or one that asks for nothing."""
    return BackendConfig(context_len=1) if config is None else config


def _ordered(overlays: list[Contribution[Overlay]]) -> list[Contribution[Overlay]]:
    """Topological order by `after`; ties by priority, then key."""
    waiting = sorted(overlays, key=lambda c: (-c.value.priority, c.value.key))
    done: list[Contribution[Overlay]] = []
    while waiting:
        keys = {c.value.key for c in waiting}
        ready = next((c for c in waiting if not keys & set(c.value.after)), None)
        if ready is None:
            cycle = ", ".join(f"{c} after {list(c.value.after)}" for c in waiting)
            raise PluginError("order of overlays", wanted="no cycle in `after`", got=cycle)
        waiting.remove(ready)
        done.append(ready)
    return done


def _allowed(config: BackendConfig) -> frozenset[str] | None:
    """The entry points that may be loaded, None for all: what the configuration and the environment both allow."""
    said = os.environ.get(ALLOW_VARIABLE)
    lists = [names for names in (config.allow_plugins, None if said is None else _listed(said)) if names is not None]
    return frozenset(lists[0]).intersection(*lists[1:]) if lists else None


def _listed(names: str) -> list[str]:
    """The names in a list with commas."""
    return [name.strip() for name in names.split(",") if name.strip()]


def _path(plugin: object) -> str:
    """The file that a plugin is written in."""
    module = plugin if inspect.ismodule(plugin) else inspect.getmodule(type(plugin))
    return getattr(module, "__file__", None) or ""


def _distribution(point: EntryPoint) -> str:
    dist = getattr(point, "dist", None)
    return f"{dist.name} {dist.version}" if dist is not None else "unknown distribution"


def _version() -> str:
    import faback

    return getattr(faback, "__version__", "(source)")
