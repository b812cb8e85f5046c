"""The shapes that are measured: rows of the project's table of anchors."""

from __future__ import annotations

import attrs


@attrs.frozen
class Case:
    """One measured shape.

    Attributes:
        name: what the report calls it.
        lens: (cached, new) tokens per request; drafting and verification: committed and drafted.
        page_size: tokens per page.
        window: inclusive left distance, None without.
        fp8: the cache holds e4m3.
        tree: the new tokens are a tree to verify.
        latent: heads of a multi-head latent attention layer (absorbed, 512 + 64), 0 for a plain layer.
        target_us: what it is meant to take, microseconds.
        eager_target_us: likewise planned and launched anew, without a graph.
    """

    name: str
    lens: tuple[tuple[int, int], ...]
    page_size: int = 16
    window: int | None = None
    fp8: bool = False
    tree: bool = False
    latent: int = 0
    target_us: float | None = None
    eager_target_us: float | None = None

    @property
    def mode(self) -> str:
        """The forward mode."""
        if self.tree:
            return "target_verify"
        return "decode" if all(new == 1 for _, new in self.lens) else "extend"


def decode(bs: int, ctx: int, target: float | None, **options: object) -> Case:
    """Equal requests of one context length."""
    extra = "".join(f" {name}" if value is True else f" {name} {value}" for name, value in options.items())
    return Case(f"decode bs {bs} ctx {ctx}{extra}", ((ctx - 1, 1),) * bs, target_us=target, **options)  # type: ignore[arg-type]


def verify(bs: int, ctx: int, drafts: int, target: float) -> Case:
    """Equal requests with a tree of drafts each."""
    return Case(f"tree verify bs {bs} ctx {ctx} nd {drafts}", ((ctx, drafts),) * bs, tree=True, target_us=target)


CASES = (
    decode(1, 8192, 12),
    decode(1, 131072, 128),
    decode(16, 4096, 69),
    decode(64, 4096, 245, page_size=1),
    decode(64, 4096, 245),
    decode(64, 4096, 245, page_size=64),
    decode(128, 2048, 250),
    decode(256, 1024, 255),
    decode(32, 32768, 945),
    Case("decode ragged 1 x 131072 + 63 x 1024", ((131071, 1),) + ((1023, 1),) * 63, target_us=195),
    decode(64, 8192, 70, window=1023),
    decode(16, 32768, 70, window=4095),
    decode(64, 4096, 150, fp8=True),
    verify(1, 4096, 64, 24),
    verify(16, 4096, 16, 88),
    verify(32, 4096, 8, 142),
    verify(32, 4096, 64, 320),
    verify(8, 32768, 32, 320),
    Case("prefill 1 x 8192", ((0, 8192),), target_us=1295),
    Case("prefill 1 x 32768", ((0, 32768),), target_us=17489),
    Case("extend 4 x 2048 after 2048", ((2048, 2048),) * 4),
    decode(64, 4096, None, latent=16, page_size=64),
    decode(64, 4096, None, latent=128, page_size=64),
)
"""Targets are those of the project for one H200; None where it has none."""

MORE = (
    decode(4, 8192, None),
    decode(8, 32768, None),
    Case("extend 64 x 16 after 2048", ((2048, 16),) * 64),
    Case("extend 16 x 64 after 4096", ((4096, 64),) * 16),
    Case("extend 4 x 512 after 8192", ((8192, 512),) * 4),
    Case("extend 1 x 512", ((0, 512),)),
    Case("extend 1 x 2048", ((0, 2048),)),
    decode(1, 8192, None, page_size=256),
    decode(64, 4096, None, page_size=256),
    decode(64, 8192, None, page_size=256, window=1023),
    Case("prefill 1 x 8192 page_size 256", ((0, 8192),), page_size=256),
    Case("extend 4 x 2048 after 2048 page_size 256", ((2048, 2048),) * 4, page_size=256),
)
"""Shapes between those, and pages that FlashAttention 2 takes, for the table that "auto" goes by."""

STEPS = (
    decode(64, 4096, 7883),
    decode(64, 4096, 8064, page_size=1),
    decode(256, 1024, 8445),
    attrs.evolve(decode(1, 8192, 598), eager_target_us=1481),
    decode(64, 4096, None, fp8=True),
    attrs.evolve(verify(32, 4096, 8, 4640), page_size=1),
    attrs.evolve(verify(32, 4096, 64, 9674), page_size=1),
    Case("extend 4 x 2048", ((0, 2048),) * 4),
)
"""Whole steps of 32 layers. Targets: the reference backend's figures on an H200 by 1.15, for trees by 1.6 and 2.5, for
the eager step by 3."""
