"""One thread that takes a batch when it is asked to, for a consumer in an event loop."""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import weakref
from _queue import SimpleQueue
from collections.abc import Callable

from prefetchpipe.device.base import Device, Stream
from prefetchpipe.errors import IteratorClosedError
from prefetchpipe.pipeline.offloading import Offload
from prefetchpipe.pipeline.threadstate import ThreadState
from prefetchpipe.pipeline.ticket import Ticket, end_ticket, failed_ticket
from prefetchpipe.pipeline.waking import ReadyQueue

__all__ = ["Relay"]

_LEAVE_SECONDS = 0.5

_numbers = itertools.count(1)
_live: weakref.WeakSet[Relay] = weakref.WeakSet()


@atexit.register
def _leave_all() -> None:
    for relay in list(_live):
        relay.leave()
        relay.join()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_live.clear)  # the child has no such threads


class Relay:
    """The thread of one pass. It holds the inner objects, never the iterator.

    The source of a sync pass runs in it, under the modes and on the stream of the thread that made this object, and the
    host waits for copies in it.

    Args:
        offload: What is taken from.
        device: Whose stream it is.
        is_shared: Whether later passes go on with ``offload``.
        on_leave: Brings the thread back out of a source of ours.

    Attributes:
        results: A ticket for each time it was asked.
    """

    def __init__(
        self, offload: Offload, device: Device, *, is_shared: bool, on_leave: Callable[[], None] | None = None
    ) -> None:
        self.results: ReadyQueue[Ticket] = ReadyQueue()
        self._offload = offload
        self._device = device
        self._is_shared = is_shared
        self._on_leave = on_leave
        self._modes = ThreadState()
        self._stream: Stream = device.current_stream()
        self._requests: SimpleQueue[bool] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._is_left = False
        _live.add(self)

    @property
    def is_left(self) -> bool:
        """Whether nobody takes the results any more."""
        return self._is_left

    def ask(self) -> None:
        """For one ticket."""
        if self._pid != os.getpid():
            raise IteratorClosedError("this pass runs in the process that started it")
        if self._thread is None:
            name = f"prefetchpipe-offload-{next(_numbers)}"
            thread = threading.Thread(target=self._modes.run, args=(self._run,), name=name, daemon=True)
            thread.start()
            self._thread = thread
        self._requests.put(True)

    def _run(self) -> None:
        with self._device.on_stream(self._stream):
            while self._requests.get() and not self._is_left:
                ticket = self._take()
                self.results.put(ticket)
                if ticket.final:
                    break
                del ticket
        if self._is_left:
            self._give_back()

    def _take(self) -> Ticket:
        try:
            ticket = Ticket()
            ticket.batch = self._offload.take()
        except StopIteration:
            return end_ticket()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the consumer must hear of it (contract 7)
            return failed_ticket(error)
        ticket.from_source = True
        return ticket

    def leave(self) -> None:
        """The pass is left; from any thread, also from the collector."""
        if self._pid != os.getpid() or self._is_left:
            return
        self._is_left = True
        self._requests.put(False)
        self._tell_waiter()  # before the thread can say what brought it back out of the source
        if self._on_leave is not None:
            self._on_leave()
        if self._thread is None or not self._thread.is_alive():
            self._give_back()

    def _give_back(self) -> None:
        if not self._is_shared:
            self._offload.close()
            return
        while (ticket := self.results.poll()) is not None:
            if ticket.from_source:
                self._offload.put_back(ticket.batch)
        self._tell_waiter()  # once more: what was taken out above may have been meant for it

    def _tell_waiter(self) -> None:
        self.results.put(failed_ticket(IteratorClosedError("this pass was closed")))

    def join(self) -> None:
        """Wait for the end of a thread that was told to leave, or has put its last ticket."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread() and self._pid == os.getpid():
            thread.join(_LEAVE_SECONDS)
