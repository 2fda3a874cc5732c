"""One pass over a loader: who calls ``next(loader)``, how far ahead, and what the loop takes."""

from __future__ import annotations

import threading
from _queue import Empty
from typing import TYPE_CHECKING, Any

import torch

from prefetchpipe import native
from prefetchpipe.device.base import Event, Stream
from prefetchpipe.pipeline import gil, torchloader
from prefetchpipe.pipeline.fetching import WAITING, Fetching
from prefetchpipe.pipeline.leaving import STOP
from prefetchpipe.pipeline.pace import Pace
from prefetchpipe.pipeline.shortway import NOT_SHORT, ShortWay
from prefetchpipe.pipeline.threadtrial import ThreadTrial
from prefetchpipe.pipeline.ticket import Ticket, end_ticket
from prefetchpipe.pipeline.waking import wait_ready

if TYPE_CHECKING:
    from prefetchpipe.pipeline.shared import Shared

__all__ = ["Producer"]

_STARVED_SECONDS = 0.5
"""Who waits for longer looks whether there is a credit left at all: Ctrl-C may take one along, anywhere."""

_SEVERAL_THREADS = 4
_HEAVY_FETCH_SECONDS = 2e-3
_PROBE_BATCHES = 8
_OFTEN_PROBED_BATCHES = 32
"""Beside a loader so slow, so often, it is looked whether it keeps the GIL: a sleep of 0.05 ms in 16 ms or more."""


