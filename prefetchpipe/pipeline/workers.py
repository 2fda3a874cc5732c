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

    __slots__ = ("_is_lent", "_is_retired", "_table", "is_pinned", "nbytes", "segment", "serial", "tensor", "views")

    def __init__(self, table: SlotTable, segment: Segment, serial: int) -> None:
        self._table = table
        self._is_lent = False
        self._is_retired = False
        self.segment = segment
        self.serial = serial
        self.tensor = segment.data
        self.nbytes = len(segment.data)
        self.is_pinned: bool | None = None  # not tried yet
        self.views = Slot(None)
        self.views.replace(self)

    def lend(self) -> None:
        """A batch lies in it."""
        self._is_lent = True

    def give_back(self) -> None:
        """The worker may write it again (contract 6): its copies have passed, or there were none."""
        if self._table.pid != os.getpid():
            return  # a forked child holds copies of these objects, not the right to free the slot
        with self._table.lock:
            self._is_lent = False
            if self._table.poison:
                self.tensor.fill_(POISON)
            if self._is_retired:
                self._close()
            self.segment.flags[STATE] = FREE

    def pin(self) -> bool:
        """Page-lock it, once; False where that is refused."""
        if self.is_pinned is None:
            try:
                self._table.memory.register(self.tensor)
                self.is_pinned = True
            except PinnedMemoryError as refused:
                self.is_pinned = False
                self._table.memory.warn(f"{refused}; batches of this size from worker processes are staged instead")
        return self.is_pinned

    def retire(self) -> None:
        """Its worker is done with it: the memory goes now, or when the last copy out of it has passed."""
        with self._table.lock:
            self._is_retired = True
            if not self._is_lent:
                self._close()

    def _close(self) -> None:
        if self.is_pinned:
            self.is_pinned = None
            self._table.memory.unregister(self.tensor)

    def free(self) -> None:
        """Part of a host block's protocol; the segment goes with its last reference."""


class SlotTable:
    """The slots of one set of worker processes.

    Args:
        device: Where batches go.
        memory: Page-locks the slots, within the prefetcher's budget.
        poison: Overwrite a slot before it is given back (``checked=True``).

    Attributes:
        token: Names this table in what the workers send.
        control: Tells the workers when to stop waiting for slots.
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
        self.lock = threading.RLock()  # a pass may end, or the collector drop a batch, in any thread
        self._is_closed = False
        _tables[self.token] = self

    def receive(self, message: Message) -> WorkerBatch | None:
        """Called while the message of a worker is unpickled: that worker still lives, so its memory can be opened."""
        key = message.worker, message.slot
        with self.lock:
            if message.handle is not None:
                older = self._slots.pop(key, None)
                if older is not None:
                    older.retire()
                if not self._is_closed:
                    self._slots[key] = WorkerSlot(self, Segment(message.handle), message.serial)
            slot = self._slots.get(key)
            if slot is not None:
                slot.lend()
        plans = self._plans.setdefault(message.worker, {})
        if message.is_first:
            plans.clear()
        spec, others, plan = pickle.loads(message.payload)  # noqa: S301 - from a process that runs the user's own code
        if plan is not None:
            plans[message.plan] = plan
        known = plans.get(message.plan)  # none after close()
        return None if known is None else WorkerBatch(slot, spec, others, known)

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
    """

    __slots__ = ("_slot", "count", "layout", "moved", "others", "packed", "spec")

    def __init__(self, slot: WorkerSlot | None, spec: Any, others: list[Any], definition: Any) -> None:
        self._slot = slot
        self.spec = spec
        self.others = others
        self.layout: Layout | FewLeaves
        self.layout, self.packed, self.moved, self.count = definition

    @property
    def slot(self) -> WorkerSlot:
        """Where it lies."""
        assert self._slot is not None, "a batch of a pass that has ended"
        return self._slot

    def take_slot(self) -> WorkerSlot:
        """The slot, to be given back by the caller."""
        slot, self._slot = self.slot, None
        return slot

    def copied_leaves(self) -> list[torch.Tensor]:
        """The packed leaves, copied to memory of their own."""
        cpu = cpu_device()
        arrived, memory = self.layout.allocate(cpu.empty, cpu.alloc)
        _, pieces = self.slot.views.views(self.layout)
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
