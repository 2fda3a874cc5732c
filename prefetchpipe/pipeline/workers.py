"""The parent's side of the worker path: batches that worker processes have packed into shared memory.

The workers' side is :mod:`prefetchpipe.pipeline.collate`. Slots belong to a worker, so one that runs ahead never takes
the slot of the one whose batch is next.
"""

from __future__ import annotations

import itertools
import os
import pickle
import threading
import weakref
from contextlib import suppress
from typing import Any

import torch

from prefetchpipe.batch.few import FewLeaves
from prefetchpipe.batch.layout import Layout
from prefetchpipe.device.base import Device
from prefetchpipe.device.cpu import cpu_device
from prefetchpipe.errors import PinnedMemoryError
from prefetchpipe.memory.pinned import PinnedMemory
from prefetchpipe.memory.ring import POISON, Slot
from prefetchpipe.memory.shared import Segment
from prefetchpipe.pipeline.collate import FREE, STATE, STOP, Message

__all__ = ["SlotTable", "WorkerBatch", "WorkerSlot", "receive"]

_numbers = itertools.count(1)
_tables: weakref.WeakValueDictionary[str, SlotTable] = weakref.WeakValueDictionary()


class WorkerSlot:
    """A slot of a worker process, as this process sees it.

    Attributes:
        views: Where the blocks of a layout lie in it.
        is_pinned: Whether the copy engine can read it.
    """

    __slots__ = (
        "_is_closed",
        "_is_copying",
        "_is_retired",
        "_table",
        "_worker",
        "is_pinned",
        "segment",
        "views",
    )

    def __init__(self, table: SlotTable, worker: int, segment: Segment) -> None:
        self._table = table
        self._worker = worker
        self._is_copying = False
        self._is_retired = False
        self._is_closed = False
        self.segment = segment
        self.is_pinned: bool | None = None  # not tried yet
        self.views = Slot(None)
        self.views.replace(segment)

    def begin_copy(self) -> bool:
        """Copies out of it are about to be launched; False if its memory is gone, since the pass was closed."""
        under_way = self._table.under_way
        with self._table.lock:
            if self._is_closed:
                return False
            self._is_copying = True
            under_way[self._worker] = under_way.get(self._worker, 0) + 1
            return True

    def end_copy(self) -> None:
        """They have passed: it can be given back, or its batch be sent again."""
        with self._table.lock:
            self._is_copying = False
            self._table.under_way[self._worker] -= 1

    def is_wanted(self) -> bool:
        """Whether its worker may be out of slots until some are given back."""
        table = self._table
        return table.under_way.get(self._worker, 0) > table.kept.get(self._worker, 0)

    def give_back(self) -> None:
        """The worker may write it again (contract 6): its copies have passed, or there were none."""
        if self._table.pid != os.getpid():
            return  # a forked child holds copies of these objects, not the right to free the slot
        with self._table.lock:
            if self._table.poison and not self._is_closed:
                self.segment.tensor.fill_(POISON)
            closes = self._closes()
        if closes:
            self._close()
        self.segment.flags[STATE] = FREE

    def pin(self) -> bool:
        """Page-lock it, once; False where that is refused."""
        if self.is_pinned is None:
            try:
                self._table.memory.register(self.segment.tensor)
                self.is_pinned = True
            except PinnedMemoryError as refused:
                self.is_pinned = False
                self._table.memory.warn(f"{refused}; batches of this size from worker processes are staged instead")
        return self.is_pinned

    def retire(self) -> None:
        """Its worker is done with it: the memory goes now, or when the last copy out of it has passed.

        A batch in it that was not sent is not waited for: a kept exception may hold it for ever.
        """
        with self._table.lock:
            self._is_retired = True
            closes = self._closes()
        if closes:
            self._close()

    def _closes(self) -> bool:
        """Whether it is over, and the caller is the one to close it; outside of the lock, which the collector takes."""
        if not self._is_retired or self._is_copying or self._is_closed:
            return False
        self._is_closed = True
        return True

    def _close(self) -> None:
        if self.is_pinned:
            self._table.memory.unregister(self.segment.tensor)


