"""Errors and warnings of prefetchpipe.

::

    PrefetchError (Exception)                something prefetchpipe itself has to say
    +-- IteratorClosedError (RuntimeError)   you closed it: a closed pass was advanced
    +-- CorruptBatchError (RuntimeError)     ``checked=True`` found bytes that differ from the source
    +-- PinnedMemoryError (MemoryError)      page-locked memory refused, or a budget reached (handled inside)
    PrefetchWarning (RuntimeWarning)         work goes on, in a slower way

Whatever the loader, the transform or a copy raises is not wrapped: it reaches the consumer as the same object.
"""

from __future__ import annotations

__all__ = [
    "CorruptBatchError",
    "IteratorClosedError",
    "PinnedMemoryError",
    "PrefetchError",
    "PrefetchWarning",
]


class PrefetchError(Exception):
    """Base class of the errors that prefetchpipe itself raises."""


class IteratorClosedError(PrefetchError, RuntimeError):
    """A pass that was closed, or handed over to a newer one, was advanced.

    The prefetcher stays usable: a new ``iter(prefetcher)`` starts a new pass.
    """


class CorruptBatchError(PrefetchError, RuntimeError):
    """A batch on the device differs from what the loader gave (found by ``checked=True``).

    The pass has ended; nothing of the batch was handed out.
    """


class PinnedMemoryError(PrefetchError, MemoryError):
    """Page-locked host memory was refused, or the budget for it is used up.

    The pipeline answers it with a smaller ring or pageable copies, so users see a :class:`PrefetchWarning` instead.
    """


class PrefetchWarning(RuntimeWarning):
    """Prefetching goes on in a slower way (less depth, pageable copies); the text names the limit."""
