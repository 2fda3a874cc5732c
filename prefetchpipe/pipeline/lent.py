"""Slots of worker processes that the copy engine reads: when they go back (contract 6)."""

from __future__ import annotations

from collections import deque

from prefetchpipe.device.base import Device, Event
from prefetchpipe.pipeline.workers import WorkerBatch, WorkerSlot

__all__ = ["LentSlots"]


class LentSlots:
    """Of one pass at a time, in the order of their copies.

    Args:
        device: Whose events stand behind the copies.
    """

    __slots__ = ("_device", "_events", "_slots")

    def __init__(self, device: Device) -> None:
        self._device = device
        self._slots: deque[tuple[Event, WorkerSlot]] = deque()
        self._events: list[Event] = []

    def new_event(self) -> Event:
        """To be recorded behind the copies of one batch."""
        return self._events.pop() if self._events else self._device.new_event()

    def add(self, event: Event, slot: WorkerSlot) -> None:
        """Copies out of ``slot`` are under way, and ``event`` is behind them."""
        self._slots.append((event, slot))

    def would_wait(self) -> bool:
        """Whether :meth:`return_passed` would."""
        slots = self._slots
        return bool(slots) and slots[-1][1].is_wanted() and not self._device.query(slots[0][0])

    def return_passed(self) -> None:
        """Before the loader is asked for a batch: its worker may be waiting for a slot that we hold."""
        while self._slots:
            event, slot = self._slots[0]
            if not self._device.query(event):
                if not self._slots[-1][1].is_wanted():  # the last one's: of no other worker has the number grown
                    return
                self._device.synchronize(event)
            self._return(event, slot)

    def return_all(self) -> None:
        """As soon as the copies out of them have passed."""
        while self._slots:
            event, slot = self._slots[0]
            self._device.synchronize(event)  # contract 6
            self._return(event, slot)

    def take_back(self, batch: WorkerBatch) -> None:
        """The batch just sent is to be sent again, or dropped: its slot is its own again when no copy reads it."""
        event, slot = self._slots.pop()
        self._device.synchronize(event)  # contract 6
        slot.end_copy()
        batch.put_slot(slot)
        self._events.append(event)

    def _return(self, event: Event, slot: WorkerSlot) -> None:
        self._slots.popleft()
        slot.end_copy()
        slot.give_back()
        self._events.append(event)
