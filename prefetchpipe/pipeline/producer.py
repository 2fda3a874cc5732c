"""One pass over a loader: who calls ``next(loader)``, how far ahead, and how it ends."""

from __future__ import annotations

import itertools
import os
import threading
import warnings
from _queue import SimpleQueue  # the C class itself: put and get take a fraction of a microsecond
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from prefetchpipe.device.base import Event, Stream
from prefetchpipe.errors import IteratorClosedError, PrefetchWarning
from prefetchpipe.options import usable_cores
from prefetchpipe.pipeline import torchloader
from prefetchpipe.pipeline.pace import Pace
from prefetchpipe.pipeline.staging import Packers
from prefetchpipe.pipeline.threadstate import ThreadState, limit_packing_threads
from prefetchpipe.pipeline.transfer import Ticket, Transfer

if TYPE_CHECKING:
    from prefetchpipe.prefetcher import Shared

__all__ = ["LEAVE_SECONDS", "Producer"]

LEAVE_SECONDS = 0.5
"""How long leaving a pass waits for a loader that is in the middle of a batch; its thread ends by itself later."""

_numbers = itertools.count(1)

# Tokens in the credit queue beside events and None.
_STOP = object()
_WAITING = object()


class Producer:
    """The inner object of a pass. The thread and the iterator hold it; it holds neither iterator nor prefetcher.

    Credits bound the look-ahead: ``depth`` at the start, one more for each batch delivered. A credit carries the event
    that the consumer's stream passes when it is done with the batch before (contract 4), so device memory in use is
    bounded too when the GPU is slower than the loop.

    Args:
        shared: State of the prefetcher over its passes.
        source: ``iter(loader)``, made in the caller's thread.
    """

    def __init__(self, shared: Shared, source: Any) -> None:
        self._shared = shared
        self._source = source
        self._options = shared.options
        self._device = shared.device
        self._copy_stream = shared.device.copy_stream
        self._transfer: Transfer = shared.lease_transfer()
        self._modes = ThreadState()
        self._reusable = not torchloader.gives_up_memory(shared.loader)
        self._number = next(_numbers)
        threads = self._options.copy_threads or usable_cores()
        self._transfer.packers = Packers(threads // 2, f"prefetchpipe-packing-{self._number}")
        self._one_shot = source is shared.loader
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._ready: SimpleQueue[Ticket] = SimpleQueue()
        self._credits: SimpleQueue[Any] = SimpleQueue()
        self._credit_count = self._options.depth
        self._done_events: list[Event] = []
        self._sent = 0
        self._taken = 0
        self._consumer_waits = False
        self._stopping = False
        self._lock = threading.Lock()  # guards the end of the pass: consumer, closer and thread may meet there
        self._released = False
        self.why_closed = ""
        self._pace: Pace | None = None
        if self._options.fetch == "auto":
            self._pace = Pace(self._device, has_workers=torchloader.has_workers(source))
        else:
            shared.note_path(self._options.fetch, f"fetch={self._options.fetch!r} was asked for")
        self._fetch_seconds = self._send_seconds = 0.0
        self._on_caller_stream = False
        carried = shared.take_carried() if self._one_shot else []
        for ticket in carried:
            self._ready.put(ticket)
            self._sent += 1
        for _ in range(self._options.depth - len(carried)):
            self._credits.put(None)
        if self._device.staged:
            # Work that the caller has queued so far may be writing what the loader or the transform will read.
            event = self._device.new_event()
            self._device.record(event, self._device.current_stream())
            self._device.wait(self._device.copy_stream, event)

    # The consumer's side

    @property
    def transfer(self) -> Transfer:
        """The way to the device, leased for this pass."""
        return self._transfer

    def mark_done(self, stream: Stream) -> Event:
        """An event at the tail of the consumer's stream: past it, everything about earlier batches is."""
        if not self._device.staged or self._on_caller_stream:
            return None
        event = self._done_events.pop() if self._done_events else self._device.new_event()
        self._device.record(event, stream)
        return event

    def allow(self, done: Event) -> None:
        """One more batch may be sent, once ``done`` has passed."""
        self._taken += 1
        self._credits.put(done)

    def take(self, stream: Stream) -> Ticket:
        """The next ticket, in order; waits for it if need be.

        Raises:
            IteratorClosedError: The pass was closed.
        """
        if self._stopping:
            raise self._closed()
        if not self._ready.empty():
            return self._ready.get()
        if self._thread is None:
            if self._options.fetch == "thread":
                self._start("fetch='thread' was asked for")
            if self._thread is None:
                with self._device.beside_captures():
                    return self._produce_here(stream)
        if not self._thread.is_alive() and self._ready.empty():
            raise self._closed()  # a forked child, or a thread that ended with its pass
        started = perf_counter()
        self._consumer_waits = True
        self._credits.put(_WAITING)
        try:
            ticket = self._ready.get()
        except Exception:
            # Raised by a signal handler inside the wait; torch's for dead workers is one, and the pass is over then.
            self.stop(why="an error interrupted it")
            raise
        finally:
            self._consumer_waits = False
            self._shared.counters.stall_seconds += perf_counter() - started
        return ticket

    def _closed(self) -> IteratorClosedError:
        why = self.why_closed or "it was closed"
        return IteratorClosedError(f"this pass has ended: {why}; iter(prefetcher) starts a new one")

    def _produce_here(self, stream: Stream) -> Ticket:
        """The short path: no hand-off between threads."""
        credit = self._credits.get()
        while credit is _WAITING:
            credit = self._credits.get()
        if credit is _STOP:
            raise self._closed()
        pace = self._pace
        if pace is None or pace.stays:
            self._wait_until_done(credit)
            return self._produce(stream)
        if not pace.is_watching and self._is_behind(credit):
            self._credits.put(credit)
            self._start("the device is slower than the loop, so a thread waits for it instead of the loop")
            return self.take(stream)
        self._wait_until_done(credit)
        pace.begin()
        ticket = self._produce(stream)
        if not ticket.final:
            if pace.end(self._fetch_seconds, self._send_seconds):
                self._start(pace.reason)
            else:
                self._on_caller_stream = not pace.is_watching and self._transfer.suits_consumer_stream()
                self._shared.note_path("caller", pace.reason)
        return ticket

    def _is_behind(self, done: Event) -> bool:
        if done is not None and not self._device.query(done):
            return True
        return self._on_caller_stream and self._transfer.is_behind()

    def _wait_until_done(self, done: Event) -> None:
        """Bound the run-ahead (contract 4): host waits until the GPU has finished with the batch ``depth`` back."""
        if done is not None:
            if not self._device.query(done):
                self._device.synchronize(done)
            self._done_events.append(done)

    # The producer's side

    def _start(self, reason: str) -> None:
        self._on_caller_stream = False
        thread = threading.Thread(
            target=self._modes.run, args=(self._run,), name=f"prefetchpipe-producer-{self._number}", daemon=True
        )
        self._thread = thread
        try:
            thread.start()
        except RuntimeError:  # no more threads to be had: the consumer's own goes on
            self._thread = None
            self._pace = None
            self._shared.note_path("caller", "no thread could be started")
            return
        self._shared.note_path("thread", reason)

    def _run(self) -> None:
        try:
            self._device.bind_thread()
            limit_packing_threads(self._options.copy_threads or usable_cores())
            while not self._stopping:
                credit = self._credits.get()
                if credit is _STOP:
                    break
                if credit is _WAITING:
                    continue
                self._wait_until_done(credit)
                ticket = self._produce(None)
                final = ticket.final
                self._sent += 1
                self._ready.put(ticket)
                del ticket
                if final:
                    break
        except BaseException as error:  # noqa: BLE001 - whatever it is, the consumer must hear of it (contract 7)
            self._ready.put(_failed(error))
        finally:
            if self._stopping:
                self._release()

    def _produce(self, stream: Stream) -> Ticket:
        """Fetch one batch and send it. Errors become tickets, so that they arrive in order (contract 7)."""
        try:
            started = perf_counter()
            with self._modes.user_code() if self._thread is not None else nullcontext(), self._source_lock():
                try:
                    batch = next(self._source)
                except StopIteration:
                    ticket = Ticket()
                    ticket.final = True
                    ticket.state = self._shared.capture_state(self)
                    return ticket
                state = self._shared.capture_state(self)
            fetched = perf_counter()
            ticket = self._send(batch, stream)
            counters = self._shared.counters
            self._fetch_seconds, self._send_seconds = fetched - started, perf_counter() - fetched
            counters.fetch_seconds += self._fetch_seconds
            counters.send_seconds += self._send_seconds
            ticket.state = state
        except BaseException as error:  # noqa: BLE001 - SystemExit and GeneratorExit are the consumer's too
            return _failed(torchloader.error_of(self._source, error))
        return ticket

    def _source_lock(self) -> AbstractContextManager[Any]:
        return self._shared.one_shot_lock if self._one_shot else nullcontext()

    def _send(self, batch: Any, stream: Stream) -> Ticket:
        transfer, modes, reusable = self._transfer, self._modes, self._reusable
        while True:
            try:
                if self._thread is not None:
                    return transfer.send(batch, modes, self._copy_stream, caller=None, reusable_source=reusable)
                if self._on_caller_stream:
                    return transfer.send(batch, modes, stream, caller=None, reusable_source=reusable)
                with self._device.on_copy_stream():
                    return transfer.send(batch, modes, self._copy_stream, caller=stream, reusable_source=reusable)
            except torch.OutOfMemoryError:
                if self._thread is None or not self._wait_for_memory():
                    raise

    def _wait_for_memory(self) -> bool:
        """The device is full (contract 15): go on with less depth once the consumer has taken a batch.

        Returns:
            Whether another try may succeed.
        """
        if self._sent > self._taken:
            credit = self._credits.get()
            if credit is _STOP:
                return False
            if credit is not _WAITING:
                self._wait_until_done(credit)
                self._credit_count -= 1
                self._shared.counters.depth = self._credit_count
                if not self._shared.depth_warned:
                    self._shared.depth_warned = True
                    warnings.warn(
                        f"device memory is full: prefetching goes on with less than depth={self._options.depth}",
                        PrefetchWarning,
                        stacklevel=2,
                    )
            return True
        # Nothing of ours is left to be taken: one more try when the consumer has ended its step and asks.
        waited = self._consumer_waits
        while not self._consumer_waits:
            credit = self._credits.get()
            if credit is _STOP:
                return False
            if credit is not _WAITING:
                self._credits.put(credit)
        return not waited

    # The end

    def finish(self) -> None:
        """The last ticket was taken: give everything back."""
        if self._stopping:
            return  # whoever stops the pass does it, or the thread when the loader comes back
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()  # it has put its last ticket and does nothing but return
        self._release()
        end = Ticket()
        end.final = True
        self._ready.put(end)  # for another thread that waits at this iterator

    def fail(self) -> None:
        """The pass ended with an error."""
        source = self._source
        self.finish()
        if source is None:
            return
        if torchloader.has_workers(source) and (
            torchloader.has_dead_worker(source) or not getattr(source, "_persistent_workers", False)
        ):
            torchloader.shut_down(source, self._shared.loader)

    def stop(self, *, why: str = "", seconds: float = LEAVE_SECONDS) -> bool:
        """Leave the pass: flag, wake, join, clear. May be called from any thread and more than once.

        Returns:
            Whether the thread has ended; if not, it ends by itself when the loader comes back.
        """
        if os.getpid() != self._pid:
            return True  # a forked child holds a copy of this object, not of the thread or the device
        self.why_closed = self.why_closed or why
        if not self._stopping:
            self._stopping = True
            self._credits.put(_STOP)
            self._ready.put(_failed(self._closed()))  # a consumer that waits in another thread
        thread = self._thread
        if thread is not None and thread is not threading.current_thread() and thread.is_alive():
            source = self._source
            if torchloader.has_dead_worker(source):
                torchloader.shut_down(source, self._shared.loader)
            elif source is not None:
                torchloader.wake(source)
            thread.join(seconds)
            if thread.is_alive():
                return False
        self._release()
        return True

    def has_dead_worker(self) -> bool:
        """Whether torch lost a worker process of this pass."""
        return torchloader.has_dead_worker(self._source)

    def _release(self) -> None:
        with self._lock:
            if self._released:
                return
            self._released = True
            source, self._source = self._source, None
        left = []
        while not self._ready.empty():
            ticket = self._ready.get()
            if not isinstance(ticket.error, IteratorClosedError):
                left.append(ticket)
            del ticket
        if self._one_shot:
            self._shared.carry(left)
        left.clear()
        if self._stopping:
            self._ready.put(_failed(self._closed()))  # the consumer may be about to wait
        if torchloader.has_dead_worker(source):
            torchloader.shut_down(source, self._shared.loader)
        del source
        packers, self._transfer.packers = self._transfer.packers, None
        if packers is not None:
            packers.close()
        self._shared.return_transfer(self._transfer)


def _failed(error: BaseException) -> Ticket:
    ticket = Ticket()
    ticket.final = True
    if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
        error = error.with_traceback(error.__traceback__.tb_next)  # our own frame tells the user nothing
    ticket.error = error
    return ticket
