"""The producer's side of a pass: ``next(loader)``, the copy, and the thread that does both ahead of the loop."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from prefetchpipe import native
from prefetchpipe.device.base import Event, Stream
from prefetchpipe.errors import PrefetchWarning
from prefetchpipe.options import usable_cores
from prefetchpipe.pipeline import torchloader
from prefetchpipe.pipeline.leaving import STOP, Leaving
from prefetchpipe.pipeline.pace import Pace
from prefetchpipe.pipeline.shortway import NOT_SHORT, ShortWay
from prefetchpipe.pipeline.staging import Packers
from prefetchpipe.pipeline.threadstate import ThreadState, limit_packing_threads
from prefetchpipe.pipeline.threadtrial import ThreadTrial
from prefetchpipe.pipeline.ticket import Ticket, end_ticket, failed_ticket

if TYPE_CHECKING:
    from prefetchpipe.pipeline.shared import Shared

__all__ = ["WAITING", "Fetching"]

WAITING = object()
"""In the queue of credits: a consumer waits, or the thread is to retire; it looks."""

_RETIRE_SECONDS = 0.05
"""How long a loop waits for its thread to end, once that was found not to pay; one that is held up stays."""

_numbers = itertools.count(1)


class Fetching(Leaving):
    """Fetches batches and sends them to the device, in the caller's thread or in one of its own.

    Credits bound the look-ahead (contract 8): ``depth`` at the start, one more for each batch delivered. A credit
    carries the event that the consumer's stream passes when it is done with the batch before (contract 14), so device
    memory in use is bounded too when the GPU is slower than the loop.

    Args:
        shared: State of the prefetcher over its passes.
        source: ``iter(loader)``, made in the caller's thread.
    """

    def __init__(self, shared: Shared, source: Any) -> None:
        super().__init__(shared, source)
        self.short: ShortWay | None = None
        self._next: Callable[[Any], Any] = next
        self._options = shared.options
        self._copy_stream = shared.device.copy_stream
        self._counters = shared.counters
        self._modes = ThreadState()
        self._reusable = not torchloader.gives_up_memory(shared.loader)
        self._number = next(_numbers)
        self._depth = self._options.depth
        for _ in range(self._options.depth):
            self._credits.put(None)
        self._done_events: list[Event] = []
        self._taken = self._taken_bytes = 0
        self._consumers_waiting: set[object] = set()  # not a number: Ctrl-C may come before or after it is counted
        self._threaded = False
        self._may_start = True
        self._is_retiring = self._leaves = False
        self._retired = threading.Event()
        self._pace: Pace | None = None
        self._trial: ThreadTrial | None = None
        self._verifies = False
        self._on_caller_stream = False
        self._done: Event = None
        self._wants_thread = False
        self._fetch_seconds = self._send_seconds = 0.0
        self._threads = self._options.copy_threads or usable_cores()
        if not native.is_available():
            self.transfer.packers = Packers(self._threads // 2, f"prefetchpipe-packing-{self._number}")

    @property
    def bytes_ahead(self) -> int:
        """Bytes on the device that belong to batches not taken yet."""
        return 0 if self._released else self._sent_bytes - self._taken_bytes

    @property
    def is_threaded(self) -> bool:
        """Whether a thread fetches."""
        return self._threaded

    # Fetching

    def _produce(self, stream: Stream) -> Ticket:
        """Fetch one batch and send it. Errors become tickets, so that they arrive in order (contract 7)."""
        try:
            started = self._counters.clock()
            self.transfer.lent.return_passed()
            with self._modes.user_code():
                try:
                    batch = self._next(self.source)
                except StopIteration:
                    ticket = end_ticket()
                    self._drawn_sent = self._shared.capture_draws()
                    ticket.state = self._shared.capture_state(self)
                    return ticket
                state = self._shared.capture_state(self)
                drawn = self._drawn_sent = self._shared.capture_draws()
            fetched = self._counters.clock()
            ticket = self._send(batch, stream)
            if self._verifies:
                self.transfer.verify(ticket)
            self._note_sent(ticket, started, fetched)
            ticket.state = state
            ticket.drawn = drawn
            ticket.from_source = True
        except BaseException as error:  # noqa: BLE001 - SystemExit and GeneratorExit are the consumer's too
            ticket = self._failed(error)
        return ticket

    def _fetched_short(self, stream: Stream) -> tuple[Any, Ticket | None]:
        """A batch; else ``NOT_SHORT`` and a ticket."""
        counters, transfer = self._counters, self.transfer
        assert self.short is not None
        assert transfer.short is not None
        started = counters.clock()
        try:
            transfer.lent.return_passed()
            try:
                given = self._next(self.source)
            except StopIteration:
                return NOT_SHORT, end_ticket()
            fetched = counters.clock()
            nbytes, tensors = transfer.short.nbytes_of(given)
            if transfer.short.is_marked(nbytes):
                self._done = self._mark(stream)
            batch = NOT_SHORT if nbytes < 0 else transfer.short.send(given, nbytes, tensors, stream)
            if batch is NOT_SHORT:
                self.short.give_up()
                return NOT_SHORT, self._sent_ticket(given, stream, started, fetched)
        except BaseException as error:  # noqa: BLE001 - as in _produce
            return NOT_SHORT, self._failed(error)
        times, waited = counters.steady, transfer.short.waited_seconds
        times.sent_batches += 1
        times.device_wait_seconds += waited
        self._fetch_seconds = fetched - started
        self._send_seconds = counters.clock() - fetched - waited
        times.fetch_seconds += self._fetch_seconds
        times.send_seconds += self._send_seconds
        self._sent += 1
        self._taken += 1
        counters.sent(1, nbytes, nbytes)
        return batch, None

    def _sent_ticket(self, batch: Any, stream: Stream, started: float, fetched: float) -> Ticket:
        ticket = self._send(batch, stream)
        self._note_sent(ticket, started, fetched)
        ticket.from_source = True
        return ticket

    def _failed(self, error: BaseException) -> Ticket:
        ticket = failed_ticket(torchloader.error_of(self.source, error))
        ticket.from_source = True
        return ticket

    def _note_sent(self, ticket: Ticket, started: float, fetched: float) -> None:
        sent = ticket.sent_at = self._counters.clock()
        self._fetch_seconds, self._send_seconds = fetched - started, sent - fetched
        counters, times = self._counters, self.transfer.times
        times.sent_batches += 1
        times.fetch_seconds += self._fetch_seconds
        times.send_seconds += self._send_seconds
        if counters.recorder is not None:
            counters.recorder.add("loader", "next(loader)", started, fetched, self._sent)
            counters.recorder.add("packing", "pack and launch", fetched, sent, self._sent)
        self._sent += 1
        self._sent_bytes += ticket.nbytes
        counters.sent(self._sent - self._taken, ticket.nbytes, self._sent_bytes - self._taken_bytes)

    def _send(self, batch: Any, stream: Stream) -> Ticket:
        transfer, modes, reusable = self.transfer, self._modes, self._reusable
        transfer.times = self._counters.sending(self._sent)
        transfer.number = self._sent
        tries = 0
        while True:
            try:
                if self._threaded:
                    return transfer.send(batch, modes, self._copy_stream, caller=None, reusable_source=reusable)
                if self._on_caller_stream:
                    return transfer.send(batch, modes, stream, caller=None, reusable_source=reusable)
                with self._device.on_copy_stream():
                    return transfer.send(batch, modes, self._copy_stream, caller=stream, reusable_source=reusable)
            except torch.OutOfMemoryError:
                if not self._threaded or tries > self._options.depth:
                    raise
                was_taken = self._wait_for_memory()
                if was_taken is None:
                    raise
                tries += not was_taken  # waits for batches of ours end by themselves, with the last of them

    def _mark(self, stream: Stream) -> Event:
        """An event at the tail of the consumer's stream."""
        try:
            event = self._done_events.pop()
        except IndexError:
            event = self._device.new_event()
        self._device.record(event, stream)
        return event

    def _wait_until_done(self, done: Event) -> None:
        """Bound the run-ahead (8, 14): the host waits until the GPU has finished with the batch ``depth + 1`` back."""
        if done is not None:
            if not self._device.query(done):
                started = self._counters.clock()
                self._device.synchronize(done)
                self._note_device_wait(started)
            self._done_events.append(done)

    def _note_device_wait(self, started: float) -> None:
        now = self._counters.clock()
        self._counters.sending(self._sent).device_wait_seconds += now - started
        if self._counters.recorder is not None:
            self._counters.recorder.add("packing", "wait for the device", started, now, self._sent)

    # The thread

    def start_thread(self, *, blocking: bool) -> bool:
        """A thread fetches from the first batch on. False: somebody is inside, and ``blocking`` was not asked for."""
        if self._threaded:
            return True
        if not self._inside.acquire(blocking=blocking):
            return False
        try:
            if not (self._thread is not None or self._ended or self._stopping):
                self._verifies = True
                self._start("async for: the event loop is not held")
        finally:
            self._inside.release()
        return True

    def _start(self, reason: str, *, is_trial: bool = False) -> bool:
        """Hand over to a thread. The caller is inside, so the thread begins only when it has left.

        Args:
            reason: For ``stats()``.
            is_trial: It stays only if steps are shorter with it.
        """
        if not self._may_start:
            return False
        self._retired.clear()  # an earlier thread of this pass may have set it
        thread = threading.Thread(target=self._thread_main, name=f"prefetchpipe-producer-{self._number}", daemon=True)
        try:
            thread.start()  # waits for it; interrupted there by Ctrl-C, it finds that it is not ours, and goes
        except RuntimeError:  # no more threads to be had: the consumer's own goes on
            self._may_start = False
            self._pace = None
            self._shared.note_path("caller", "no thread could be started")
            return False
        if not is_trial:
            self._trial = None
        elif self._trial is not None:
            self._trial.begin()
        self._on_caller_stream = False
        self._threaded = True
        self._thread = thread
        self._shared.note_path("thread", reason)
        return True

    def _thread_main(self) -> None:
        with self._inside:  # whoever starts it is
            if self._thread is not threading.current_thread():
                return
        self._modes.run(self._run)
        while self._leaves:
            self._leaves = False
            if not self._goes():
                self._retired.set()
                self._modes.run(self._run)
        self._retired.set()

    def _run(self) -> None:
        try:
            self._device.bind_thread()
            limit_packing_threads(self._threads)
            self._leaves = self._fetch_ahead()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the consumer must hear of it (contract 7)
            self._ready.put(failed_ticket(error))
        finally:
            self._insider = 0
            if self._stopping:
                self._release()

    def _fetch_ahead(self) -> bool:
        """In the thread, until the pass is over; True: until the caller fetches again."""
        aside = 0  # credits not used, since the pass is held back
        while not self._ended and not self._stopping:
            credit = self._credits.get()  # contract 8
            if credit is STOP:
                break
            if self._is_retiring:
                self._puts_back(credit, aside)
                return True
            if credit is WAITING:
                if not aside:
                    continue
                aside -= 1
            else:
                self._wait_until_done(credit)
            with self._inside:
                if self.is_stopping:
                    break
                if self._is_held_back and not self._consumers_waiting:
                    aside += 1
                    continue
                self._insider = threading.get_ident()
                ticket = self._produce(None)
                self._insider = 0
            self._ready.put(ticket)  # contract 1: before anybody can see that it was the last
            if ticket.final:
                self._ended = True
            del ticket
        return False

    def _retire_thread(self) -> bool:
        """The caller fetches again; whether the thread has ended. It does behind the batch that it is at."""
        thread = self._thread
        self._is_retiring = True
        self._credits.put(WAITING)
        try:
            self._retired.wait(_RETIRE_SECONDS)
        finally:
            with self._shared.lock:
                self._is_retiring = False
                has_retired = not self._threaded
        if has_retired and thread is not None:
            thread.join()  # contract 9; it does nothing but return
        return has_retired

    def _puts_back(self, credit: Any, aside: int) -> None:
        """In the thread: all credits where the caller finds them (contract 8)."""
        for unused in [credit] * (credit is not WAITING) + [None] * aside:
            self._credits.put(unused)

    def _goes(self) -> bool:
        """In the thread, outside of the consumer's context: whether it ends. Not if somebody waits for it by now."""
        with self._shared.lock:
            self._is_retiring = False
            if self._consumers_waiting or self._stopping:
                return False
            self._threaded = False
            self._thread = None
            return True

    # Device memory

    def _wait_for_memory(self) -> bool | None:
        """The device is full (contract 15): go on with less depth once the consumer has taken a batch.

        The loader is not being asked meanwhile, so nobody is inside: a newer pass may begin.

        Returns:
            Whether a batch was waited for; False: nothing of ours was left to be taken; None: the pass was left.
        """
        self._insider = 0
        self._inside.release()
        try:
            was_taken = self._until_memory_is_freed()
        finally:
            self._inside.acquire()
            self._insider = threading.get_ident()
        return None if self._stopping else was_taken

    def _until_memory_is_freed(self) -> bool | None:
        if self._sent > self._taken:
            credit = self._credits.get()
            if credit is STOP:
                return None
            if credit is not WAITING:
                self._wait_until_done(credit)
                self._depth -= 1
                self._shared.counters.depth = self._depth
                self._warn_of_depth()
            return True
        # Nothing of ours is left to be taken. What may still come free: what the consumer's step holds, until it asks
        # for the next batch, and what the GPU still reads, until its stream has passed.
        aside: list[Any] = []
        while not self._consumers_waiting:
            credit = self._credits.get()
            if credit is STOP:
                return None
            if credit is not WAITING:
                aside.append(credit)
        for credit in aside:
            self._credits.put(credit)
        stream = self.transfer.consumer_stream
        if stream is not None:
            event = self._device.new_event()
            self._device.record(event, stream)
            self._device.synchronize(event)  # contract 15: what its work still reads comes free then
        return False

    def _warn_of_depth(self) -> None:
        if not self._shared.depth_warned:
            self._shared.depth_warned = True
            warnings.warn(
                f"device memory is full: prefetching goes on with less than depth={self._options.depth}",
                PrefetchWarning,
                stacklevel=2,
            )
