"""Who fetches with ``fetch="auto"``: decided by watching the first batches of a pass, and measuring."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any

from prefetchpipe.device.base import Device
from prefetchpipe.pipeline.randomness import global_random_state

__all__ = ["Pace"]

_WATCHED_BATCHES = 2
_WARM_BATCHES = 4
"""Batches of a pass before its times count: the first ones allocate."""

_HANDOFF_SECONDS = 30e-6
_HANDOFF_SHARE = 0.3
"""What a thread is taken to cost: two wake-ups, and that everything it does takes so much longer beside another busy
thread (images in docs/performance.md; batches of small leaves lose more). It gains what the loader, or the loop,
does meanwhile."""

_QUICK_FETCH_SECONDS = 100e-6
_SLOW_FETCH_SECONDS = 1e-3
_SLOW_PACKING_SECONDS = 1e-3
"""One thread packs some 7 MB in this time (at the rate of the results file): several are worth a hand-off then."""
_RECENT_BATCHES = 3
_FEWEST_BATCHES = 2
_SETTLED_BATCHES = 16


class Pace:
    """Sees each batch that the consumer's own thread fetches, and says when a thread should take over.

    Args:
        device: Its default generator is watched too.
        has_workers: Batches come from worker processes, so the data set itself cannot draw here.
        comes_packed: They lie in pinned memory already: what ``next(loader)`` takes is mostly waiting for a worker,
            which a thread does not shorten.
        packs_alone: The caller's thread packs with one thread (torchrun sets OMP_NUM_THREADS=1) where a thread of ours
            would pack with several.
        clock: Seconds.

    Attributes:
        stays: The caller fetches for the whole pass.
        reason: Why things are as they are, for ``stats()``.
        is_for_loop: A thread seems to pay for what the loop does meanwhile, which has to be tried
            (:class:`~prefetchpipe.pipeline.threadtrial.ThreadTrial`); else for the loader's or the packing's own sake.
    """

    def __init__(
        self,
        device: Device,
        *,
        has_workers: bool,
        comes_packed: bool = False,
        packs_alone: bool = False,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._device = device
        self._packs_alone = packs_alone
        self._clock = clock
        self._has_workers = has_workers
        self._comes_packed = comes_packed
        self._batches = 0
        self._before: Any = None
        self._after: Any = None
        self._returned = 0.0
        self._body_seconds = 0.0
        self._times: deque[tuple[float, float, float]] = deque(maxlen=_RECENT_BATCHES)
        self.stays = False
        self.is_for_loop = False
        self.reason = "the first batches of a pass are fetched here, to see whether the loader draws random numbers"

    @property
    def _is_watching(self) -> bool:
        return self._batches < _WATCHED_BATCHES

    @property
    def may_start(self) -> bool:
        """Whether a thread may start: nothing was seen that forbids it, and enough was seen."""
        return not self._is_watching and not self.stays

    def enter(self) -> None:
        """The loop asks for a batch. What is waited for from here on, the device say, is not the loop's own work."""
        self._body_seconds = self._clock() - self._returned

    def begin(self) -> None:
        """Before the loader is asked for a batch."""
        if self._is_watching:
            self._before = global_random_state(self._device)

    def end(self, fetch_seconds: float, send_seconds: float) -> bool:
        """After a batch was sent.

        Returns:
            Whether a thread should fetch from now on.
        """
        if self._is_watching:
            self._watch()
        self._batches += 1
        starts = self.may_start and self._thread_pays(fetch_seconds, send_seconds)
        self._returned = self._clock()
        return starts

    def _watch(self) -> None:
        """Whether the batch just fetched, or the loop before it, drew random numbers (contract 10)."""
        before, self._before = self._before, None
        after = global_random_state(self._device)
        if self._batches > 0:  # a sampler that seeds itself draws for the first batch, as in the plain loop
            if before != after:
                self.stays = True
                self.reason = (
                    "the loader or the transform draws from this process's global random generators, and fetching "
                    "ahead would change the draws; num_workers=1 or fetch='thread' prefetches"
                )
            elif before != self._after and not self._has_workers:
                self.stays = True
                self.reason = (
                    "the loop draws from this process's global random generators, and would race with a loader that "
                    "began to; num_workers=1 or fetch='thread' prefetches"
                )
        self._after = after

    def _thread_pays(self, fetch_seconds: float, send_seconds: float) -> bool:
        """A hand-off pays if the loader or the loop has something to do meanwhile."""
        if self._batches > _SETTLED_BATCHES and self._batches % _SETTLED_BATCHES:
            return False
        self._times.append((fetch_seconds, send_seconds, self._body_seconds))
        # The least of each: a batch held up by another process says nothing.
        fetch, send, body = map(min, zip(*self._times, strict=True))
        is_slow = fetch > _SLOW_FETCH_SECONDS and not self._comes_packed
        if len(self._times) < _FEWEST_BATCHES or (self._batches < _WARM_BATCHES and not is_slow):
            return False
        self.is_for_loop = False
        if self._packs_alone and send > _SLOW_PACKING_SECONDS:
            self.reason = f"packing took {send * 1e6:.0f} us a batch with the one thread that torch may use here"
            return True
        times = f"loader {fetch * 1e6:.0f} us, packing {send * 1e6:.0f} us, the loop {body * 1e6:.0f} us a batch"
        pays = fetch > _QUICK_FETCH_SECONDS and not self._comes_packed
        self.is_for_loop = not pays and min(body, fetch + send) > _HANDOFF_SECONDS + _HANDOFF_SHARE * send
        pays = pays or self.is_for_loop
        if self.is_for_loop:
            self.reason = f"a thread may hide more than it costs: {times}"
        else:
            self.reason = f"a thread {'hides more than it costs' if pays else 'would cost more than it hides'}: {times}"
        return bool(pays)
