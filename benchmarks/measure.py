"""Timing one pass: a window of steps inside it, between two waits for the consumer's stream."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["interleaved", "seconds_per_step"]


def seconds_per_step(
    batches: Iterable[Any],
    step: Callable[[Any], None],
    synchronize: Callable[[], None],
    *,
    warm: int,
    steps: int,
    drain: bool,
) -> float:
    """Wall seconds per step over ``steps`` steps, after ``warm`` untimed ones, in the loop a user would write.

    The window opens and closes when the consumer's stream has finished a step, with more batches to come at either
    end, so neither filling nor emptying a pipeline counts for or against anybody.

    Args:
        batches: Iterated once.
        step: Queues the work for a batch.
        synchronize: Waits for the consumer's stream.
        warm: Steps before the window opens.
        steps: Steps inside the window.
        drain: Run the pass to its end after the window, else leave it there.

    Raises:
        RuntimeError: The pass ended inside the window.
    """
    gc.collect()
    started = ended = count = 0.0
    iterator = iter(batches)
    for batch in iterator:
        step(batch)
        count += 1
        if count == warm:
            synchronize()
            started = time.perf_counter()
        elif count == warm + steps:
            synchronize()
            ended = time.perf_counter()
            if not drain:
                break
    if not ended:
        raise RuntimeError(f"the pass ended after {count:.0f} batches, {warm} + {steps} are needed")
    synchronize()
    return (ended - started) / steps


def interleaved(
    candidates: dict[str, Callable[[], float]], repeats: int, *, failed: Callable[[str, Exception], None] | None = None
) -> dict[str, list[float]]:
    """Numbers from every candidate, each repeat asking all of them, in an order that moves on by one.

    Args:
        candidates: Name to a function that takes one measurement.
        repeats: Measurements of each.
        failed: Told about an exception; that candidate is left out from then on. ``None``: it is raised.
    """
    names = list(candidates)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats):
        shift = repeat % max(1, len(names))
        for name in names[shift:] + names[:shift]:
            if name not in candidates:
                continue
            try:
                taken[name].append(candidates[name]())
            except Exception as error:
                if failed is None:
                    raise
                candidates = {key: value for key, value in candidates.items() if key != name}
                failed(name, error)
    return taken
