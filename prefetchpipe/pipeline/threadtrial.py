"""Whether a thread that was started to hide the loop's own work hides any: by measurement (contract 16).

What the loop does and what the thread does may both be Python and calls of the driver, under one GIL: then each only
waits for the other, and the steps get longer.
"""

from __future__ import annotations

__all__ = ["ThreadTrial"]

_SETTLED_BATCHES = 6
_SETTLED_BATCHES_OF_WORKERS = 48
"""Worker processes have filled their queue when a pass begins; what they can keep up shows later."""
_WINDOW = 16
_WINDOWS = 3
"""Without a thread, before one is tried: a single one may have been held up by another process."""
_SKIPPED_BATCHES = 8
_THREAD_WINDOWS = 2
_CLEARLY = 0.97
"""Times a step without it: what a step with the thread must stay below for the thread to stay."""


class ThreadTrial:
    """Sees when each batch is handed out, pass after pass.

    Args:
        has_workers: Batches come from worker processes.

    Attributes:
        usual_seconds: The shortest step without a thread, as a mean over a window; infinite if none has passed.
        thread_seconds: The same with it.
    """

    __slots__ = ("_batches", "_has_time", "_settled", "_since", "_windows", "thread_seconds", "usual_seconds")

    def __init__(self, *, has_workers: bool) -> None:
        self.usual_seconds = self.thread_seconds = float("inf")
        self._settled = _SETTLED_BATCHES_OF_WORKERS if has_workers else _SETTLED_BATCHES
        self._batches = self._windows = 0
        self._since = 0.0
        self._has_time = False

    @property
    def knows_usual(self) -> bool:
        """Whether there is anything to compare with."""
        return self._windows > 0

    def may_begin(self, passes: int) -> bool:
        """Whether a thread may be tried, in the pass of this number.

        Passes too short for a window go with a thread from the second one on.
        """
        return self._windows >= _WINDOWS or (passes > 1 and not self._windows and not self._has_time)

    def begin(self) -> None:
        """A pass, or in it a thread, begins: windows start anew, and what earlier ones have shown is kept."""
        self._batches = 0

    def without_thread(self, now: float) -> None:
        """A batch was handed out that the caller fetched."""
        self._batches += 1
        behind = self._batches - self._settled
        if behind >= 0 and behind % _WINDOW == 0:
            if behind:
                self.usual_seconds = min(self.usual_seconds, (now - self._since) / _WINDOW)
                self._windows += 1
            self._since = now

    def with_thread(self, now: float) -> bool | None:
        """A batch was handed out that a thread fetched.

        Returns:
            Whether the thread should stay; None: not known yet. Where nothing is known of a step without, it should
            not: this pass is long enough to find out.
        """
        self._batches += 1
        behind = self._batches - _SKIPPED_BATCHES
        if behind < 0 or behind % _WINDOW:
            return None
        if behind:
            self.thread_seconds = min(self.thread_seconds, (now - self._since) / _WINDOW)
        self._since = now
        if behind < _THREAD_WINDOWS * _WINDOW:
            return None
        self._has_time = True
        return self.knows_usual and self.thread_seconds < _CLEARLY * self.usual_seconds
