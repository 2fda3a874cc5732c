"""Queues between a DataLoader and its worker processes that need no thread of their own for small messages.

:class:`multiprocessing.Queue` hands each message to a feeder thread, which pickles and writes it. In the parent that is
one thread a worker, and at every batch one of them asks for the GIL, beside the two threads that need it. The messages
of the worker path, indices one way and descriptions the other, are so small that writing them at once never blocks.
"""

from __future__ import annotations

import os
import select
import struct
from multiprocessing.context import BaseContext
from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler
from queue import Empty
from time import monotonic
from typing import Any

import torch.multiprocessing

__all__ = ["DirectQueue", "direct_context"]

_HEADER = struct.Struct("!i")
"""What :meth:`multiprocessing.connection.Connection.send_bytes` puts before each message of less than 2 GiB."""
_LONG_HEADER = struct.Struct("!Q")
_CHUNK = 65536
_LOCK_SECONDS = 0.1
"""A lock held for longer is one that its process took along when it was killed; the feeder thread waits for it then."""


class DirectQueue(Queue):  # type: ignore[type-arg] # not generic at run time
    """A :class:`multiprocessing.Queue` from which one process reads.

    The same bytes cross the same pipe, and ``put`` never blocks on it: what may not fit goes the way of the base class,
    and so does all that follows it, in order.
    """

    # The base's, which its type stubs leave out.
    _closed: bool
    _reader: Any
    _rlock: Any
    _sem: Any
    _thread: Any
    _wlock: Any
    _writer: Any

    def _reset(self, after_fork: bool = False) -> None:  # noqa: FBT001, FBT002 - as the base
        super()._reset(after_fork)  # type: ignore[misc] # as above
        self._arrived = bytearray()  # read, and not taken yet
        self._readable: Any = None
        self._writable: Any = None

    def put(self, obj: Any, block: bool = True, timeout: float | None = None) -> None:  # noqa: FBT001, FBT002 - as the base
        """See the base class."""
        if not self._closed and self._thread is None and self._put_now(obj):
            return
        super().put(obj, block, timeout)

    def _put_now(self, obj: Any) -> bool:
        """Write it, if that cannot block."""
        try:
            body = ForkingPickler.dumps(obj)
        except Exception:  # noqa: BLE001 - the feeder thread says it again, in its own way
            return False
        # A pipe that polls as writable takes so many bytes as one piece (man 7 pipe, PIPE_BUF).
        if len(body) + _HEADER.size > select.PIPE_BUF or not self._sem.acquire(block=False):
            return False
        is_sent = False
        if self._wlock.acquire(timeout=_LOCK_SECONDS):
            try:
                is_sent = self._write(_HEADER.pack(len(body)) + body)
            finally:
                self._wlock.release()
        if not is_sent:
            self._sem.release()
        return is_sent

    def _write(self, message: bytes) -> bool:
        """At most ``PIPE_BUF`` bytes, under the lock of the writers; False if that would block, or nobody reads."""
        try:
            number = self._writer.fileno()
            poller = self._writable
            if poller is None:
                poller = self._writable = select.poll()
                poller.register(number, select.POLLOUT)
            if poller.poll(0) != [(number, select.POLLOUT)]:
                return False
            os.write(number, message)
        except OSError:
            return False
        return True

    def get(self, block: bool = True, timeout: float | None = None) -> Any:  # noqa: FBT001, FBT002 - as the base
        """See the base class."""
        if self._closed:
            raise ValueError(f"Queue {self!r} is closed")
        deadline = None if timeout is None else monotonic() + timeout
        if not self._rlock.acquire(block, timeout):
            raise Empty
        try:
            message = self._message()
            if message is None:
                message = self._received(block, deadline)
            self._sem.release()
        finally:
            self._rlock.release()
        return ForkingPickler.loads(message)

    def _received(self, block: bool, deadline: float | None) -> bytearray:  # noqa: FBT001 - from above
        """The next message, waited for."""
        number = self._reader.fileno()
        poller = self._readable
        if poller is None:
            poller = self._readable = select.poll()  # the base makes a selector for every message
            poller.register(number, select.POLLIN)
        message = None
        while message is None:
            left = 0.0 if not block else None if deadline is None else max(deadline - monotonic(), 0.0) * 1e3
            if not poller.poll(left):
                raise Empty  # what has arrived of a message stays
            chunk = os.read(number, _CHUNK)
            if not chunk:
                raise OSError("got end of file during message") if self._arrived else EOFError
            self._arrived += chunk
            message = self._message()
        return message

    def _message(self) -> bytearray | None:
        """The first of those that have arrived whole."""
        arrived = self._arrived
        if len(arrived) < _HEADER.size:
            return None
        start = _HEADER.size
        (nbytes,) = _HEADER.unpack_from(arrived)
        if nbytes < 0:
            if len(arrived) < start + _LONG_HEADER.size:
                return None
            (nbytes,) = _LONG_HEADER.unpack_from(arrived, start)
            start += _LONG_HEADER.size
        end = start + nbytes
        if len(arrived) < end:
            return None
        message = arrived[start:end]
        del arrived[:end]
        return message

    def empty(self) -> bool:
        """See the base class."""
        return not self._arrived and super().empty()


class _DirectContext:
    """A multiprocessing context whose queues are direct."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def Queue(self) -> DirectQueue:  # noqa: N802 - as a context's
        return DirectQueue(ctx=self._context.get_context())


def direct_context(context: Any) -> Any:
    """``context`` with queues of this module; ``context`` itself where it is of a kind unknown here.

    Args:
        context: Of a DataLoader; None: torch's own.
    """
    context = torch.multiprocessing if context is None else context
    known = context is torch.multiprocessing or isinstance(context, BaseContext)
    return _DirectContext(context) if known else context
