"""An example of the hook `faback_rank`: prefer the kernel in some forward modes, without pinning it.

The entry point does not bring it. It is registered by hand, for the hook is not told the configuration:

    registry = Registry.load(config, BUILTINS)
    registry.register(Ranking.of(config), "sdpa-ranking")

`config.options["sdpa-ranking"] = {"modes": ["extend"]}` switches it on. Without the registration faback refuses these
settings, as those of a plugin that is not there.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from faback import hookimpl
from faback.core.config import BackendConfig
from faback.core.errors import ConfigError
from faback.core.kernel import KernelProvider, KernelRequest
from faback_sdpa.kernel import NAME


def _listed(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _modes(instance: object, attribute: attrs.Attribute[tuple[str, ...]], value: object) -> None:
    if not isinstance(value, tuple) or not all(isinstance(name, str) for name in value):
        wanted = "a list or tuple of forward modes"
        raise ConfigError(f"config.options[{Ranking.name!r}]['modes']", wanted=wanted, got=repr(value))


def _count(instance: object, attribute: attrs.Attribute[int], value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        what = f"config.options[{Ranking.name!r}]['least_queries']"
        raise ConfigError(what, wanted="an integer >= 0", got=repr(value))


@attrs.frozen
class Ranking:
    """A plugin that puts the kernel before all others in some modes; the others stay behind it, as they were.

    Attributes:
        modes: the forward modes; none leaves the ranking to others.
        least_queries: only where a row may have so many queries.

    Raises:
        ConfigError: settings that mean nothing.
    """

    name = "sdpa-ranking"

    modes: tuple[str, ...] = attrs.field(default=(), converter=_listed, validator=_modes)
    least_queries: int = attrs.field(default=0, validator=_count)

    @classmethod
    def of(cls, config: BackendConfig) -> Ranking:
        """As `config.options["sdpa-ranking"]` says; without these settings one that does nothing."""
        return config.configured(cls.name, cls) or cls()

    @hookimpl
    def faback_rank(
        self, request: KernelRequest, candidates: Sequence[KernelProvider]
    ) -> Sequence[KernelProvider] | None:
        if request.forward_mode not in self.modes or request.queries < self.least_queries:
            return None
        return sorted(candidates, key=lambda kernel: kernel.name != NAME)
