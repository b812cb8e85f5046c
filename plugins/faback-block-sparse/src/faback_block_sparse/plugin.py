"""What faback finds by the entry point. Without `config.options["block_sparse"]` there is nothing."""

from __future__ import annotations

from faback import hookimpl
from faback.core.config import BackendConfig
from faback.core.contracts import Lowering, Mode
from faback.core.errors import ConfigError
from faback.modes.decode import Decode
from faback.modes.extend import Extend
from faback_block_sparse.lowering import BlockTable
from faback_block_sparse.memory import Memory
from faback_block_sparse.mode import BlockSparse
from faback_block_sparse.options import NAME, Options


@hookimpl
def faback_modes(config: BackendConfig) -> list[Mode]:
    options = config.configured(NAME, Options)
    if options is None:
        return []
    if config.deterministic:
        hint = "Near ties between blocks may fall otherwise in another batch."
        raise ConfigError(f"config.options[{NAME!r}]", wanted="None where deterministic=True", got=options, hint=hint)
    memory = Memory(options)
    return [BlockSparse(Decode(), memory, options.catch_up), BlockSparse(Extend("extend"), memory)]


@hookimpl
def faback_lowerings(config: BackendConfig) -> list[Lowering]:
    return [] if config.options.get(NAME) is None else [BlockTable()]
