"""Whether ids are sorted before rows move: by measurement, since it depends on the machine."""

from __future__ import annotations

from collections.abc import Callable

from prefetchpipe.device.base import Device, Event, Stream

__all__ = ["Ways"]

LEAST_BYTES = 64 << 20
"""Smaller tables are within reach of the caches for address translation, in whatever order rows are read."""

LEAST_IDS = 1 << 14
"""For fewer ids a sort costs more than all of the rows."""

_TRIALS = 3
_WORTH = 0.9  # a sort also takes the host some time

Move = Callable[[], None]


class Ways:
    """Chooses between ids as they come and ids in ascending order, for each size of a batch.

    Both ways give the same bytes. The first calls of a size take turns, timed on the device; the times are looked at
    when they are there, and nobody waits for them.

    Args:
        device: Whose events measure.
        nbytes: Of the table.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self._is_large = nbytes >= LEAST_BYTES
        self._choices: dict[tuple[str, int], _Choice] = {}

    def run(self, what: str, count: int, stream: Stream, plain: Move, ordered: Move) -> None:
        """Call one of the two.

        Args:
            what: Of which calls the times are compared.
            count: Ids.
            stream: Where they queue their work.
            plain: Takes the ids as they come.
            ordered: Sorts them first.
        """
        if not self._is_large or count < LEAST_IDS:
            plain()
            return
        key = what, count.bit_length()
        choice = self._choices.get(key)
        if choice is None:
            choice = self._choices[key] = _Choice(self._device)
        choice.run(stream, plain, ordered)


class _Choice:
    """The trials of one size, and what came of them."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._started = 0
        self._running: list[tuple[bool, Event, Event]] = []
        self._best = {False: float("inf"), True: float("inf")}
        self._is_sorted: bool | None = None

    def run(self, stream: Stream, plain: Move, ordered: Move) -> None:
        self._look()
        if self._is_sorted is not None or self._started == 2 * _TRIALS:
            (ordered if self._is_sorted else plain)()
            return
        is_sorted = bool(self._started % 2)
        device = self._device
        start, end = device.new_timing_event(), device.new_timing_event()
        device.record(start, stream)
        (ordered if is_sorted else plain)()
        device.record(end, stream)
        self._started += 1
        self._running.append((is_sorted, start, end))

    def _look(self) -> None:
        while self._running and self._device.query(self._running[0][2]):
            is_sorted, start, end = self._running.pop(0)
            # The shortest: others waited for the host, or shared the link.
            self._best[is_sorted] = min(self._best[is_sorted], self._device.elapsed_seconds(start, end))
        if self._is_sorted is None and self._started == 2 * _TRIALS and not self._running:
            self._is_sorted = self._best[True] < _WORTH * self._best[False]
