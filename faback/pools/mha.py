"""Keys and values of ordinary attention layers: any heads, any head dims, layers unlike one another."""

from __future__ import annotations

import attrs

from faback.pools.one_group import OneGroupPool


@attrs.define(eq=False, kw_only=True)
class MHAPool(OneGroupPool):
    """A `KVPool` with one group, "full", and two buffers per layer: k [slots, heads, head_dim] and v likewise.

    Attributes and errors are those of `OneGroupPool`.
    """
