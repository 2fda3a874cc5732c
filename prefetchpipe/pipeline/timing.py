"""How long copies take on the device, from events that are read when they have passed: the host waits for none."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from prefetchpipe.counters import Counters
from prefetchpipe.device.base import Device, Event, Stream

if TYPE_CHECKING:
    from prefetchpipe.pipeline.recorder import Recorder

__all__ = ["CopyTimer", "Probe"]

_OFTEN = 4
_SELDOM = 16
_SETTLED_COPIES = 64
_MOST_PENDING = 8


class Probe:
    """Timing events around the copies of one batch.

    Args:
        device: Whose events these are.
        clock: Seconds of the host.

    Attributes:
        begun: When the host launched the first copy.
        start: Recorded before the first copy.
        last: Recorded before the last copy: where packing goes on between copies, only this one is without gaps.
        done: Recorded after the last copy.
        nbytes: Bytes between ``last`` and ``done``.
        all_bytes: Bytes between ``start`` and ``done``.
    """

    __slots__ = ("_clock", "_device", "all_bytes", "begun", "done", "last", "nbytes", "start")

    def __init__(self, device: Device, clock: Callable[[], float]) -> None:
        self._device = device
        self._clock = clock
        self.begun = 0.0
        self.start: Event = device.new_timing_event()
        self.last: Event = self.start
        self.done: Event = device.new_timing_event()
        self.nbytes = 0
        self.all_bytes = 0

    def reset(self) -> None:
        """Ready for another batch; its events have passed."""
        self.last = self.start
        self.nbytes = self.all_bytes = 0

    def begin(self, stream: Stream) -> None:
        """Before the first copy, on its stream."""
        self.begun = self._clock()
        self._device.record(self.start, stream)

    def end(self, stream: Stream, nbytes: int) -> None:
        """After copies of ``nbytes`` that were launched one right behind the other."""
        self._device.record(self.done, stream)
        self.nbytes = nbytes
        self.all_bytes += nbytes

    def copying(self, copy: Callable[[torch.Tensor, torch.Tensor, Stream], None]) -> Callable[..., None]:
        """``copy``, with the events around it; for copies with packing in between."""
        self.last = None

        def timed(dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
            if self.last is None:
                self.begin(stream)
                self.last = self._device.new_timing_event()
            self._device.record(self.last, stream)
            copy(dst, src, stream)
            self.end(stream, src.numel())

        return timed


class CopyTimer:
    """Measures every fourth copy at first, every sixteenth later; of one prefetcher, shared by its passes.

    A copy that is not measured costs a counter; one that is, two records of an event, and a query when it is read: at
    the next measurement, or in ``stats()`` (docs/performance.md has what these calls take).

    Args:
        device: Where copies go.
        counters: The sums are kept there.
    """

    def __init__(self, device: Device, counters: Counters) -> None:
        self._device = device
        self._counters = counters
        self._copies = 0
        self._pending: deque[Probe] = deque()
        self._free: list[Probe] = []
        # Passes launch in several threads, stats() reads in any; reentrant, since the collector may call in here.
        self._lock = threading.RLock()

    def probe(self, recorder: Recorder | None) -> Probe | None:
        """For the copy about to be launched, if it is to be measured; every one is while a trace is recorded."""
        self._copies += 1
        if recorder is None:
            if self._copies % (_OFTEN if self._copies < _SETTLED_COPIES else _SELDOM):
                return None
            self.collect()
            if len(self._pending) >= _MOST_PENDING:
                return None
            with self._lock:
                if self._free:
                    return self._free.pop()
        return Probe(self._device, self._counters.clock)

    def launched(self, probe: Probe) -> None:
        """The copies of ``probe`` are on their way."""
        with self._lock:
            self._pending.append(probe)

    def collect(self) -> None:
        """Add up the measurements that have come in; our calls must be legal beside graph captures here."""
        with self._lock:
            while self._pending and self._device.query(self._pending[0].done):
                probe = self._pending.popleft()
                self.count(probe)
                probe.reset()
                self._free.append(probe)

    def count(self, probe: Probe) -> None:
        """Add one measurement; its events have passed."""
        seconds = self._device.elapsed_seconds(probe.last, probe.done)
        counters: Any = self._counters
        with self._lock:
            counters.timed_copies += 1
            counters.timed_bytes += probe.nbytes
            counters.timed_seconds += seconds
