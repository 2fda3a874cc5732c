"""Timing short calls: windows long enough to be read off the clock, repeats in which all candidates take turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Spread", "calls_for", "seconds_per_call", "spread", "synchronizer"]

_MOST_CALLS = 1 << 20


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of repeats."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Of at least one value."""
    return Spread(statistics.median(values), min(values), max(values))


def synchronizer(device: torch.device) -> Callable[[], None]:
    """A function that waits for the current stream of ``device``; it does nothing for the CPU."""
    if device.type != "cuda":
        return lambda: None
    return lambda: torch.cuda.current_stream(device).synchronize()


def seconds_per_call(function: Callable[[], Any], calls: int, wait: Callable[[], None]) -> float:
    """Wall seconds of one call, over a window of ``calls`` that begins and ends with ``wait``."""
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    wait()
    return (time.perf_counter() - start) / calls


def calls_for(function: Callable[[], Any], seconds: float, wait: Callable[[], None]) -> int:
    """How many calls a window of about ``seconds`` holds; warms up on the way."""
    seconds_per_call(function, 1, wait)
    calls = 1
    while True:
        taken = seconds_per_call(function, calls, wait) * calls
        if taken >= seconds / 2 or calls >= _MOST_CALLS:
            return max(1, min(_MOST_CALLS, round(calls * seconds / max(taken, 1e-9))))
        calls *= 2
