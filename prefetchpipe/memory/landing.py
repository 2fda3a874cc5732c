"""Where copies back from the device land: pinned slots that the consumer may take along, and get back by themselves."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections import deque
from typing import Any

import torch

from prefetchpipe.batch.layout import Layout
from prefetchpipe.device.base import Device, Event, HostBlock
from prefetchpipe.errors import PinnedMemoryError
from prefetchpipe.memory.pinned import PageableBlock, PinnedMemory

__all__ = ["LandingSlot", "LandingSlots", "Slab"]


class Slab:
    """Device memory that a batch is gathered in before it is copied back."""

    __slots__ = ("_memory", "_views")

    _VIEWS = 16

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None
        self._views: dict[int, tuple[Layout, list[torch.Tensor]]] = {}

    def views(self, layout: Layout, device: Device) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Where the spans of ``layout`` go, and all bytes; memory is had on the current stream if there is too little.

        Raises:
            torch.OutOfMemoryError: The device is full.
        """
        if self._memory is None or len(self._memory) < layout.nbytes:
            self._views.clear()
            self._memory = None  # before the larger one is asked for
            self._memory = device.alloc(layout.nbytes)
        found = self._views.get(id(layout))
        if found is None:
            if len(self._views) >= self._VIEWS:
                self._views.clear()
            # The layout is kept beside its views, so that its id cannot pass to another one.
            found = self._views[id(layout)] = layout, layout.slot_views(self._memory)
        return found[1], self._memory


