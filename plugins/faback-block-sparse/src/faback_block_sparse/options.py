"""The settings of the plugin: `config.options["block_sparse"]`."""

from __future__ import annotations

from typing import Any

import attrs

from faback.core.errors import ConfigError

NAME = "block_sparse"
RECENT = ("all", "local")


def _at_least(minimum: int, optional: bool = False) -> Any:
    def validate(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if optional and value is None:
            return
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            wanted = f"{'None or ' if optional else ''}an integer >= {minimum}"
            raise ConfigError(f"config.options[{NAME!r}][{attribute.name!r}]", wanted=wanted, got=repr(value))

    return validate


@attrs.frozen(kw_only=True)
class Options:
    """What a query sees, in blocks of the request's text.

    Attributes:
        block_size: tokens per block, a multiple of the page.
        top_k: how many blocks are chosen besides those that are seen anyway.
        local_blocks: the last blocks up to the query's own, that one included.
        recent: what is seen of tokens whose summaries were not there when the pass was planned, the pass's own among
            them: "all", or no more than the local blocks ("local").
        catch_up: the most tokens of a request that a decode plan takes into its summaries; None is no limit. With one,
            taking in costs the same at any length, and what is left is seen as recent until later plans have taken it.

    Raises:
        ConfigError: a value that means nothing.
    """

    block_size: int = attrs.field(validator=_at_least(1))
    top_k: int = attrs.field(validator=_at_least(0))
    local_blocks: int = attrs.field(default=2, validator=_at_least(1))
    recent: str = attrs.field(default="all")
    catch_up: int | None = attrs.field(default=None, validator=_at_least(1, optional=True))

    @recent.validator
    def _check_recent(self, attribute: object, value: object) -> None:
        if value not in RECENT:
            raise ConfigError(f"config.options[{NAME!r}]['recent']", wanted=" or ".join(map(repr, RECENT)), got=value)

    def __attrs_post_init__(self) -> None:
        if self.recent == "local" and self.catch_up is not None:
            hint = "Tokens that no plan has taken in yet could not be seen at all."
            what = f"config.options[{NAME!r}]['catch_up']"
            raise ConfigError(what, wanted="None where recent='local'", got=self.catch_up, hint=hint)

    @property
    def all_recent(self) -> bool:
        """Whether recent tokens are seen beyond the local blocks."""
        return self.recent == "all"

    def check_page(self, page_size: int) -> None:
        """Raises a `ConfigError` where blocks are not whole pages."""
        if self.block_size % page_size:
            what = f"config.options[{NAME!r}]['block_size']"
            raise ConfigError(what, wanted=f"a multiple of the page size {page_size}", got=self.block_size)

    def run_blocks(self, queries: int) -> int:
        """Most blocks that are seen side by side up to a query's own, where a row has at most so many queries.

        Without a limit to catching up; recent blocks are then those of the row's own queries.
        """
        touched = 1 if queries <= 1 else (queries - 2) // self.block_size + 2
        return max(self.local_blocks, touched) if self.all_recent else self.local_blocks