class SlotTable:
    """The slots of one set of worker processes.

    Args:
        device: Where batches go.
        memory: Page-locks the slots, within the prefetcher's budget.
        poison: Overwrite a slot before it is given back (``checked=True``).

    Attributes:
        token: Names this table in what the workers send.
        control: Tells the workers when to stop waiting for slots.
        kept: How many slots of a worker may be kept while its next batch is waited for.
        under_way: How many are being copied.
        is_broken: A message could not be read, so what the worker says next may not be understood.
    """

    def __init__(self, device: Device, memory: PinnedMemory, *, poison: bool, anonymous: bool = True) -> None:
        self.pid = os.getpid()
        self.token = f"{self.pid}-{next(_numbers)}"
        self.device = device
        self.memory = memory
        self.poison = poison
        self.control = Segment.create(0, anonymous=anonymous)
        self._slots: dict[tuple[int, int], WorkerSlot] = {}
        self._plans: dict[int, dict[int, Any]] = {}
        self.kept: dict[int, int] = {}
        self.under_way: dict[int, int] = {}
        self.is_broken = False
        self.lock = threading.RLock()  # a pass may end, or the collector drop a batch, in any thread
        self._is_closed = False
        _tables[self.token] = self

    def receive(self, message: Message) -> WorkerBatch | None:
        """Called while the message of a worker is unpickled: that worker still lives, so its memory can be opened."""
        try:
            slot = self._slot_of(message)
            plans = self._plans.setdefault(message.worker, {})
            if message.is_first:
                plans.clear()
            if message.definition is not None:
                plans[message.plan] = pickle.loads(message.definition)  # noqa: S301 - as below
        except BaseException:
            self.is_broken = True
            raise
        self.kept[message.worker] = message.kept
        if slot is None:
            return None
        try:
            spec, others = pickle.loads(message.payload)  # noqa: S301 - from a process that runs the user's own code
            return WorkerBatch(slot, spec, others, plans[message.plan])
        except BaseException:
            slot.give_back()
            raise

    def _slot_of(self, message: Message) -> WorkerSlot | None:
        """Where the batch lies; None after :meth:`close`."""
        key = message.worker, message.slot
        gone = [(message.worker, number) for number in message.dropped]
        if message.handle is not None:
            gone.append(key)
        segment = None if message.handle is None else Segment(message.handle)
        with self.lock:
            retired = [self._slots.pop(other) for other in gone if other in self._slots]
            if segment is not None and not self._is_closed:
                self._slots[key] = WorkerSlot(self, message.worker, segment)
            slot = self._slots.get(key)
        for older in retired:
            older.retire()
        return slot

    def stop(self) -> None:
        """No more batches are taken: no worker waits for a slot from now on."""
        if self.pid == os.getpid():
            self.control.flags[STOP] = 1

    def close(self) -> None:
        """Give back what no copy is reading any more, now; the rest when its copies have passed."""
        if self.pid != os.getpid():
            return
        self.stop()
        with self.lock:
            self._is_closed = True
            slots, self._slots = list(self._slots.values()), {}
            self._plans.clear()
        with self.device.beside_captures():
            for slot in slots:
                slot.retire()


class WorkerBatch:
    """A batch in a worker's slot. Its slot is given back once its copies have passed, or when it is dropped unsent.

    Attributes:
        spec: Its structure.
        layout: Where its packed leaves lie in the slot.
        packed: Their places among all leaves.
        moved: The places of ``others``.
        others: Leaves that came torch's way.
        count: Number of leaves.
        unpacked: All leaves, once they had to be copied out of the slot.
    """

    __slots__ = ("_slot", "count", "layout", "moved", "others", "packed", "spec", "unpacked")

    def __init__(self, slot: WorkerSlot, spec: Any, others: list[Any], definition: Any) -> None:
        self._slot: WorkerSlot | None = slot
        self.unpacked: list[Any] | None = None
        self.spec = spec
        self.others = others
        self.layout: Layout | FewLeaves
        self.layout, self.packed, self.moved, self.count = definition

    @property
    def slot(self) -> WorkerSlot:
        """Where it lies."""
        assert self._slot is not None, "its slot was taken"
        return self._slot

    def take_slot(self) -> WorkerSlot:
        """The slot, to be given back by the caller."""
        slot, self._slot = self.slot, None
        return slot

    def put_slot(self, slot: WorkerSlot) -> None:
        """Take :meth:`take_slot` back: no copy reads the slot, and the batch can be sent again."""
        self._slot = slot

    def unpack(self) -> list[Any]:
        """All leaves in memory of their own; the slot is given back."""
        leaves = self.placed(self.copied_leaves(), self.others)
        self.unpacked = leaves
        self.take_slot().give_back()
        return leaves

    def placed(self, packed: list[Any], moved: list[Any]) -> list[Any]:
        """All leaves in the order of the batch, of those that were packed and those that were not."""
        if not moved:
            return packed
        leaves: list[Any] = [None] * self.count
        for i, leaf in zip((*self.packed, *self.moved), (*packed, *moved), strict=True):
            leaves[i] = leaf
        return leaves

    def copied_leaves(self) -> list[torch.Tensor]:
        """The packed leaves, copied to memory of their own."""
        cpu = cpu_device()
        arrived, memory = self.layout.allocate(cpu.empty, cpu.alloc, in_slab=False)
        pieces = self.layout.pieces(self.slot.views.tensor, in_slab=False)
        for target, piece in zip(memory, pieces, strict=True):
            cpu.copy(target, piece, None)
        return arrived

    def __del__(self) -> None:
        slot = self._slot
        if slot is not None:
            with suppress(Exception):
                slot.give_back()


def receive(message: Message) -> WorkerBatch | None:
    """What a worker sent, in the parent: the batch; None where nobody takes it any more."""
    table = _tables.get(message.token)
    return None if table is None else table.receive(message)
