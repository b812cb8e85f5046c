"""What a generator did, in numbers."""

from __future__ import annotations

from typing import Any

import attrs


@attrs.define(kw_only=True)
class Stats:
    """Counters of one generator; `reset_stats` starts them anew.

    Attributes:
        steps: forward passes.
        graph_steps: those that ran as a recorded graph; what happens within is not counted.
        prompt_tokens: prompt tokens that were run, those run again after a preemption included.
        new_tokens: tokens generated.
        seconds: time spent in steps.
        plan_seconds: time spent planning.
        attention_seconds: host time spent in the backend's `forward`, kernels included where they run on the host.
        layer_calls: calls of `forward`.
        preemptions: requests that had to give up their pages for a while.
        verify_steps: forward passes that verified drafts; the rest of these counters is about them.
        verifications: requests in them, counted anew in each.
        drafted_tokens: drafts verified.
        accepted_tokens: tokens that requests gained beyond the one each of plain decoding.
        pages_total: pages of the pool.
        pages_peak: most pages in use at once.
        pages_used: pages in use now.
    """

    steps: int = 0
    graph_steps: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    seconds: float = 0.0
    plan_seconds: float = 0.0
    attention_seconds: float = 0.0
    layer_calls: int = 0
    preemptions: int = 0
    verify_steps: int = 0
    verifications: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    pages_total: int = 0
    pages_peak: int = 0
    pages_used: int = 0

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second spent in steps, prompts' time included."""
        return self.new_tokens / self.seconds if self.seconds else 0.0

    @property
    def acceptance_length(self) -> float:
        """Mean tokens that a request gains by a verify pass; 1 where no draft is ever right, or none was verified."""
        return 1 + self.accepted_tokens / self.verifications if self.verifications else 1.0

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        derived = {"tokens_per_second": self.tokens_per_second, "acceptance_length": self.acceptance_length}
        return {**attrs.asdict(self), **derived}
