"""Whether another thread keeps the GIL: seen from a thread that gives it up for a moment and wants it back."""

from __future__ import annotations

import resource
from collections.abc import Callable
from time import sleep

__all__ = ["can_probe", "probe"]

_SLEEP_SECONDS = 50e-6
_WAIT_SECONDS = 1e-3

can_probe = hasattr(resource, "RUSAGE_THREAD")
"""Elsewhere than on Linux the GIL cannot be told from a core that is not to be had."""


def probe(clock: Callable[[], float]) -> float:
    """Give up the GIL for 0.05 ms, and want it back.

    A thread that waits for the GIL sleeps once more, which the kernel counts as a voluntary context switch; one that
    waits for a core does not. So a machine with too much to do is not taken for a GIL that is kept.

    Returns:
        Seconds until the calling thread went on, if it waited for the GIL and for more than a millisecond; else 0.
    """
    switches, started = _voluntary_switches(), clock()
    sleep(_SLEEP_SECONDS)
    seconds = clock() - started
    waited = _voluntary_switches() - switches > 1
    return seconds if waited and seconds > _WAIT_SECONDS else 0.0


def _voluntary_switches() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
