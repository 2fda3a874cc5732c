"""The page-locked memory of one prefetcher: exact sizes, a budget, counters."""

from __future__ import annotations

import threading

from prefetchpipe.device.base import Device, HostBlock
from prefetchpipe.errors import PinnedMemoryError

__all__ = ["PinnedMemory"]


class PinnedMemory:
    """Allocates for one prefetcher, within ``limit`` bytes.

    Args:
        device: Whose copy engine will read the memory.
        limit: Most bytes held at a time; None: what the system gives.

    Attributes:
        held_bytes: Bytes held now.
        allocations: Allocations made so far.
    """

    __slots__ = ("_device", "_lock", "allocations", "held_bytes", "limit")

    def __init__(self, device: Device, limit: int | None) -> None:
        self._device = device
        # Passes allocate in several threads; reentrant, since the collector may free another pass's ring in here.
        self._lock = threading.RLock()
        self.limit = limit
        self.held_bytes = 0
        self.allocations = 0

    def alloc(self, nbytes: int) -> HostBlock:
        """A block of exactly ``nbytes``.

        Raises:
            PinnedMemoryError: The budget is used up, or the system refuses. Nothing is held then.
        """
        with self._lock:
            if self.limit is not None and self.held_bytes + nbytes > self.limit:
                raise PinnedMemoryError(
                    f"{nbytes} bytes more than the {self.held_bytes} held would pass max_pinned_bytes={self.limit}"
                )
            block = self._device.host_alloc(nbytes)
            self.held_bytes += nbytes
            self.allocations += 1
            return block

    def free(self, block: HostBlock) -> None:
        """Give ``block`` back to the system; no copy may be reading it any more."""
        with self._lock:
            self.held_bytes -= block.nbytes
        block.free()
