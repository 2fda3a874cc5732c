"""The ring of pinned slots, and when a slot may be written again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter

import torch

from prefetchpipe.batch.few import FewLeaves
from prefetchpipe.batch.layout import Layout
from prefetchpipe.device.base import Device, Event, HostBlock
from prefetchpipe.errors import PinnedMemoryError
from prefetchpipe.memory.pinned import PinnedMemory

__all__ = ["Slot", "SlotRing"]

POISON = 0xA5


class Slot:
    """One pinned block, the event of the last copy out of it, and the packing views into it.

    A slot is free because its event says so, never because of a count (contract 6). torch does not guard this memory:
    its own host allocator does not know it.
    """

    __slots__ = ("_views", "block", "event", "used")

    _VIEWS = 16

    def __init__(self, event: Event) -> None:
        self.block: HostBlock | None = None
        self.event = event
        self.used = False
        self._views: dict[int, tuple[Layout | FewLeaves, list[torch.Tensor]]] = {}

    @property
    def nbytes(self) -> int:
        """Capacity in bytes."""
        return 0 if self.block is None else self.block.nbytes

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes of the slot, flat ``uint8``."""
        assert self.block is not None
        return self.block.tensor

    def views(self, layout: Layout | FewLeaves) -> list[torch.Tensor]:
        """Where the spans of ``layout`` are packed by torch; made once per layout."""
        found = self._views.get(id(layout))
        if found is None:
            if len(self._views) >= self._VIEWS:
                self._views.clear()
            with torch.inference_mode(False):  # a later pass may pack into them outside inference mode
                # The layout is kept beside its views, so that its id cannot pass to another one.
                found = self._views[id(layout)] = (layout, layout.slot_views(self.tensor))
        return found[1]

    def replace(self, block: HostBlock | None) -> HostBlock | None:
        """Swap the memory; views into the old one are dropped first."""
        self._views.clear()
        old, self.block = self.block, block
        return old


_FEWEST = 2
"""One being packed while the other is on the wire."""
_WARM = 64
"""Batches within which a ring finds out how many slots it needs: later none is added (contract 14)."""
_CACHED_BYTES = 64 << 20
"""Slots beyond two are added up to here: what waits for its copy behind more bytes than these may have left the
processor's caches by then, and is read from memory (docs/performance.md, parts O, P and T)."""


class SlotRing:
    """Slots in the order of their copies. One producer at a time uses a ring; others have rings of their own.

    Beyond two, slots are added while a ring is new and a batch would have to wait for one. So a loop that packs for
    longer than a copy takes goes on with two, which stay in the processor's caches, and one that waits for the link
    packs ahead of it.

    Args:
        device: Whose events say when a slot is free.
        memory: Where blocks come from.
        slots: Most slots to hold.
        poison: Overwrite a slot before it is written again, so that a late copy shows (``checked=True``).
        clock: Seconds, for ``waited_seconds``.

    Attributes:
        waited_seconds: Time spent waiting for slots; whoever counts it sets it back to 0.
    """

    __slots__ = (
        "_acquired",
        "_clock",
        "_device",
        "_memory",
        "_poison",
        "_refused",
        "_slots",
        "_spare",
        "waited_seconds",
    )

    def __init__(
        self,
        device: Device,
        memory: PinnedMemory,
        slots: int,
        *,
        poison: bool = False,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._clock = clock
        self.waited_seconds = 0.0
        self._device = device
        self._memory = memory
        self._slots: deque[Slot] = deque()  # in the order of their copies
        self._spare = slots  # how many may be added
        self._acquired = 0
        self._refused: int | None = None  # a batch of this many bytes was refused: do not ask at every batch
        self._poison = poison

    def would_wait(self) -> bool:
        """Whether every slot is still being copied from: the device is behind by a whole ring."""
        slots = self._slots
        return bool(slots) and not self._may_add(slots[0].nbytes) and not self._has_passed(slots[0])

    def acquire(self, nbytes: int) -> Slot | None:
        """A slot that is free and at least ``nbytes`` large; blocks until the copy out of one has passed.

        Returns:
            A slot, or None when page-locked memory cannot be had: copy from pageable memory then (contract 15).
        """
        if self._refused is not None and nbytes >= self._refused:
            return None
        self._acquired += 1
        while (slot := self._next(nbytes)) is not None:
            if (slot.block is not None and slot.nbytes >= nbytes) or self._grow(slot, nbytes):
                if slot is not self._slots[-1]:
                    self._slots.remove(slot)
                    self._slots.append(slot)
                slot.used = True
                return slot
        self._refused = nbytes if self._refused is None else min(nbytes, self._refused)
        self._spare += 1  # a smaller batch may still get one
        return None

    def _next(self, nbytes: int) -> Slot | None:
        """The latest slot but one, if its copy has passed: its bytes are still in the caches. Else the oldest."""
        slots = self._slots
        count = len(slots)
        if count > _FEWEST and self._has_passed(slots[-2]):
            slot = slots[-2]
        elif count >= _FEWEST and self._has_passed(slots[0]):
            slot = slots[0]
        elif self._may_add(nbytes):
            self._spare -= 1
            slot = Slot(self._device.new_event())
            slots.append(slot)
            return slot
        elif count:
            slot = slots[0]
            self._wait(slot)
        else:
            return None
        if self._poison and slot.block is not None:
            slot.tensor.fill_(POISON)
        return slot

    def _may_add(self, nbytes: int) -> bool:
        count = len(self._slots)
        is_cheap = self._acquired <= _WARM and (count + 1) * nbytes <= _CACHED_BYTES
        return self._spare > 0 and (count < _FEWEST or is_cheap)

    def _has_passed(self, slot: Slot) -> bool:
        # Contract 6: the copy out of this slot may still be running.
        return not slot.used or self._device.query(slot.event)

    def _wait(self, slot: Slot) -> None:
        if not self._has_passed(slot):
            started = self._clock()
            self._device.synchronize(slot.event)
            self.waited_seconds += self._clock() - started

    def _grow(self, slot: Slot, nbytes: int) -> bool:
        """Exactly ``nbytes`` for ``slot``; where that is refused, the slot leaves the ring and its memory is freed."""
        old = slot.replace(None)
        if old is not None:
            self._memory.free(old)
        try:
            slot.replace(self._memory.alloc(nbytes))
        except PinnedMemoryError as refused:
            self._slots.remove(slot)
            left = len(self._slots)
            if left >= _FEWEST:
                self._spare = 0
            else:
                rest = f"at most {left} slots, or with copies from pageable memory, which are slower"
                self._memory.warn(f"{refused}; the batch has {nbytes} bytes; going on with {rest}")
            return False
        return True

    def close(self) -> None:
        """Wait for the copies under way, then give all memory back (slots outlive every copy, contract 6)."""
        for slot in self._slots:
            if slot.used:
                self._device.synchronize(slot.event)
                slot.used = False
            block = slot.replace(None)
            if block is not None:
                self._memory.free(block)