class LandingSlot:
    """One pinned block, the slab that is copied into it, and the events around that copy."""

    __slots__ = ("block", "landed", "produced", "slab")

    def __init__(self, device: Device) -> None:
        self.block: HostBlock | None = None
        self.slab: Slab | None = None
        """While a copy is under way."""
        self.produced: Event = device.new_event()
        """Passed when the slab is written."""
        self.landed: Event = device.new_event()
        """Passed when the block is."""

    @property
    def nbytes(self) -> int:
        """Capacity in bytes."""
        return 0 if self.block is None else self.block.nbytes

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes of the block, flat ``uint8``."""
        assert self.block is not None
        return self.block.tensor


class LandingSlots:
    """The slots of one prefetcher, each of them free, in use, or lent to the consumer.

    A lent slot comes back when the last tensor over it has gone, in whatever thread that happens.

    Args:
        device: From where batches are copied.
        memory: Where blocks come from.
        limit: Most slots to hold.

    Attributes:
        lent: Slots that the consumer has now.
    """

    def __init__(self, device: Device, memory: PinnedMemory, limit: int) -> None:
        self._pid = os.getpid()
        self._device = device
        self._memory = memory
        self._limit = limit
        self._lock = threading.RLock()  # reentrant: the collector may end a loan while another slot is asked for
        self._free: deque[LandingSlot] = deque()
        self._slabs: list[Slab] = []  # as many as copies were under way at once
        self._count = 0
        self._shown = 0  # slots whose pass has ended, and that some tensor still shows
        self._refused: int | None = None
        self._held = 0  # pinned bytes when that was refused: of all passes, and of batches kept since a close
        self._is_closed = False
        self.lent = 0

    def has_free(self) -> bool:
        """Whether :meth:`acquire` would give a slot."""
        return bool(self._free) or self._count < self._limit

    def acquire(self, nbytes: int) -> LandingSlot:
        """A free slot of at least ``nbytes``, there being one."""
        with self._lock:
            slot = next((slot for slot in self._free if slot.nbytes >= nbytes), None)
            if slot is not None:
                self._free.remove(slot)
            elif self._count < self._limit:
                slot = LandingSlot(self._device)
                self._count += 1
            else:
                slot = self._free.popleft()
        if slot.nbytes < nbytes:
            try:
                self._grow(slot, nbytes)
            except BaseException:
                self.release(slot)
                raise
        slot.slab = self._slabs.pop() if self._slabs else Slab()
        return slot

    def landed(self, slot: LandingSlot) -> None:
        """The copy into ``slot`` has ended, so its slab is free."""
        slab, slot.slab = slot.slab, None
        if slab is not None and not self._is_closed:
            self._slabs.append(slab)

    def drop_slabs(self) -> None:
        """Give back the device memory that no copy reads."""
        self._slabs.clear()

    def release(self, slot: LandingSlot) -> None:
        """Nobody reads or writes ``slot`` any more."""
        with self._lock:
            if not self._is_closed:
                if isinstance(slot.block, PageableBlock) and not self._is_refused(slot.nbytes):
                    self._count -= 1  # there may be pinned memory the next time
                else:
                    self._free.append(slot)
                    return
        self._free_block(slot)

    def lend(self, slot: LandingSlot) -> torch.Tensor:
        """The bytes of ``slot`` for the consumer; the slot is released when the last tensor over them has gone."""
        tensor, buffer = _buffer_over(slot)
        weakref.finalize(buffer, self._come_back, slot).atexit = False
        with self._lock:
            self.lent += 1
        return tensor

    def show(self, slot: LandingSlot) -> tuple[torch.Tensor, weakref.ref[Any]]:
        """The bytes of ``slot``, and what goes with the last tensor over them. The slot stays the caller's."""
        tensor, buffer = _buffer_over(slot)
        return tensor, weakref.ref(buffer)

    def release_after(self, shown: weakref.ref[Any], slot: LandingSlot) -> None:
        """As :meth:`release`; a slot that some tensor still shows is that tensor's from here on (contract 2).

        It comes back with the tensor, if no other has taken its place by then: the variable of a loop shows the last
        batch until the next pass begins (contract 14).
        """
        buffer = shown()
        if buffer is None:
            self.release(slot)
            return
        weakref.finalize(buffer, self._take_in, slot).atexit = False
        with self._lock:
            self._count -= 1
            self._shown += 1

    def _take_in(self, slot: LandingSlot) -> None:
        if self._pid != os.getpid():
            return  # as below
        with self._lock:
            self._shown -= 1
            if not self._is_closed and self._count < self._limit:
                self._count += 1
                self._free.append(slot)
                return
        self._free_block(slot)

    def _come_back(self, slot: LandingSlot) -> None:
        if self._pid != os.getpid():
            return  # the collector of a forked child, which has a copy of this object and none of the memory
        with self._lock:
            self.lent -= 1
        self.release(slot)

    def _is_refused(self, nbytes: int) -> bool:
        """Whether so much was, and no pinned memory has come free since."""
        return self._refused is not None and nbytes >= self._refused and self._memory.held_bytes >= self._held

    def _grow(self, slot: LandingSlot, nbytes: int) -> None:
        """Exactly ``nbytes``, pinned if that can be had (contract 15)."""
        self._free_block(slot)
        if not self._is_refused(nbytes):
            try:
                slot.block = self._memory.alloc(nbytes)
            except PinnedMemoryError as refused:
                self._memory.warn(f"{refused}; going on with copies to pageable memory, which are slower")
                if not self._shown:  # that will come back
                    self._refused, self._held = nbytes, self._memory.held_bytes
            else:
                return
        slot.block = PageableBlock(nbytes)

    def _free_block(self, slot: LandingSlot) -> None:
        block, slot.block = slot.block, None
        if isinstance(block, PageableBlock):
            block.free()
        elif block is not None:
            self._memory.free(block)

    def close(self) -> None:
        """Give the memory of free slots back; that of lent ones goes when they come back."""
        with self._lock:
            self._is_closed = True
            free, self._free = self._free, deque()
        self.drop_slabs()
        for slot in free:
            self._free_block(slot)


def _buffer_over(slot: LandingSlot) -> tuple[torch.Tensor, Any]:
    tensor = slot.tensor
    buffer: Any = (ctypes.c_uint8 * slot.nbytes).from_address(tensor.data_ptr())
    buffer.owner = tensor  # the pages stay mapped for as long as anybody sees them
    return torch.frombuffer(buffer, dtype=torch.uint8), buffer
