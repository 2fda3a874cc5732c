"""The page-locked memory of one prefetcher: exact sizes, a budget, counters."""

from __future__ import annotations

import threading
import warnings

import torch

from prefetchpipe.device.base import Device, HostBlock
from prefetchpipe.errors import PinnedMemoryError, PrefetchWarning

__all__ = ["PageableBlock", "PinnedMemory"]


class PinnedMemory:
    """Allocates for one prefetcher, within ``limit`` bytes.

    Args:
        device: Whose copy engine will read the memory.
        limit: Most bytes held at a time; None: what the system gives.

    Attributes:
        held_bytes: Bytes held now.
        allocations: Allocations made so far.
    """

    __slots__ = ("_device", "_lock", "_warned", "allocations", "held_bytes", "limit")

    def __init__(self, device: Device, limit: int | None) -> None:
        self._device = device
        # Passes allocate in several threads; reentrant, since the collector may free another pass's ring in here.
        self._lock = threading.RLock()
        self._warned = False
        self.limit = limit
        self.held_bytes = 0
        self.allocations = 0

    def alloc(self, nbytes: int) -> HostBlock:
        """A block of exactly ``nbytes``.

        Raises:
            PinnedMemoryError: The budget is used up, or the system refuses. Nothing is held then.
        """
        with self._lock:
            self._check(nbytes)
            block = self._device.host_alloc(nbytes)
            self._count(nbytes)
            return block

    def free(self, block: HostBlock) -> None:
        """Give ``block`` back to the system; no copy may be reading it any more."""
        with self._lock:
            self.held_bytes -= block.nbytes
        block.free()

    def register(self, tensor: torch.Tensor) -> None:
        """Page-lock the memory of ``tensor``, flat ``uint8`` and page-aligned, where it is.

        Raises:
            PinnedMemoryError: As for :meth:`alloc`.
        """
        with self._lock:
            self._check(len(tensor))
            self._device.host_register(tensor)
            self._count(len(tensor))

    def unregister(self, tensor: torch.Tensor) -> None:
        """Take :meth:`register` back; no copy may be reading ``tensor`` any more."""
        with self._lock:
            self.held_bytes -= len(tensor)
        self._device.host_unregister(tensor)

    def warn(self, reason: str) -> None:
        """Tell the user that page-locked memory was refused: once for a prefetcher, however often it happens."""
        if not self._warned:
            self._warned = True
            warnings.warn(f"page-locked memory was refused: {reason}", PrefetchWarning, stacklevel=2)

    def _check(self, nbytes: int) -> None:
        if self.limit is not None and self.held_bytes + nbytes > self.limit:
            raise PinnedMemoryError(
                f"{nbytes} bytes more than the {self.held_bytes} held would pass max_pinned_bytes={self.limit}"
            )

    def _count(self, nbytes: int) -> None:
        self.held_bytes += nbytes
        self.allocations += 1


class PageableBlock:
    """Ordinary memory in the place of a pinned block, where page-locked memory was refused (contract 15)."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def free(self) -> None:
        """It goes with the last reference."""
        del self.tensor
