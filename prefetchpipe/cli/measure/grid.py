"""A sweep: the points of a grid, measured in turns, and compared with those of an earlier run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from prefetchpipe.cli.measure.passes import Window, measure_window
from prefetchpipe.cli.measure.timing import Spread, spread

__all__ = ["Difference", "Judgement", "Point", "compare", "measure_grid"]

Key = tuple[int | None, int, int | None]
Judgement = Literal["better", "worse", "same within spread", "spread unknown"]


@dataclass(slots=True)
class Point:
    """One combination; None: the factory does not take that parameter.

    Attributes:
        batch_size: What the factory was asked for.
        depth: Of the prefetcher.
        num_workers: What the factory was asked for.
        windows: One for each repeat.
        error: Why there are no (more) windows.
    """

    batch_size: int | None
    depth: int
    num_workers: int | None
    windows: list[Window] = field(default_factory=list)
    error: str = ""

    @property
    def key(self) -> Key:
        """What identifies it in another run."""
        return self.batch_size, self.depth, self.num_workers

    def samples_per_second(self) -> Spread | None:
        """Over the repeats."""
        return self._over(lambda window: window.samples / window.seconds)

    def gb_per_second(self) -> Spread | None:
        """10^9 bytes each second, over the repeats."""
        return self._over(lambda window: window.nbytes / window.seconds / 1e9)

    def milliseconds(self) -> Spread | None:
        """Of one batch, over the repeats."""
        return self._over(lambda window: window.seconds / window.batches * 1e3)

    def wait_share(self) -> float | None:
        """Median share of the time that the loop spent inside ``next``."""
        found = self._over(lambda window: window.wait_seconds / window.seconds)
        return None if found is None else min(1.0, found.median)

    def gpu_percent(self) -> float | None:
        """Mean utilisation of the GPU, where NVML says."""
        seen = [window.usage.gpu_percent for window in self.windows if window.usage.gpu_percent is not None]
        return statistics.fmean(seen) if seen else None

    def memory_bytes(self) -> int | None:
        """Most device memory in use, where NVML says."""
        seen = [window.usage.memory_bytes for window in self.windows if window.usage.memory_bytes is not None]
        return max(seen, default=None)

    def _over(self, value: Callable[[Window], float]) -> Spread | None:
        return spread([value(window) for window in self.windows]) if self.windows else None


@dataclass(frozen=True, slots=True)
class Difference:
    """One point of two runs.

    Attributes:
        ratio: Samples per second now, by then.
        verdict: ``better`` or ``worse`` only where the ranges of the repeats do not touch; one repeat has no range.
    """

    key: Key
    before: Spread
    now: Spread
    ratio: float
    verdict: Judgement


def measure_grid(
    points: Sequence[Point],
    make: Callable[[Point], Any],
    device: torch.device,
    *,
    repeats: int,
    warm: int,
    batches: int,
    step: Callable[[Any], Any] | None,
    explain: Callable[[BaseException], str],
    done: Callable[[Point], None],
) -> None:
    """Fill the windows of ``points``; each repeat visits all of them, so that a drift of the machine hits all alike.

    An error ends that point, not the sweep.

    Args:
        points: Without windows.
        make: A new loader for a point.
        device: Where batches go.
        repeats: Windows for each point.
        warm: Batches before each window.
        batches: Batches in each window.
        step: Called with each batch.
        explain: One line about an error.
        done: Called after each window.
    """
    for _ in range(repeats):
        for point in points:
            if not point.error:
                try:
                    window = measure_window(
                        make(point), device, depth=point.depth, warm=warm, batches=batches, step=step
                    )
                except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's loader raises what it likes; it is said
                    point.error = explain(error)
                else:
                    point.windows.append(window)
            done(point)


def compare(before: Sequence[Point], now: Sequence[Point]) -> list[Difference]:
    """The points that both runs have times for; where there were no samples, nothing can be said."""
    earlier = {point.key: point for point in before}
    found = []
    for point in now:
        older = earlier.get(point.key)
        rate, old = point.samples_per_second(), None if older is None else older.samples_per_second()
        if older is not None and rate is not None and old is not None and old.median:
            repeats = min(len(point.windows), len(older.windows))
            verdict = _verdict(old, rate) if repeats > 1 else "spread unknown"
            found.append(Difference(point.key, old, rate, rate.median / old.median, verdict))
    return found


def _verdict(before: Spread, now: Spread) -> Judgement:
    if now.low > before.high:
        return "better"
    if now.high < before.low:
        return "worse"
    return "same within spread"
