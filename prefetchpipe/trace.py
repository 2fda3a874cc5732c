"""Record a few batches of a prefetcher as a Chrome or Perfetto trace, so that overlap can be seen.

Open a saved file in https://ui.perfetto.dev or in ``chrome://tracing``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from prefetchpipe.device.base import Device
from prefetchpipe.errors import PrefetchError
from prefetchpipe.options import whole
from prefetchpipe.pipeline.recorder import LANES, Recorder, Span
from prefetchpipe.prefetcher import GPUPrefetcher
from prefetchpipe.stats import Stats

__all__ = ["LANES", "Span", "Trace", "record", "record_trace", "recording"]

_TITLES = {
    "loader": "loader: next(loader)",
    "packing": "packing",
    "copy": "copy (device)",
    "compute": "compute",
    "wait": "the loop waits",
}


class Trace:
    """Spans of one recording.

    Args:
        device: Where the batches went, for the heading.

    Attributes:
        spans: In the order of their starts; filled when the recording has ended.
        stats: What the prefetcher did meanwhile; None while the recording goes on.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.spans: list[Span] = []
        self.stats: Stats | None = None

    def __repr__(self) -> str:
        batches = {span.batch for span in self.spans}
        return f"<Trace: {len(self.spans)} spans of {len(batches)} batches to {self.device}>"

    def timeline(self) -> dict[str, list[tuple[float, float, int]]]:
        """For a chart: start and length in seconds, and the batch, of each span, by lane; as for ``broken_barh``.

        Example:
            >>> from prefetchpipe.trace import record_trace
            >>> sorted(record_trace(range(8), "cpu", batches=3).timeline())
            ['compute', 'copy', 'loader', 'packing', 'wait']
        """
        lanes: dict[str, list[tuple[float, float, int]]] = {lane: [] for lane in LANES}
        for span in self.spans:
            lanes[span.lane].append((span.start_seconds, span.seconds, span.batch))
        return lanes

    def save(self, path: str | Path) -> None:
        """Write the trace in Chrome's JSON format, one thread a lane; times in microseconds.

        Raises:
            OSError: The file cannot be written.
        """
        Path(path).write_text(json.dumps(self.to_json()), encoding="utf-8")

    def to_json(self) -> dict[str, Any]:
        """What :meth:`save` writes.

        Source: "Trace Event Format", complete events (``"ph": "X"``) and metadata events (``"ph": "M"``).
        """
        events: list[dict[str, Any]] = [_metadata("process_name", 0, name=f"prefetchpipe to {self.device}")]
        for number, lane in enumerate(LANES):
            events.append(_metadata("thread_name", number, name=_TITLES[lane]))
            events.append(_metadata("thread_sort_index", number, sort_index=number))
        events += [
            {
                "ph": "X",
                "pid": 0,
                "tid": LANES.index(span.lane),
                "cat": span.lane,
                "name": f"{span.name} #{span.batch}",
                "ts": span.start_seconds * 1e6,
                "dur": span.seconds * 1e6,
                "args": {"batch": span.batch},
            }
            for span in self.spans
        ]
        return {"traceEvents": events, "displayTimeUnit": "ms"}


def _metadata(kind: str, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": 0, "tid": thread, "name": kind, "args": args}


@contextmanager
def recording(prefetcher: GPUPrefetcher) -> Iterator[Trace]:
    """Record all that passes of ``prefetcher`` do inside a ``with`` block; any loop, unchanged.

    Every copy is measured on the device meanwhile. When the block ends, the host waits for the device once.

    Args:
        prefetcher: May be in the middle of a pass.

    Yields:
        The trace; its spans are there when the block has ended.

    Raises:
        PrefetchError: It is being recorded already.

    Example:
        >>> from prefetchpipe import GPUPrefetcher
        >>> from prefetchpipe.trace import recording
        >>> loader = GPUPrefetcher(range(4), "cpu")
        >>> with recording(loader) as trace:
        ...     total = sum(loader)
        >>> len([span for span in trace.spans if span.lane == "compute"])
        4
    """
    shared = prefetcher._shared  # noqa: SLF001 - the recorder stands where the counters are
    counters, device = shared.counters, shared.device
    if counters.recorder is not None:
        raise PrefetchError("this prefetcher is being recorded already; one recording at a time")
    trace = Trace(repr(device))
    before = prefetcher.stats()
    recorder = counters.recorder = Recorder(device, counters.clock, shared.timer)
    try:
        yield trace
    finally:
        with device.beside_captures():
            recorder.loop_ends(counters.clock(), device.current_stream())
        counters.recorder = None
        trace.spans = recorder.finish()
        trace.stats = prefetcher.stats().since(before)


def record(prefetcher: GPUPrefetcher, batches: int = 20, step: Callable[[Any], object] | None = None) -> Trace:
    """Start a pass of ``prefetcher``, record its first batches, and leave it.

    Args:
        prefetcher: What to record.
        batches: How many at most, at least 1.
        step: Called with each batch in the calling thread: the work of the loop.

    Returns:
        The trace.

    Raises:
        TypeError: ``batches`` is no whole number, or ``step`` cannot be called.
        ValueError: ``batches`` is below 1.
        Exception: Whatever the loader, the transform or ``step`` raises.
    """
    whole("batches", batches, minimum=1)
    if step is not None and not callable(step):
        raise TypeError(f"step must be a callable or None, not {step!r} (a {type(step).__name__})")
    with recording(prefetcher) as trace:
        iterator: Any = iter(prefetcher)
        try:
            for _ in range(batches):
                try:
                    batch = next(iterator)
                except StopIteration:
                    break
                if step is not None:
                    step(batch)
                del batch
        finally:
            iterator.close()
    return trace


def record_trace(  # noqa: PLR0917 - what a caller gives first comes first
    loader: Iterable[Any],
    device: str | torch.device | Device | None = None,
    batches: int = 20,
    step: Callable[[Any], object] | None = None,
    depth: int = 2,
    transform: Callable[[Any], Any] | None = None,
) -> Trace:
    """As :func:`record`, for a loader; everything that is started for it is ended again.

    Args:
        loader: Any iterable of batches.
        device: As for :class:`prefetchpipe.GPUPrefetcher`.
        batches: How many to record at most, at least 1.
        step: Called with each batch on the device.
        depth: Batches copied ahead.
        transform: As for :class:`prefetchpipe.GPUPrefetcher`.

    Returns:
        The trace.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: An argument has a value that is not allowed.
        Exception: Whatever the loader, the transform or ``step`` raises.

    Example:
        >>> from prefetchpipe.trace import record_trace
        >>> trace = record_trace(range(8), "cpu", batches=3)
        >>> trace.spans[0].lane
        'loader'
    """
    with GPUPrefetcher(loader, device, depth=depth, transform=transform) as prefetcher:
        return record(prefetcher, batches, step)
