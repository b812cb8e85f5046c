"""draft extend: after verification the draft model takes in the accepted tokens, a different number per request."""

from __future__ import annotations

from faback.core.config import BackendConfig
from faback.core.contracts import Mode
from faback.core.hooks import hookimpl
from faback.modes.extend import Extend


@hookimpl
def faback_modes(config: BackendConfig) -> list[Mode]:
    """An extend by the accepted tokens, packed or padded to `token_stride`. Accepting nothing is legal."""
    return [Extend("draft_extend")]
