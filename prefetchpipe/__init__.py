"""Batches that are already on the GPU: ``for batch in GPUPrefetcher(loader)``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from prefetchpipe.errors import (
    CorruptBatchError,
    IteratorClosedError,
    PinnedMemoryError,
    PrefetchError,
    PrefetchWarning,
)
from prefetchpipe.prefetcher import GPUPrefetcher

if TYPE_CHECKING:
    from prefetchpipe.offload import HostPrefetcher
    from prefetchpipe.tables import HostEmbedding, HostTable

__all__ = [
    "CorruptBatchError",
    "GPUPrefetcher",
    "HostEmbedding",
    "HostPrefetcher",
    "HostTable",
    "IteratorClosedError",
    "PinnedMemoryError",
    "PrefetchError",
    "PrefetchWarning",
]

__version__ = "0.1.0"


_LATE = {
    "HostEmbedding": "prefetchpipe.tables",
    "HostPrefetcher": "prefetchpipe.offload",
    "HostTable": "prefetchpipe.tables",
}
"""What a program that only prefetches need not wait for."""


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
