"""Counters of a prefetcher, and the frozen snapshot of them that ``stats()`` gives."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Counters", "Stats"]


class Counters:
    """Running totals over all passes of one prefetcher.

    Written without a lock: each field has one writing thread per pass, and a lost update between concurrent passes
    costs a statistic, never a batch.
    """

    __slots__ = (
        "batches",
        "copied_bytes",
        "depth",
        "direct_bytes",
        "fetch_seconds",
        "pageable_bytes",
        "path",
        "path_reason",
        "send_seconds",
        "shared_bytes",
        "staged_bytes",
        "stall_seconds",
        "workers",
        "workers_reason",
    )

    def __init__(self, depth: int) -> None:
        self.batches = 0
        self.copied_bytes = 0
        self.staged_bytes = 0
        self.direct_bytes = 0
        self.pageable_bytes = 0
        self.shared_bytes = 0
        self.fetch_seconds = 0.0
        self.send_seconds = 0.0
        self.stall_seconds = 0.0
        self.depth = depth
        self.path = "not started"
        self.path_reason = ""
        self.workers = "not started"
        self.workers_reason = ""


@dataclass(frozen=True, slots=True)
class Stats:
    """What a prefetcher has done so far, over all its passes.

    Example:
        >>> from prefetchpipe import GPUPrefetcher
        >>> loader = GPUPrefetcher([1, 2, 3], device="cpu")
        >>> sum(loader)
        6
        >>> loader.stats().batches
        3
    """

    device: str
    batches: int
    """Batches handed to the consumer."""
    copied_bytes: int
    """Bytes copied to the device (on the CPU: into memory of the batch's own)."""
    staged_bytes: int
    """Bytes of these that went through a pinned slot."""
    direct_bytes: int
    """Bytes of these that were copied from where they were: the loader's batch was pinned already."""
    pageable_bytes: int
    """Bytes of these copied from pageable memory, because pinned memory was refused."""
    pinned_bytes: int
    """Page-locked bytes held now."""
    pinned_allocations: int
    """Page-locked allocations made so far; constant after warm-up."""
    fetch_seconds: float
    """Time spent in ``next(loader)``."""
    send_seconds: float
    """Time spent packing, launching copies and in the transform's launches."""
    stall_seconds: float
    """Time the consumer's thread waited for a batch."""
    depth: int
    """Batches copied ahead now; less than asked for when device memory is short."""
    path: str
    """``thread``: a producer thread fetches. ``caller``: the consumer's thread does, inside ``next``."""
    path_reason: str
    """Why this path was taken, and what would change it."""
    shared_bytes: int = 0
    """Bytes copied out of shared memory that worker processes have packed their batches into."""
    workers: str = "not started"
    """``shared``: worker processes pack their batches into shared memory. ``plain``: torch's way, or no workers."""
    workers_reason: str = ""
    """Why."""

    def __str__(self) -> str:
        return (
            f"{self.batches} batches, {self.copied_bytes / 1e6:.1f} MB to {self.device}, "
            f"{self.stall_seconds:.3f} s stalled, {self.pinned_bytes / 1e6:.1f} MB pinned, "
            f"path {self.path} ({self.path_reason})"
        )
