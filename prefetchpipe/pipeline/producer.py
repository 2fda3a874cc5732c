"""One pass over a loader: who calls ``next(loader)``, how far ahead, and how it ends."""

from __future__ import annotations

import itertools
import os
import threading
import warnings
from _queue import SimpleQueue  # the C class itself
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from prefetchpipe.device.base import Event, Stream
from prefetchpipe.errors import IteratorClosedError, PrefetchWarning
from prefetchpipe.options import usable_cores
from prefetchpipe.pipeline import gil, torchloader
from prefetchpipe.pipeline.pace import Pace
from prefetchpipe.pipeline.plainway import NOT_PLAIN, PlainWay, copied_plainly
from prefetchpipe.pipeline.staging import Packers
from prefetchpipe.pipeline.threadstate import ThreadState, limit_packing_threads
from prefetchpipe.pipeline.threadtrial import ThreadTrial
from prefetchpipe.pipeline.ticket import Ticket, end_ticket, failed_ticket
from prefetchpipe.pipeline.transfer import Transfer
from prefetchpipe.pipeline.waking import ReadyQueue, wait_ready

if TYPE_CHECKING:
    from prefetchpipe.pipeline.shared import Shared

__all__ = ["LEAVE_SECONDS", "Producer", "exiting"]

LEAVE_SECONDS = 0.5
"""How long leaving a pass waits for a loader that is in the middle of a batch; its thread ends by itself later."""

_RETIRE_SECONDS = 0.05
"""How long a loop waits for its thread to end, once that was found not to pay; one that is held up stays."""

_SEVERAL_THREADS = 4
_HEAVY_FETCH_SECONDS = 2e-3
_PROBE_BATCHES = 8
_OFTEN_PROBED_BATCHES = 32
"""Beside a loader so slow, so often, it is looked whether it keeps the GIL: a sleep of 0.05 ms in 16 ms or more."""

_numbers = itertools.count(1)

exiting = threading.Event()
"""Set when the interpreter exits."""

# Tokens in the credit queue beside events and None.
_STOP = object()
_WAITING = object()


