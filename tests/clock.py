"""A clock for tests: time passes when a test says so, and a thread can be waited for by what it has read."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prefetchpipe import GPUPrefetcher
from tests.support import TIMEOUT


class Clock:
    """Stands in the place of `time.perf_counter`; the thread that makes it is the consumer's."""

    def __init__(self) -> None:
        self.now = 0.0
        self.consumer = threading.get_ident()
        self.reads: Counter[int] = Counter()
        self.before_read: Callable[[int], None] = lambda reads: None
        self._changed = threading.Condition()

    def __call__(self) -> float:
        me = threading.get_ident()
        if me == self.consumer:
            self.before_read(self.reads[me])
        with self._changed:
            self.reads[me] += 1
            self._changed.notify_all()
            return self.now

    def advance(self, seconds: float) -> None:
        with self._changed:
            self.now += seconds

    def wait_until_stalled(self, batch: int) -> None:
        """Called in the producer's thread of a pass with fetch="thread": until the consumer waits for `batch`.

        It reads the clock twice when the pass begins, and four times a batch: when it enters `next`, before and after
        its wait, when it leaves.
        """
        self.wait_for_reads(2 + 4 * batch + 2)

    def wait_for_reads(self, count: int) -> None:
        """Until the consumer's thread has read the clock `count` times."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.reads[self.consumer] >= count, TIMEOUT), "hangs"


class ThreadsClock(Clock):
    """Each thread has a time of its own, so that what one does beside the other is not counted twice."""

    def __init__(self) -> None:
        super().__init__()
        self._times: Counter[int] = Counter()

    @property
    def now(self) -> float:
        return self._times[threading.get_ident()]

    @now.setter
    def now(self, value: float) -> None:
        if hasattr(self, "_times"):
            self._times[threading.get_ident()] = value


def timed(loader: Iterable[Any], clock: Callable[[], float], device: Any = "cpu", **options: Any) -> GPUPrefetcher:
    prefetcher = GPUPrefetcher(loader, device, **options)
    prefetcher._shared.counters.clock = clock
    return prefetcher


def stalling(clock: Clock, seconds: float, batches: Iterable[Any]) -> Iterator[Any]:
    """A loader that takes `seconds` a batch, all of them while the consumer waits."""
    for number, batch in enumerate(batches):
        clock.wait_until_stalled(number)
        if seconds:
            clock.advance(seconds)
        yield batch
