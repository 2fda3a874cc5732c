"""Batches that are already on the GPU: ``for batch in GPUPrefetcher(loader)``."""

from __future__ import annotations

from prefetchpipe.errors import (
    CorruptBatchError,
    IteratorClosedError,
    PinnedMemoryError,
    PrefetchError,
    PrefetchWarning,
)
from prefetchpipe.offload import HostPrefetcher
from prefetchpipe.prefetcher import GPUPrefetcher

__all__ = [
    "CorruptBatchError",
    "GPUPrefetcher",
    "HostPrefetcher",
    "IteratorClosedError",
    "PinnedMemoryError",
    "PrefetchError",
    "PrefetchWarning",
]

__version__ = "0.1.0"
