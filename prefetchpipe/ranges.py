"""Named ranges for profilers: ``torch.profiler`` and, on CUDA, NVTX for Nsight Systems. Off unless asked for.

``PREFETCHPIPE_RANGES=1`` in the environment switches them on for every pass, :func:`ranges` for the passes that are
begun inside a ``with`` block. A pass without them runs the same code as if they did not exist.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["are_on", "ranges"]

VARIABLE = "PREFETCHPIPE_RANGES"

_here: ContextVar[bool] = ContextVar("prefetchpipe_ranges", default=False)


@contextmanager
def ranges() -> Iterator[None]:
    """Passes begun inside show their steps as ranges ``prefetchpipe: ...`` in ``torch.profiler`` and in Nsight Systems.

    ``torch.profiler.profile`` sees the thread that started it. The ranges of the producer's thread show up if it is
    told to look at all threads: ``experimental_config=torch.profiler._ExperimentalConfig(profile_all_threads=True)``.

    Example:
        >>> from prefetchpipe import GPUPrefetcher
        >>> from prefetchpipe.ranges import ranges
        >>> with ranges():
        ...     total = sum(GPUPrefetcher([1, 2, 3], device="cpu"))
        >>> total
        6
    """
    token = _here.set(True)
    try:
        yield
    finally:
        _here.reset(token)


def are_on() -> bool:
    """Whether a pass that begins now shows ranges.

    Raises:
        ValueError: ``PREFETCHPIPE_RANGES`` is neither 0 nor 1.
    """
    if _here.get():
        return True
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE} must be 0 or 1, not {value!r}")
    return value == "1"