class Producer(Fetching):
    """The consumer's side: tickets are taken in order, from the thread, or fetched where the loop asks for them.

    Args:
        shared: State of the prefetcher over its passes.
        source: ``iter(loader)``, made in the caller's thread.
    """

    def __init__(self, shared: Shared, source: Any) -> None:
        super().__init__(shared, source)
        self._gives_thread_up = False
        self._beside_captures = self._device.beside_captures()  # for who is inside
        self._choose_ways()
        if self._device.staged:
            # Contract 3: work that the caller has queued may be writing what the loader or the transform will read.
            event = self._device.new_event()
            self._device.record(event, self._device.current_stream())
            self._device.wait(self._device.copy_stream, event)

    def _choose_ways(self) -> None:
        has_workers = torchloader.has_workers(self.source)
        self._pace = self._chosen_pace()
        if self._pace is not None and self._shared.thread_pays is None:
            self._trial = self._shared.thread_trial = self._shared.thread_trial or ThreadTrial(has_workers=has_workers)
            self._trial.begin()
        self.short = ShortWay.for_pass(self._shared, suits=type(self) is Producer and not has_workers)

    def _chosen_pace(self) -> Pace | None:
        fetch = self._options.fetch
        if fetch != "auto":
            self._shared.note_path(fetch, f"fetch={fetch!r} was asked for")
            return None
        return Pace(
            self._device,
            has_workers=torchloader.has_workers(self.source),
            comes_packed=self._shared.twins.packs(self.source),
            packs_alone=not native.is_available()
            and torch.get_num_threads() == 1
            and self._threads >= _SEVERAL_THREADS,
            clock=self._counters.clock,
        )

    # Taking

    def mark_done(self, stream: Stream) -> Event:
        """An event at the tail of the consumer's stream: past it, everything about earlier batches is."""
        if not self._device.staged or self._on_caller_stream:
            return None
        return self._mark(stream)

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
        waiter, started, ready = object(), self._counters.clock(), 0.0
        try:
            self._begin_wait(waiter)
            if not self._threaded:  # from here on it would not have retired
                return None
            ticket = self._ready_ticket()
            if ticket is not None:
                ready = ticket.sent_at
        except Exception:
            # Raised by a signal handler inside the wait. Torch's, for a dead worker, ends the pass.
            if torchloader.has_dead_worker(self.source):
                self.stop(why="a worker process of its loader died")
            raise
        finally:
            self._consumers_waiting.discard(waiter)  # before anything at which Ctrl-C may come
            self._note_stall(started, ready)
        return ticket

    def _ready_ticket(self) -> Ticket | None:
        """None if the thread has ended, and its last ticket was taken by somebody else or lost."""
        while True:
            try:
                return self._ready.get(timeout=_STARVED_SECONDS)
            except Empty:
                thread = self._thread
                if thread is None or not thread.is_alive():
                    return None
                lost, nbytes = self._sent - self._taken, self._sent_bytes - self._taken_bytes
                # The thread has come by our token and all before it, and is at no batch; those sent came nowhere.
                if self._credits.empty() and not self._inside.locked() and lost > 0:
                    for _ in range(lost):
                        self._credits.put(None)
                    self._taken += lost  # before the thread looks again: it waits for none of them (contract 15)
                    self._taken_bytes += nbytes
                    self._credits.put(WAITING)

    def _begin_wait(self, waiter: object) -> None:
        with self._shared.lock:
            self._consumers_waiting.add(waiter)
        self._credits.put(WAITING)

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

    async def take_soon(self) -> Ticket:
        """As :meth:`take` from the thread. No ticket is taken before the last ``await``, so none is lost in one."""
        ticket = self._poll()
        if ticket is not None:
            return ticket
        waiter, started, ready = object(), self._counters.clock(), 0.0
        try:
            self._begin_wait(waiter)
            while (ticket := self._poll()) is None:
                await wait_ready(self._ready)
            ready = ticket.sent_at
            return ticket
        finally:
            self._consumers_waiting.discard(waiter)
            self._note_stall(started, ready)

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

    # In the consumer's own thread

    def _take_here(self, stream: Stream) -> Ticket | None:
        """Without a hand-off between threads. None if a thread has taken over."""
        with self._inside:  # contract 1: a second consumer's thread waits for its turn
            try:
                self._insider = threading.get_ident()
                if self._pace is not None:
                    self._pace.enter()
                if self._options.fetch == "thread" and not self._threaded:
                    self._start("fetch='thread' was asked for")
                if self._threaded or self._stopping:
                    return None  # what the thread has put comes first, the end too
                if self._ended:
                    return end_ticket()
                if not self._takes_credit():
                    return None
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

    def _credit(self) -> Any:
        """The next one, a new one where none is left; what only wakes a thread is nothing here."""
        credit = WAITING
        while credit is WAITING:
            try:
                # Another consumer's thread may be about to give one.
                credit = self._credits.get(timeout=_STARVED_SECONDS)
            except Empty:
                return None
        return credit

    def _takes_credit(self) -> bool:
        """Whether a batch may be sent here, now: a credit is taken, and the device has come by its event.

        Not if the pass was left, or a thread was started that waits instead.
        """
        credit = self._credit()
        if credit is STOP:
            return False
        try:
            hands_over = self._hands_over(credit)
        except BaseException:
            self._credits.put(credit)  # Ctrl-C in the wait: the next call finds its credit again
            raise
        if hands_over:
            self._credits.put(credit)
        return not hands_over

    def _hands_over(self, credit: Event) -> bool:
        """Whether a thread was started, which waits for the device; otherwise that was done here."""
        behind = self._pace is not None and self._pace.may_start and (self.short is None or self.short.is_over)
        behind = behind and self._is_behind(credit)
        if behind and self._start("the device is slower than the loop: a thread waits for it, not the loop"):
            return True
        self._wait_until_done(credit)  # contracts 8 and 14
        return False

    def _is_behind(self, done: Event) -> bool:
        """Whether the loop would wait for the device (contract 8) where a thread could do that for it (contract 16)."""
        if done is not None and not self._device.query(done):
            return True
        return self._on_caller_stream and self.transfer.is_behind()

    def _paced(self, stream: Stream) -> Ticket:
        assert self._pace is not None
        self._pace.begin()
        ticket = self._modes.call(self._produce, stream)
        if not ticket.final:
            pays = self._pace.end(self._fetch_seconds, self._send_seconds)
            if pays and (not self._pace.is_for_loop or self._may_try_thread()):
                try:
                    self._start(self._pace.reason, is_trial=self._pace.is_for_loop)
                except BaseException:
                    self.transfer.seal(ticket, stream)
                    self._ready.put(ticket)  # Ctrl-C while a thread starts: the next call finds the batch
                    raise
            else:
                self._on_caller_stream = self._pace.may_start and self.transfer.suits_consumer_stream()
                tried = self._shared.thread_reason if self._pace.is_for_loop else ""
                later = "; one is tried when more batches have shown what a step takes without" if pays else ""
                self._shared.note_path("caller", tried or self._pace.reason + later)
        return ticket

    def take_short(self, stream: Stream) -> Any:
        """A batch by the short way, ready for ``stream``; ``NOT_SHORT``: :meth:`take` has the next.

        Whatever is no such batch becomes a ticket.
        """
        if self._inside.locked():  # another consumer's thread is inside, or the loader itself calls
            return NOT_SHORT
        with self._inside:  # not `acquire` and `try`: Ctrl-C may come between the two
            if self._threaded or self._ended or self._stopping or self._predecessor or not self._ready.empty():
                return NOT_SHORT
            try:
                self._insider = threading.get_ident()
                if self._wants_thread and self._begins_thread():
                    return NOT_SHORT
                if self._pace is not None:
                    self._pace.enter()
                with self._beside_captures:
                    if not self._takes_credit():
                        return NOT_SHORT
                    self._done = None
                    batch, ticket = self._modes.call(self._fetched_short, stream)
                if ticket is None:
                    self._credits.put(self._done)
                    self._note_pace()
                else:
                    self._ended = ticket.final
                    self.transfer.seal(ticket, stream)
                    self._ready.put(ticket)
                is_left = self.is_stopping
                if is_left and ticket is None:
                    ticket = Ticket()
                    ticket.batch, ticket.from_source = batch, True
                    self._keeps_if_left(ticket, stream)
            finally:
                self._insider = 0
        if is_left:  # contract 9: whoever is inside gives back
            self._release()
            raise self._closed()
        return batch

    def _note_pace(self) -> None:
        """Behind a batch that went the short way: whether a thread should take over before the next one."""
        pace = self._pace
        if pace is not None and not pace.stays and pace.end(self._fetch_seconds, self._send_seconds):
            self._wants_thread = not pace.is_for_loop or self._may_try_thread()

    def _begins_thread(self) -> bool:
        self._wants_thread = False
        assert self._pace is not None
        assert self.short is not None
        has_begun = self._start(self._pace.reason, is_trial=self._pace.is_for_loop)
        self.short.is_on = not has_begun  # again when it has retired
        return has_begun

    # Whether a thread pays

    def _may_try_thread(self) -> bool:
        """A thread for what the loop does meanwhile: once it is known what a step takes without."""
        if self._shared.thread_pays is False:
            return False
        return self._trial is None or self._trial.may_begin(self._shared.counters.passes)

    def stepped(self, now: float) -> None:
        """A batch was handed out, at ``now`` by the counters' clock."""
        trial = self._trial
        if trial is None:
            return
        if not self._threaded:
            trial.without_thread(now)
            return
        stays = trial.with_thread(now)
        if stays is None:
            return
        if trial.knows_usual:
            self._trial = None
        if stays:
            self._shared.thread_pays = True
        self._gives_thread_up = not stays

    def _give_thread_up(self) -> None:
        """Before the next batch is taken: Ctrl-C here loses none."""
        self._gives_thread_up = False
        trial = self._shared.thread_trial
        if trial is None or not self._retire_thread():
            return
        if not trial.knows_usual:
            trial.begin()
            self._shared.note_path("caller", "for as long as it takes to know what a step takes without a thread")
            return
        self._shared.thread_pays = False
        self._shared.thread_reason = (
            f"a thread was tried: {trial.thread_seconds * 1e6:.0f} us a step, without it "
            f"{trial.usual_seconds * 1e6:.0f} us"
        )
        self._shared.note_path("caller", self._shared.thread_reason)
