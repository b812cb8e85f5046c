"""Random scenarios until the time is over, and the smallest one that shows what was found.

    found = fuzz(judge, seconds=60, seed=0)

A judge says what is wrong with a scenario's options, "" where nothing is. What it finds is shrunk: every option that
can go back to its default, and every number that can be smaller, while the judge still objects.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import attrs
import torch

from faback.testing.options import MODES, OVERLAYS, Options, impossible
from faback.testing.poison import TABLE_FLAVOURS

Judge = Callable[[Options], str]
"""What is wrong with a scenario of these options, "" for nothing."""

HALF, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
CHOICES: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "page_size": (1, 2, 3, 4, 16, 64),
        "batch_size": (0, 1, 2, 3, 5, None),
        "max_len": (1, 5, 24, 24, 90),
        "num_q_heads": (2, 4, 6, 14),
        "num_kv_heads": (1, 2),
        "head_dim": (8, 8, 16, 24, 40),
        "dtype": (torch.float32, torch.float32, HALF, torch.float16),
        "kv_dtype": (None, None, None, E4M3, E5M2),
        "kv_scales": (False, False, True),
        "sinks": (False, True),
        "softcap": (False, False, True),
        "scale": (None, None, 0.3, 5.0),
        "hybrid": (False, True),
        "evict": (True, False),
        "windows": (None, None, (0, 3), (1, 30), (7, 8)),
        "chunk": (None, None, 1, 3, 16),
        "inclusive": (False, True),
        "topk": (1, 1, 2, 4),
        "num_steps": (1, 3, 5),
        "num_draft_tokens": (1, 2, 4, 7),
        "ragged": (False, False, True),
        "strided_rows": (False, False, True),
        "padded_rows": (0, 0, 1, 4),
        "padded_tokens": (0, 0, 1, 5),
        "tails": (None, None, *TABLE_FLAVOURS),
        "index_dtype": (None, torch.int32, torch.int64),
    }
)
"""Options by name and the values that are drawn, some more often than others."""
SIZES = ("max_len", "padded_tokens", "tails")
"""Those of them, besides the seed, that kernels are not compiled for."""


class DeviceLost(Exception):
    """A scenario after which the device answers no more, so that nothing smaller can be tried. Its text is why."""


@attrs.frozen
class Finding:
    """Something wrong.

    Attributes:
        options: as they were drawn.
        smallest: as small as they could be made.
        reason: what the judge says of the smallest.
    """

    options: Options
    smallest: Options
    reason: str

    def script(self, kernel: str) -> str:
        """Python that shows it again."""
        return (
            "import attrs\n"
            "import torch\n"
            "from faback import AttentionBackend\n"
            "from faback.testing import Scenario, run_scenario\n\n"
            f"scenario = {self.smallest}\n"
            f"config = attrs.evolve(scenario.config, kernels={kernel!r})\n"
            "for result in run_scenario(scenario, lambda _, *rest: AttentionBackend(config, *rest)):\n"
            "    print(result)\n"
        )


def fuzz(
    judge: Judge, *, seconds: float, seed: int, each: int = 1, told: Callable[[int], None] = lambda count: None
) -> list[Finding]:
    """Draws and judges until the time is over; stops at the first finding, shrunk.

    Args:
        judge: runs a scenario.
        seconds: how long.
        seed: of everything that is drawn.
        each: how often a scenario is told with other sizes before another is drawn. Where kernels are compiled, that
            takes most of the time, and these need no others.
        told: called with the number of scenarios so far.
    """
    end, drawings = time.monotonic() + seconds, _drawings(random.Random(seed), each)
    for count, options in enumerate(drawings, 1):
        if time.monotonic() >= end:
            break
        try:
            reason = judge(options)
            if reason:
                smallest = shrunk(options, judge)
                return [Finding(options, smallest, judge(smallest))]
        except DeviceLost as lost:
            return [Finding(options, options, str(lost))]
        told(count)
    return []


def _drawings(pick: random.Random, each: int) -> Iterator[Options]:
    """Options without end."""
    while True:
        options = drawn(pick)
        yield options
        for _ in range(each - 1):
            sizes: dict[str, Any] = {name: pick.choice(CHOICES[name]) for name in SIZES}
            other = attrs.evolve(options, seed=pick.randrange(1 << 20), **sizes)
            if impossible(other) is None:
                yield other


def drawn(pick: random.Random) -> Options:
    """Options that mean something."""
    while True:
        fields: dict[str, Any] = {name: pick.choice(values) for name, values in CHOICES.items()}
        fields |= {"mode": pick.choice(MODES), "overlay": pick.choice(OVERLAYS), "seed": pick.randrange(1 << 20)}
        if fields["mode"] == "draft_decode":
            fields["draft_step"] = pick.randrange(fields["num_steps"])
        if fields["overlay"] != "mla" and pick.random() < 0.2:
            fields["v_head_dim"] = pick.choice((8, 16))
        # Most scenarios would otherwise be impossible for one of these.
        fields["topk"] = fields["topk"] if fields["mode"] in ("draft_decode", "target_verify") else 1
        fields["strided_rows"] = fields["strided_rows"] and fields["mode"] == "draft_extend"
        fields["ragged"] = fields["ragged"] and fields["mode"] == "target_verify" and fields["topk"] == 1
        fields["hybrid"] = fields["hybrid"] and fields["overlay"] in ("window", "local", "prefill_aware")
        options = Options(**fields)
        if impossible(options) is None:
            return options


def shrunk(options: Options, judge: Judge) -> Options:
    """The smallest options, step by step, to which the judge still objects."""
    while True:
        smaller = next((other for other in _smaller(options) if impossible(other) is None and judge(other)), None)
        if smaller is None:
            return options
        options = smaller


def _smaller(options: Options) -> Iterator[Options]:
    for field in attrs.fields(Options):
        value = getattr(options, field.name)
        if field.name == "mode" or value == field.default:
            continue
        for other in (field.default, *_less(value)):
            if other is not attrs.NOTHING and other != value:
                changed: dict[str, Any] = {field.name: other}
                yield attrs.evolve(options, **changed)


def _less(value: object) -> Iterable[int]:
    """Smaller numbers, the smallest first."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 1:
        return sorted({1, value // 2, value - 1})
    return ()
