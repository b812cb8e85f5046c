"""Plugins made on the spot, as entry points bring them."""

import types

from faback import BackendConfig, hookimpl
from faback.builtins import BUILTINS
from faback.core.contracts import Mode, Overlay
from faback.core.registry import Registry


class Point:
    """An entry point: a name, an object or an exception, and the distribution `acme-NAME 1.0`."""

    def __init__(self, name, plugin, dist=None):
        self.name, self._plugin = name, plugin
        self.dist = types.SimpleNamespace(name=dist or f"acme-{name}", version="1.0")

    def load(self):
        if isinstance(self._plugin, BaseException):
            raise self._plugin
        return self._plugin


class AnyMode(Mode):
    def __init__(self, key, replaces=None):
        self.key, self.replaces = key, replaces

    def build(self, batch, ws, ctx):
        raise ZeroDivisionError("bug in a plugin")


class AnyOverlay(Overlay):
    def __init__(self, key, after=(), priority=0, replaces=None):
        self.key, self.after, self.priority, self.replaces = key, after, priority, replaces

    def applies(self, layer):
        return True

    def transform(self, segment, layer, batch, ws, ctx):
        return segment


class Holder:
    """Hashable, unlike a SimpleNamespace."""


def holder(**attributes):
    made = Holder()
    vars(made).update(attributes)
    return made


def plugin(**hooks):
    """A plugin object with the given hooks: values are functions, or what the hook returns."""

    def implement(name, value):
        if callable(value):
            return hookimpl(value)
        exec(f"def {name}(): return value", {"value": value}, namespace := {})  # noqa: S102 - no argument names
        return hookimpl(namespace[name])

    return holder(**{name: implement(name, value) for name, value in hooks.items()})


def load(*points, **config):
    return Registry.load(BackendConfig(context_len=8, **config), BUILTINS, points)


def fate(registry, name):
    return {record.name: record for record in registry.records}[name]
