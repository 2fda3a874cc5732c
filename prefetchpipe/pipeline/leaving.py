"""How a pass over a loader ends: by itself, with an error, left early; and what a later pass finds of it."""

from __future__ import annotations

import os
import threading
from _queue import SimpleQueue  # the C class itself
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from prefetchpipe.device.base import Stream
from prefetchpipe.errors import IteratorClosedError
from prefetchpipe.pipeline import torchloader
from prefetchpipe.pipeline.ticket import Ticket, end_ticket, failed_ticket
from prefetchpipe.pipeline.transfer import Transfer
from prefetchpipe.pipeline.waking import ReadyQueue, wait_ready

if TYPE_CHECKING:
    from prefetchpipe.pipeline.shared import Shared

__all__ = ["LEAVE_SECONDS", "STOP", "Leaving", "exiting"]

LEAVE_SECONDS = 0.5
"""How long leaving a pass waits for a loader that is in the middle of a batch; its thread ends by itself later."""

STOP = object()
"""In the queue of credits: the pass was left."""

exiting = threading.Event()
"""Set when the interpreter exits."""


class Leaving:
    """What a pass holds, and who gives it back.

    Whoever fetches and sends a batch, the thread or a consumer, is *inside*: it holds ``_inside``. Nothing is given
    back while somebody is; a pass that is stopped meanwhile is released by whoever leaves last.

    Args:
        shared: State of the prefetcher over its passes.
        source: ``iter(loader)``, made in the caller's thread.
    """

    def __init__(self, shared: Shared, source: Any) -> None:
        self.source = source
        self.transfer: Transfer = shared.lease_transfer()
        self.why_closed = ""
        self.on_leave: Callable[[], None] | None = None
        """Brings a thread back that waits inside a source of ours."""
        self._shared = shared
        self._device = shared.device
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._ready: ReadyQueue[Ticket] = ReadyQueue()
        self._credits: SimpleQueue[Any] = SimpleQueue()
        self._sent = self._sent_bytes = 0
        self._inside = threading.Lock()  # see above; the holder's thread is in _insider
        self._insider = 0
        self._ended = False
        self._stopping = False
        self._released = False
        self._gone = threading.Event()
        self._gone_signal: ReadyQueue[None] = ReadyQueue()
        self._drawn_taken: Any = None
        self._drawn_sent: Any = None
        self._is_held_back = False
        self._users = 0
        self._predecessor: Leaving | None = None
        self._follow_lock = threading.Lock()

    def attach(self) -> bool:
        """One more iterator shows this pass; False if it is over."""
        if not self.is_ours:
            return False
        with self._shared.lock:
            if self._stopping or self._released:
                return False
            self._users += 1
            return True

    def detach(self) -> None:
        """An iterator went; with the last one, the pass is left."""
        if not self.is_ours:
            return  # the collector of a forked child; a thread that it has not may hold the lock
        with self._shared.lock:
            self._users -= 1
            if self._users > 0:
                return
            self.leave("")
        self.stop()

    def detach_soon(self) -> None:
        """As :meth:`detach`, without waiting for the thread: it gives back by itself."""
        if not self.is_ours:
            return
        with self._shared.lock:
            self._users -= 1
            if self._users > 0:
                return
            self.leave("")
        thread = self._thread
        if thread is None or self._ended or not thread.is_alive():
            self.stop()  # nothing is under way: a thread that has put its last ticket does nothing but return
        else:
            torchloader.wake(self.source)

    @property
    def is_ours(self) -> bool:
        """Whether this process started it: a forked child has a copy of this object, not of thread or device."""
        return self._pid == os.getpid()

    @property
    def is_stopping(self) -> bool:
        """Whether somebody has left the pass."""
        return self._stopping

    def finish(self) -> None:
        """The last ticket was taken: give everything back."""
        self._ended = True
        self._ready.put(end_ticket())  # for another thread that waits at this iterator
        if self._stopping:
            return  # whoever stops the pass gives back, or whoever is inside, when the loader comes back
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()  # contract 9; it has put its last ticket and does nothing but return
        self._release()

    def fail(self) -> None:
        """The pass ended with an error."""
        source = self.source
        self.finish()
        if torchloader.has_workers(source) and (
            torchloader.has_dead_worker(source)
            or not getattr(source, "_persistent_workers", False)
            or self._shared.twins.is_broken(source)
        ):
            self._shared.twins.shut_down(source)

    def leave(self, why: str) -> None:
        """The first step of :meth:`stop`: flag and wake."""
        self.why_closed = self.why_closed or why
        if not self._stopping:
            self._stopping = True
            self._credits.put(STOP)
            if self.on_leave is not None:
                self.on_leave()
            self._ready.put(failed_ticket(self._closed()))  # a consumer that waits in another thread

    def stop(self, *, why: str = "", seconds: float = LEAVE_SECONDS) -> bool:
        """Leave the pass: flag, wake, join, clear. May be called from any thread and more than once.

        Also by the collector, in the middle of anything: then nothing is waited for that the calling thread itself
        is inside of.

        Returns:
            Whether everything was given back; if not, it is when the loader comes back.
        """
        if not self.is_ours:
            return True
        self.leave(why)
        if self._insider == threading.get_ident():
            return False
        thread = self._thread
        if thread is not None and thread is not threading.current_thread() and thread.is_alive():
            if torchloader.has_dead_worker(self.source):
                self._shared.twins.shut_down(self.source)
            else:
                torchloader.wake(self.source)
            thread.join(seconds)
            if thread.is_alive():
                return False
        if not self._inside.acquire(timeout=min(seconds, LEAVE_SECONDS)):
            return thread is None  # a consumer's thread is in the middle of a batch, and gives back when it leaves
        self._inside.release()
        self._release()
        return True

    def _closed(self) -> BaseException:
        if exiting.is_set() and threading.current_thread() is not threading.main_thread():
            return SystemExit()  # ends a daemon thread of the user's without a word, as the exit itself would
        why = self.why_closed or "it was closed"
        return IteratorClosedError(f"this pass has ended: {why}; iter(prefetcher) starts a new one")

    def join(self) -> None:
        """Wait until nobody is inside and all is given back: a one-shot source serves one pass after the other."""
        if self._insider == threading.get_ident():
            raise ValueError("the loader advances an iterator over itself")
        self._gone.wait()

    async def gone_soon(self) -> None:
        """Until all is given back."""
        while not self._gone.is_set():
            await wait_ready(self._gone_signal)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nobody fetches for the length of a ``with`` block; a batch being fetched is waited for."""
        if self._insider == threading.get_ident():
            yield
            return
        with self._inside:
            self._insider = threading.get_ident()
            try:
                yield
            finally:
                self._insider = 0
        if self._stopping:
            self._release()

    def hold_back(self) -> None:
        """A newer pass begins, over a loader with a generator of its own: from here on nothing is drawn ahead.

        What was drawn ahead is taken back, so that the newer pass draws what it would after the plain loop
        (contract 10).
        """
        if not self.is_ours:
            return
        with self.held():
            self._is_held_back = True
            if not self._released:  # a pass that has ended drew what the plain loop draws
                self._shared.restore_draws(self, self._drawn_taken, self._drawn_sent)

    def has_dead_worker(self) -> bool:
        """Whether torch lost a worker process of this pass."""
        return self.is_ours and torchloader.has_dead_worker(self.source)

    # Passes over one source

    def follow(self, older: Leaving) -> None:
        """Go on where ``older``, a pass over the same source that was left, stops."""
        self._predecessor = older

    def _follow(self) -> None:
        with self._follow_lock:  # another consumer's thread waits here too
            older = self._predecessor
            if older is not None:
                older.join()
                self.adopt(self._shared.take_carried(self.source))
                self._predecessor = None

    @property
    def is_following(self) -> bool:
        """Whether an older pass over the same source has to be waited for, by :meth:`follow_soon`."""
        return self._predecessor is not None

    async def follow_soon(self) -> None:
        """Wait for that pass and take over what it left."""
        older = self._predecessor
        if older is not None:
            await older.gone_soon()
            self._follow()

    def adopt(self, tickets: list[Ticket]) -> None:
        """Begin with batches that an earlier pass took out of the same source (contract 1)."""
        for ticket in tickets:
            self._ready.put(ticket)
            self._sent += 1
            self._sent_bytes += ticket.nbytes
            self._ended = self._ended or ticket.final
            if not self._credits.empty():
                self._credits.get()

    def _keeps_if_left(self, ticket: Ticket, stream: Stream) -> bool:
        """Whether the pass was left meanwhile. Whoever is inside still: what is given back then has this ticket too."""
        if not self.is_stopping:
            return False
        self.transfer.seal(ticket, stream)
        self._ready.put(ticket)
        return True

    def _release(self) -> None:
        """Give everything back, once."""
        with self._shared.lock:
            if self._released:
                return
            self._released = True
        left = []
        while not self._ready.empty():
            ticket = self._ready.get()
            if ticket.from_source and not (ticket.final and ticket.error is None):  # the end comes again by itself
                left.append(ticket)
            del ticket
        if self._stopping:
            self._shared.restore_draws(self, self._drawn_taken, self._drawn_sent)
        source = self.source
        if torchloader.has_dead_worker(source):
            self._shared.twins.shut_down(source)
        elif left and not torchloader.is_torchs(source) and self._shared.carry(source, left):
            left = []
        for ticket in left:
            ticket.error = None  # its traceback leads back to the ticket, and holds torch's iterator until a collection
        left.clear()
        with self._device.beside_captures():
            self.transfer.lent.return_all()
            self._shared.twins.retire(source)  # before its workers are ended: none of them waits for a slot then
        del source
        self.source = None  # after carrying: a new pass finds either this one or what it left
        self._ready.put(
            failed_ticket(self._closed()) if self._stopping else end_ticket()
        )  # somebody may be about to wait
        packers, self.transfer.packers = self.transfer.packers, None
        if packers is not None:
            packers.close()
        self._shared.return_transfer(self.transfer)
        self._gone.set()
        self._gone_signal.put(None)
