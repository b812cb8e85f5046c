"""A progress bar around a stream of events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from faback_transformers.requests import Event


def shown(events: Iterable[Event], requests: int, max_new_tokens: int) -> Iterator[Event]:
    """Hands events on while a bar counts tokens and finished requests.

    Args:
        events: a generator's stream.
        requests: how many are served.
        max_new_tokens: of each; a request that ends early completes its share of the bar.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task(f"0/{requests} requests", total=requests * max_new_tokens)
        done, seen = 0, dict[int, int]()
        for event in events:
            count = seen.get(event.request_id, 0) + (event.token is not None)
            seen[event.request_id] = count
            advance = int(event.token is not None)
            if event.finished is not None:
                done += 1
                advance += max_new_tokens - count
            bar.update(task, advance=advance, description=f"{done}/{requests} requests")
            yield event
