"""Running totals of a prefetcher. Written on the hot path, read by ``stats()``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefetchpipe.pipeline.recorder import Recorder

__all__ = ["Counters", "Steady", "Times"]

_WARM_BATCHES = 3
"""Of a prefetcher's life: they allocate the ring and teach the layouts. Beside the first of every pass, which starts
workers and threads. What they cost says nothing about a long run."""


@dataclass(frozen=True, slots=True)
class Steady:
    """Batches and seconds behind the warm-up (the first batch of each pass, and the first three of all)."""

    sent_batches: int = 0
    """Batches launched to the device."""
    taken_batches: int = 0
    """Batches handed to the consumer."""
    fetch_seconds: float = 0.0
    """In ``next(loader)``."""
    send_seconds: float = 0.0
    """From then until the copies, and the transform, were launched."""
    transform_seconds: float = 0.0
    """Of these, in the transform."""
    slot_wait_seconds: float = 0.0
    """Of these, waiting until a pinned slot was copied out of."""
    device_wait_seconds: float = 0.0
    """Waiting until the device had finished with an earlier batch, before fetching the next one."""
    stall_seconds: float = 0.0
    """The consumer's thread waiting for the producer's."""
    handover_seconds: float = 0.0
    """Of these, after the batch was ready: until the consumer's thread ran again."""
    next_seconds: float = 0.0
    """The consumer inside ``next(prefetcher)``, whatever for."""
    loop_seconds: float = 0.0
    """The consumer between two ``next(prefetcher)``: its own code."""


class Times:
    """:class:`Steady`, while it is counted."""

    __slots__ = tuple(field.name for field in fields(Steady))
    sent_batches: int
    taken_batches: int
    fetch_seconds: float
    send_seconds: float
    transform_seconds: float
    slot_wait_seconds: float
    device_wait_seconds: float
    stall_seconds: float
    handover_seconds: float
    next_seconds: float
    loop_seconds: float

    def __init__(self) -> None:
        for name in self.__slots__:
            setattr(self, name, 0)

    def snapshot(self) -> Steady:
        """The values now."""
        return Steady(**{name: getattr(self, name) for name in self.__slots__})


class Counters:
    """Running totals over all passes of one prefetcher.

    Written without a lock: each field has one writing thread per pass, and a lost update between concurrent passes
    costs a statistic, never a batch.

    Args:
        depth: Batches copied ahead, as asked for.
        clock: Seconds, as ``time.perf_counter``; a test puts its own here.
    """

    __slots__ = (
        "batches",
        "clock",
        "copied_bytes",
        "depth",
        "depth_reached",
        "direct_bytes",
        "gil_probes",
        "gil_wait_seconds",
        "gil_waits",
        "largest_batch_bytes",
        "pageable_bytes",
        "passes",
        "path",
        "path_reason",
        "peak_device_bytes",
        "recorder",
        "shared_bytes",
        "staged_bytes",
        "start_seconds",
        "steady",
        "timed_bytes",
        "timed_copies",
        "timed_seconds",
        "warm_up",
        "workers",
        "workers_reason",
    )

    def __init__(self, depth: int, clock: Callable[[], float] = perf_counter) -> None:
        self.clock = clock
        self.recorder: Recorder | None = None
        """Set while a trace is recorded."""
        self.passes = 0
        self.start_seconds = 0.0
        self.batches = 0
        self.copied_bytes = 0
        self.staged_bytes = 0
        self.direct_bytes = 0
        self.pageable_bytes = 0
        self.shared_bytes = 0
        self.largest_batch_bytes = 0
        self.peak_device_bytes = 0
        self.depth = depth
        self.depth_reached = 0
        self.warm_up = Times()
        self.steady = Times()
        self.gil_probes = 0
        self.gil_waits = 0
        self.gil_wait_seconds = 0.0
        self.timed_copies = 0
        self.timed_bytes = 0
        self.timed_seconds = 0.0
        self.path = "not started"
        self.path_reason = ""
        self.workers = ""
        """How batches come from worker processes, where that is not torch's plain way."""
        self.workers_reason = ""

    def sending(self, number: int) -> Times:
        """Where the producer's times for batch ``number`` of its pass belong."""
        return self.steady if number and self.warm_up.sent_batches >= _WARM_BATCHES else self.warm_up

    def taking(self, number: int) -> Times:
        """Where the consumer's times for batch ``number`` of its pass belong."""
        return self.steady if number and self.warm_up.taken_batches >= _WARM_BATCHES else self.warm_up

    def took(self, number: int, entered: float, left: float) -> float:
        """The consumer has batch ``number`` of its pass.

        Args:
            number: From 0.
            entered: When it called ``next``.
            left: When it had left the ``next`` before; not looked at for the first batch.

        Returns:
            The time now: when it leaves this one.
        """
        now = self.clock()
        times = self.taking(number)
        times.taken_batches += 1
        times.next_seconds += now - entered
        if number:
            times.loop_seconds += entered - left
        self.batches += 1
        return now

    def probed(self, seconds: float) -> None:
        """The consumer's thread waited for ``seconds`` for the GIL; 0: nobody kept it."""
        self.gil_probes += 1
        self.gil_wait_seconds += seconds
        self.gil_waits += seconds > 0

    def sent(self, ahead: int, nbytes: int, ahead_bytes: int) -> None:
        """A batch of ``nbytes`` is on its way; with it, ``ahead`` of them (``ahead_bytes``) are not taken yet."""
        if ahead > self.depth_reached:  # noqa: PLR1730 - max() would be a call, at every batch
            self.depth_reached = ahead
        if nbytes > self.largest_batch_bytes:  # noqa: PLR1730 - max() would be a call, at every batch
            self.largest_batch_bytes = nbytes
        if ahead_bytes > self.peak_device_bytes:  # noqa: PLR1730 - max() would be a call, at every batch
            self.peak_device_bytes = ahead_bytes
