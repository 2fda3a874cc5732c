"""What a pass does, batch by batch, while a trace is recorded; see :mod:`prefetchpipe.trace`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from prefetchpipe.device.base import Device, Event, Stream
from prefetchpipe.pipeline.timing import CopyTimer, Probe

__all__ = ["LANES", "Recorder", "Span"]

LANES = ("loader", "packing", "copy", "compute", "wait")
"""``loader``: inside ``next(loader)``. ``packing``: from there to the launched copies. ``copy``: copies on the device.
``compute``: the loop's own work, on the device where there is one with streams. ``wait``: the loop's thread waiting."""


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that took time."""

    lane: str
    """One of ``LANES``."""
    name: str
    start_seconds: float
    """Since the recording began."""
    seconds: float
    batch: int
    """Which batch of its pass, from 0."""


class Recorder:
    """Collects spans from all threads of a prefetcher: host times as they come, device times when it is finished.

    Args:
        device: Where batches go.
        clock: Seconds of the host.
        timer: Gets the copies that were measured here.
    """

    def __init__(self, device: Device, clock: Callable[[], float], timer: CopyTimer) -> None:
        self._device = device
        self._clock = clock
        self._timer = timer
        self._lock = threading.RLock()  # guards the lists against finish(); reentrant, as the collector may end a pass
        self._spans: list[Span] = []
        self._copies: list[tuple[Probe, int]] = []
        self._steps: list[tuple[tuple[Event, Event, float, float], int]] = []
        self._open: tuple[Event, float, Stream, int] | None = None
        self._lane_ends: dict[str, float] = {}
        self._finished = False
        self._anchor: Event = None
        if device.staged:
            # Where the device's time line lies on the host's: an event on the copy stream, waited for.
            self._anchor = device.new_timing_event()
            with device.beside_captures():
                device.record(self._anchor, device.copy_stream)
                device.synchronize(self._anchor)
        self._began = clock()

    # On the hot path

    def add(self, lane: str, name: str, start: float, end: float, batch: int) -> None:
        """A span of the host, in seconds of its clock."""
        with self._lock:
            if not self._finished:
                self._spans.append(Span(lane, name, start - self._began, end - start, batch))

    def add_copy(self, probe: Probe, batch: int) -> bool:
        """A copy was launched; False if the recording is over."""
        with self._lock:
            if not self._finished:
                self._copies.append((probe, batch))
            return not self._finished

    def loop_begins(self, now: float, stream: Stream, batch: int) -> None:
        """The consumer has ``batch``: what it queues on ``stream`` from here on is its work with it."""
        event = None
        if self._device.staged:
            event = self._device.new_timing_event()
            self._device.record(event, stream)
        self._open = event, now, stream, batch

    def loop_ends(self, now: float, stream: Stream) -> None:
        """The consumer asks for the next batch."""
        opened, self._open = self._open, None
        if opened is None:
            return
        start, began, on, batch = opened
        if not self._device.staged:
            self.add("compute", "loop", began, now, batch)
        elif stream is on:  # two streams have no common order that events could show
            end = self._device.new_timing_event()
            self._device.record(end, stream)
            with self._lock:
                self._steps.append(((start, end, began, now), batch))

    # At the end

    def finish(self) -> list[Span]:
        """Wait for what was launched and return all spans, ordered by their start. In any thread, once."""
        with self._lock:
            self._finished = True
        with self._device.beside_captures():
            for probe, batch in self._copies:
                self._device.synchronize(probe.done)
                events = probe.start, probe.done, probe.begun, probe.begun
                self._add_device("copy", f"copy {probe.all_bytes / 1e6:.3g} MB", events, batch)
                self._timer.count(probe)
            for step, batch in self._steps:
                self._device.synchronize(step[1])
                self._add_device("compute", "loop, on the device", step, batch)
        self._copies.clear()
        self._steps.clear()
        return sorted(self._spans, key=lambda span: (span.start_seconds, LANES.index(span.lane)))

    def _add_device(self, lane: str, name: str, events: tuple[Event, Event, float, float], batch: int) -> None:
        start, end, launched, left = events
        seconds = self._device.elapsed_seconds(start, end)
        if self._device.host_memory:
            # Simulated time is none of the host's: shown where it was launched, or behind what was launched before.
            seconds = max(seconds, left - launched)
            begin = max(launched - self._began, self._lane_ends.get(lane, 0.0))
            self._lane_ends[lane] = begin + seconds
        else:
            begin = self._device.elapsed_seconds(self._anchor, start)
        self._spans.append(Span(lane, name, begin, seconds, batch))