class Producer:
    """The inner object of a pass. The thread and the iterators hold it; it holds neither them nor the prefetcher.

    Credits bound the look-ahead (contract 8): ``depth`` at the start, one more for each batch delivered. A credit
    carries the event that the consumer's stream passes when it is done with the batch before (contract 4), so device
    memory in use is bounded too when the GPU is slower than the loop.

    Whoever fetches and sends a batch, the thread or a consumer, is *inside*: it holds ``_inside``. Nothing is given
    back while somebody is; a pass that is stopped meanwhile is released by whoever leaves last.

    Args:
        shared: State of the prefetcher over its passes.
        source: ``iter(loader)``, made in the caller's thread.
    """

    def __init__(self, shared: Shared, source: Any) -> None:
        self.source = source
        self._next: Callable[[Any], Any] = next
        self._shared = shared
        self._options = shared.options
        self._device = shared.device
        self._copy_stream = shared.device.copy_stream
        self.transfer: Transfer = shared.lease_transfer()
        self._counters = shared.counters
        self._modes = ThreadState()
        self._reusable = not torchloader.gives_up_memory(shared.loader)
        self._number = next(_numbers)
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._threaded = False
        self._may_start = True
        self._ready: ReadyQueue[Ticket] = ReadyQueue()
        self._credits: SimpleQueue[Any] = SimpleQueue()
        for _ in range(self._options.depth):
            self._credits.put(None)
        self._depth = self._options.depth
        self._done_events: list[Event] = []
        self._sent = self._taken = 0
        self._sent_bytes = self._taken_bytes = 0
        self._consumers_waiting = 0
        self._inside = threading.Lock()  # see above; the holder's thread is in _insider
        self._insider = 0
        self._ended = False
        self._stopping = False
        self._released = False
        self._gone = threading.Event()
        self._gone_signal: ReadyQueue[None] = ReadyQueue()
        self._follow_lock = threading.Lock()
        self._drawn_taken: Any = None
        self._drawn_sent: Any = None
        self._is_held_back = False
        self._users = 0
        self._predecessor: Producer | None = None
        self.why_closed = ""
        self.on_leave: Callable[[], None] | None = None
        """Brings a thread back that waits inside a source of ours."""
        self._verifies = False
        self._fetch_seconds = self._send_seconds = 0.0
        self._on_caller_stream = False
        self._threads = self._options.copy_threads or usable_cores()
        self.transfer.packers = Packers(self._threads // 2, f"prefetchpipe-packing-{self._number}")
        self._choose_ways()
        if self._device.staged:
            # Contract 3: work that the caller has queued may be writing what the loader or the transform will read.
            event = self._device.new_event()
            self._device.record(event, self._device.current_stream())
            self._device.wait(self._device.copy_stream, event)

    def _choose_ways(self) -> None:
        self._is_retiring = self._gives_thread_up = self._leaves = False
        self._retired = threading.Event()
        has_workers = torchloader.has_workers(self.source)
        self._pace = self._chosen_pace()
        self._trial: ThreadTrial | None = None
        if self._pace is not None and self._shared.thread_pays is None:
            self._trial = self._shared.thread_trial = self._shared.thread_trial or ThreadTrial(has_workers=has_workers)
            self._trial.begin()
        self.plain = PlainWay.for_pass(self._shared, suits=type(self) is Producer and not has_workers)

    def _chosen_pace(self) -> Pace | None:
        fetch = self._options.fetch
        if fetch != "auto":
            self._shared.note_path(fetch, f"fetch={fetch!r} was asked for")
            return None
        return Pace(
            self._device,
            has_workers=torchloader.has_workers(self.source),
            comes_packed=self._shared.twins.packs(self.source),
            packs_alone=torch.get_num_threads() == 1 and self._threads >= _SEVERAL_THREADS,
            clock=self._counters.clock,
        )

    # The consumer's side

    def mark_done(self, stream: Stream) -> Event:
        """An event at the tail of the consumer's stream: past it, everything about earlier batches is."""
        if not self._device.staged or self._on_caller_stream:
            return None
        try:
            event = self._done_events.pop()
        except IndexError:
            event = self._device.new_event()
        self._device.record(event, stream)
        return event

    def allow(self, done: Event, ticket: Ticket) -> None:
        """``ticket`` was taken: one more batch may be sent, once ``done`` has passed."""
        self._taken += 1
        self._taken_bytes += ticket.nbytes
        self._drawn_taken = ticket.drawn
        self._credits.put(done)

    def take(self, stream: Stream) -> Ticket:
        """The next ticket, in order; waits for it if need be.

        Raises:
            IteratorClosedError: The pass was closed.
            ValueError: Called by the loader itself, while it makes a batch.
        """
        if self._insider == threading.get_ident():
            raise ValueError("the loader advances the iterator that is waiting for it")
        if self._stopping:
            raise self._closed()
        self._take_over()
        while True:
            ticket = self._ready.poll()
            if ticket is not None:
                if self._fetch_seconds > _HEAVY_FETCH_SECONDS and self._threaded:
                    self._probe_gil()
                return ticket
            if not self._threaded:
                with self._device.beside_captures():
                    ticket = self._take_here(stream)
            if ticket is None:
                ticket = self._wait()
            if ticket is not None:
                return ticket

    def _take_over(self) -> None:
        """From an older pass over the same source, or from a thread that does not pay."""
        if self._predecessor is not None:
            self._follow()
        if self._gives_thread_up:
            self._give_thread_up()

    def _wait(self) -> Ticket | None:
        """For a ticket of the thread's; None if that has just retired."""
        if self._thread is None:
            with self._inside:  # another consumer's thread is just starting it
                pass
        thread = self._thread
        if (thread is None or not thread.is_alive()) and self._ready.empty():
            if self._ended and not self._stopping:
                return end_ticket()  # another consumer's thread has taken the end
            if not self._threaded and not self._stopping:
                return None
            raise self._closed()  # a forked child, say, which has no thread
        started, ready = self._begin_wait(), 0.0
        try:
            if not self._threaded:  # from here on it would not have retired
                return None
            ticket = self._ready.get()
            ready = ticket.sent_at
        except Exception:
            # Raised by a signal handler inside the wait. Torch's, for a dead worker, ends the pass.
            if torchloader.has_dead_worker(self.source):
                self.stop(why="a worker process of its loader died")
            raise
        finally:
            self._end_wait(started, ready)
        return ticket

    def _begin_wait(self) -> float:
        started = self._counters.clock()
        with self._shared.lock:
            self._consumers_waiting += 1
        self._credits.put(_WAITING)
        return started

    def _end_wait(self, started: float, ready: float) -> None:
        with self._shared.lock:
            self._consumers_waiting -= 1
        self._note_stall(started, ready)

    def _probe_gil(self) -> None:
        """A loop that never waits for a batch may still wait for the loader's Python, inside its own calls of torch."""
        batches = self._counters.batches
        if batches > _OFTEN_PROBED_BATCHES and batches % _PROBE_BATCHES:
            return
        if gil.can_probe and not torchloader.has_workers(self.source):
            self._counters.probed(gil.probe(self._counters.clock))

    def _note_stall(self, started: float, ready: float) -> None:
        now = self._counters.clock()
        times = self._counters.taking(self._taken)
        times.stall_seconds += now - started
        if ready >= started:
            times.handover_seconds += now - ready
        if self._counters.recorder is not None:
            self._counters.recorder.add("wait", "wait for the producer", started, now, self._taken)

    def _take_here(self, stream: Stream) -> Ticket | None:
        """The short path: no hand-off between threads. None if a thread has taken over."""
        with self._inside:  # contract 1: a second consumer's thread waits for its turn
            self._insider = threading.get_ident()
            if self._pace is not None:
                self._pace.enter()
            try:
                if self._options.fetch == "thread" and not self._threaded:
                    self._start("fetch='thread' was asked for")
                if self._threaded or self._stopping:
                    return None  # what the thread has put comes first, the end too
                if self._ended:
                    return end_ticket()
                credit = self._credit()
                if credit is _STOP:
                    return None
                behind = self._pace is not None and self._pace.may_start and not self._waits_for_choice
                behind = behind and self._is_behind(credit)
                if behind and self._start("the device is slower than the loop: a thread waits for it, not the loop"):
                    self._credits.put(credit)
                    return None
                try:
                    self._wait_until_done(credit)
                except BaseException:
                    self._credits.put(credit)  # Ctrl-C in the wait: the next call finds its credit again
                    raise
                if self._pace is None or self._pace.stays:
                    ticket = self._modes.call(self._produce, stream)
                else:
                    ticket = self._paced(stream)
                self._ended = ticket.final
                is_left = self._keeps_if_left(ticket, stream)
            finally:
                self._insider = 0
        if is_left:
            self._release()
            raise self._closed()
        return ticket

    def _keeps_if_left(self, ticket: Ticket, stream: Stream) -> bool:
        """Whether the pass was left meanwhile. Whoever is inside still: what is given back then has this ticket too."""
        if not self.is_stopping:
            return False
        self.transfer.seal(ticket, stream)
        self._ready.put(ticket)
        return True

    def _credit(self) -> Any:
        """The next one; what only wakes a thread is nothing here."""
        credit = self._credits.get()
        while credit is _WAITING:
            credit = self._credits.get()
        return credit

    def _paced(self, stream: Stream) -> Ticket:
        assert self._pace is not None
        self._pace.begin()
        ticket = self._modes.call(self._produce, stream)
        if not ticket.final:
            pays = self._pace.end(self._fetch_seconds, self._send_seconds)
            if pays and (not self._pace.is_for_loop or self._may_try_thread()):
                self._start(self._pace.reason, is_trial=self._pace.is_for_loop)
            else:
                self._on_caller_stream = self._pace.may_start and self.transfer.suits_consumer_stream()
                tried = self._shared.thread_reason if self._pace.is_for_loop else ""
                later = "; one is tried when more batches have shown what a step takes without" if pays else ""
                self._shared.note_path("caller", tried or self._pace.reason + later)
        return ticket

    @property
    def is_threaded(self) -> bool:
        """Whether a thread fetches."""
        return self._threaded

    def _may_try_thread(self) -> bool:
        """A thread for what the loop does meanwhile: once it is known what a step takes without.

        Passes too short for that go with a thread from the second one on.
        """
        if self._waits_for_choice or self._shared.thread_pays is False:
            return False
        return self._trial is None or self._trial.is_ready or self._shared.counters.passes > 1

    def stepped(self, now: float) -> None:
        """A batch was handed out, at ``now`` by the counters' clock."""
        trial = self._trial
        if trial is None or self._waits_for_choice:
            return
        if not self._threaded:
            trial.without_thread(now)
            return
        stays = trial.with_thread(now)
        if stays is None:
            return
        self._trial = None
        if stays:
            self._shared.thread_pays = True
        self._gives_thread_up = not stays

    def _give_thread_up(self) -> None:
        """Before the next batch is taken: Ctrl-C here loses none."""
        self._gives_thread_up = False
        trial = self._shared.thread_trial
        if trial is not None and self._retire_thread():
            self._shared.thread_pays = False
            self._shared.thread_reason = (
                f"a thread was tried: {trial.thread_seconds * 1e6:.0f} us a step, without it "
                f"{trial.usual_seconds * 1e6:.0f} us"
            )
            self._shared.note_path("caller", self._shared.thread_reason)

    def _retire_thread(self) -> bool:
        """The caller fetches again; whether the thread has ended. It does behind the batch that it is at."""
        thread = self._thread
        self._is_retiring = True
        self._credits.put(_WAITING)
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
        for unused in [credit] * (credit is not _WAITING) + [None] * aside:
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

    @property
    def _waits_for_choice(self) -> bool:
        """Until then neither a device that is behind nor a busy loop calls for a thread, which may be the slowest."""
        return self.plain is not None and not self.plain.is_over

    def take_plainly(self) -> Any:
        """A batch by the plain loop's way, on the consumer's current stream; ``NOT_PLAIN``: :meth:`take` has the next.

        No credit is used: nothing is ahead. Whatever is not a plain batch becomes a ticket.
        """
        if not self._inside.acquire(blocking=False):  # another consumer's thread is inside, or the loader itself calls
            return NOT_PLAIN
        try:
            if self._threaded or self._ended or self._stopping or self._predecessor or not self._ready.empty():
                return NOT_PLAIN
            self._insider = threading.get_ident()
            with self._device.beside_captures():
                batch, ticket = self._fetched_plainly()
            if ticket is not None:
                self._ended = ticket.final
                if not self._credits.empty():
                    self._credits.get()  # contract 8: `allow` will give one for it
                self.transfer.seal(ticket, self._device.current_stream())
                self._ready.put(ticket)
            is_left = self.is_stopping
            if is_left and ticket is None:
                ticket = Ticket()
                ticket.batch, ticket.from_source = batch, True
                self._keeps_if_left(ticket, self._device.current_stream())
        finally:
            self._insider = 0
            self._inside.release()
        if is_left:  # contract 9: whoever is inside gives back
            self._release()
            raise self._closed()
        return batch

    def _fetched_plainly(self) -> tuple[Any, Ticket | None]:
        """A batch; else ``NOT_PLAIN`` and a ticket."""
        counters = self._counters
        started = counters.clock()
        try:
            given = self._next(self.source)
            fetched = counters.clock()
            batch, nbytes = copied_plainly(given, self._device)
            if batch is NOT_PLAIN:
                assert self.plain is not None
                self.plain.is_of_another_kind()
                return NOT_PLAIN, self._modes.call(partial(self._sent_ticket, started, fetched), given)
        except StopIteration:
            return NOT_PLAIN, end_ticket()
        except BaseException as error:  # noqa: BLE001 - as in _produce
            return NOT_PLAIN, self._failed(error)
        times = counters.sending(self._sent)
        times.sent_batches += 1
        times.fetch_seconds += fetched - started
        times.send_seconds += counters.clock() - fetched
        counters.copied_bytes += nbytes
        counters.plain_bytes += nbytes
        self._sent += 1
        self._taken += 1
        counters.sent(1, nbytes, nbytes)
        return batch, None

    def _sent_ticket(self, started: float, fetched: float, batch: Any) -> Ticket:
        ticket = self._send(batch, self._device.current_stream())
        self._note_sent(ticket, started, fetched)
        ticket.from_source = True
        return ticket

    def _is_behind(self, done: Event) -> bool:
        """Whether the loop would wait for the device (contract 4) where a thread could do that for it (contract 16)."""
        if done is not None and not self._device.query(done):
            return True
        return self._on_caller_stream and self.transfer.is_behind()

    def _wait_until_done(self, done: Event) -> None:
        """Bound the run-ahead (contract 4): host waits until the GPU has finished with the batch ``depth + 1`` back."""
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

    # The consumer's side in an event loop, which nothing here holds

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

    async def gone_soon(self) -> None:
        """Until all is given back."""
        while not self._gone.is_set():
            await wait_ready(self._gone_signal)

    async def take_soon(self) -> Ticket:
        """As :meth:`take` from the thread. No ticket is taken before the last ``await``, so none is lost in one."""
        ticket = self._poll()
        if ticket is not None:
            return ticket
        started, ready = self._begin_wait(), 0.0
        try:
            while (ticket := self._poll()) is None:
                await wait_ready(self._ready)
            ready = ticket.sent_at
            return ticket
        finally:
            self._end_wait(started, ready)

    def _poll(self) -> Ticket | None:
        if self._stopping:
            raise self._closed()
        ticket = self._ready.poll()
        thread = self._thread
        if ticket is None and (thread is None or not thread.is_alive()):
            ticket = self._ready.poll()  # it may have been the last thing that the thread did
            if ticket is None and self._ended and not self._stopping:
                return end_ticket()
            if ticket is None:
                raise self._closed()
        return ticket

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

    def _closed(self) -> BaseException:
        if exiting.is_set() and threading.current_thread() is not threading.main_thread():
            return SystemExit()  # ends a daemon thread of the user's without a word, as the exit itself would
        why = self.why_closed or "it was closed"
        return IteratorClosedError(f"this pass has ended: {why}; iter(prefetcher) starts a new one")

    # The producer's side

    def _start(self, reason: str, *, is_trial: bool = False) -> bool:
        """Hand over to a thread. The caller is inside, so the thread begins only when it has left.

        Args:
            reason: For ``stats()``.
            is_trial: It stays only if steps are shorter with it.
        """
        if not self._may_start:
            return False
        thread = threading.Thread(target=self._thread_main, name=f"prefetchpipe-producer-{self._number}", daemon=True)
        try:
            thread.start()
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
            if credit is _STOP:
                break
            if self._is_retiring:
                self._puts_back(credit, aside)
                return True
            if credit is _WAITING:
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

    def _produce(self, stream: Stream) -> Ticket:
        """Fetch one batch and send it. Errors become tickets, so that they arrive in order (contract 7)."""
        try:
            started = self._counters.clock()
            self.transfer.return_slots()
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

    @property
    def bytes_ahead(self) -> int:
        """Bytes on the device that belong to batches not taken yet."""
        return 0 if self._released else self._sent_bytes - self._taken_bytes

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
                if not self._threaded or not self._wait_for_memory(tries):
                    raise
                tries += 1

    def _wait_for_memory(self, tries: int) -> bool:
        """The device is full (contract 15): go on with less depth once the consumer has taken a batch.

        The loader is not being asked meanwhile, so nobody is inside: a newer pass may begin.

        Returns:
            Whether another try may succeed.
        """
        self._insider = 0
        self._inside.release()
        try:
            may_succeed = self._is_memory_freed(tries)
        finally:
            self._inside.acquire()
            self._insider = threading.get_ident()
        return may_succeed and not self._stopping

    def _is_memory_freed(self, tries: int) -> bool:
        if self._sent > self._taken:
            credit = self._credits.get()
            if credit is _STOP:
                return False
            if credit is not _WAITING:
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
            if credit is _STOP:
                return False
            if credit is not _WAITING:
                aside.append(credit)
        for credit in aside:
            self._credits.put(credit)
        stream = self.transfer.consumer_stream
        if stream is not None:
            event = self._device.new_event()
            self._device.record(event, stream)
            self._device.synchronize(event)  # contract 15: what its work still reads comes free then
        return tries < 1 + self._options.depth

    def _warn_of_depth(self) -> None:
        if not self._shared.depth_warned:
            self._shared.depth_warned = True
            warnings.warn(
                f"device memory is full: prefetching goes on with less than depth={self._options.depth}",
                PrefetchWarning,
                stacklevel=2,
            )

    # The end

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
            self._credits.put(_STOP)
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

    def join(self) -> None:
        """Wait until nobody is inside and all is given back: a one-shot source serves one pass after the other."""
        if self._insider == threading.get_ident():
            raise ValueError("the loader advances an iterator over itself")
        self._gone.wait()

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

    def follow(self, older: Producer) -> None:
        """Go on where ``older``, a pass over the same source that was left, stops."""
        self._predecessor = older

    def _follow(self) -> None:
        with self._follow_lock:  # another consumer's thread waits here too
            older = self._predecessor
            if older is not None:
                older.join()
                self.adopt(self._shared.take_carried(self.source))
                self._predecessor = None

    def adopt(self, tickets: list[Ticket]) -> None:
        """Begin with batches that an earlier pass took out of the same source (contract 1)."""
        for ticket in tickets:
            self._ready.put(ticket)
            self._sent += 1
            self._sent_bytes += ticket.nbytes
            self._ended = self._ended or ticket.final
            if not self._credits.empty():
                self._credits.get()

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
            self.transfer.give_back_slots()
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
