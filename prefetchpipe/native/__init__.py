"""Copies by native code, where the package was built with a C compiler; torch's own everywhere else.

``copies.c`` beside this file has them. They need neither Python's lock nor OpenMP's threads: the lock is what several
Python threads wait for while they pack, and a thread of ours would need a team of OpenMP's beside the one that the
loop's thread has (docs/performance.md). ``PREFETCHPIPE_NATIVE=0`` in the environment does without.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path

__all__ = ["Copier", "copy_alone", "is_available", "why_not"]

_VERSION = 1
"""Of the library: what its functions take."""

_SPINNERS = 1
_SPIN_NANOSECONDS = 50_000
"""How many helpers look for the next job, and for how long, before they sleep."""

_STREAMED_BYTES = 16 << 20
"""From here on one thread's copies go past the caches: the slots of all workers together do not fit them."""

_library: tuple[ctypes.CDLL, ctypes.PyDLL] | None = None
_why_not = ""


def _load() -> None:
    global _library, _why_not  # noqa: PLW0603 - once, at import
    if os.environ.get("PREFETCHPIPE_NATIVE") == "0":
        _why_not = "PREFETCHPIPE_NATIVE=0"
        return
    path = Path(__file__).with_name("_copies.so")
    try:
        without_lock, with_lock = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
    except OSError as error:
        _why_not = f"not built: {error}" if path.exists() else "not built: no C compiler that worked, or not Linux"
        return
    if not hasattr(without_lock, "copies_version") or without_lock.copies_version() != _VERSION:
        _why_not = f"out of date: {path} is of another version; install prefetchpipe again, or run hatch_build.py"
        return
    address, number = ctypes.c_void_p, ctypes.c_int
    job = [number, address, address, address, ctypes.c_uint64]
    for library in (without_lock, with_lock):
        library.pool_open.argtypes, library.pool_open.restype = [number, number, ctypes.c_long], address
        for name, arguments in (
            ("pool_start", [address, *job]),
            ("pool_finish", [address]),
            ("pool_close", [address]),
            ("copy_alone", [*job, number]),
        ):
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
    _library = without_lock, with_lock


_load()


def is_available() -> bool:
    """Whether there are native copies."""
    return _library is not None


def why_not() -> str:
    """Why there are none; empty if there are."""
    return _why_not


class Copier:
    """Threads that copy host memory; one thread at a time uses it.

    Args:
        threads: Threads that copy, the calling one included; at least 1.

    Attributes:
        finish: Takes part in what :meth:`start` has begun and waits for its end. A function of C, so that Ctrl-C cannot
            come between its call and its work. The GIL is free meanwhile.
    """

    __slots__ = ("__weakref__", "_close", "_start", "finish")

    def __init__(self, threads: int) -> None:
        self._make_pool(threads - 1)
        _open.add(self)

    def _make_pool(self, helpers: int) -> None:
        assert _library is not None
        without_lock, with_lock = _library
        handle = without_lock.pool_open(helpers, _SPINNERS, _SPIN_NANOSECONDS)
        if not handle:
            raise MemoryError("no memory for threads that copy")
        self._start = partial(with_lock.pool_start, handle)
        self.finish = partial(without_lock.pool_finish, handle)
        self._close: Callable[[], None] = partial(without_lock.pool_close, handle)

    def start(self, target: int, sources: array[int], offsets: array[int], nbytes: array[int]) -> None:
        """Begin to copy; :attr:`finish` must follow, in a ``finally``.

        Args:
            target: An address.
            sources: Addresses; what is there has to live until :attr:`finish` returns. All arrays are of type ``"Q"``.
            offsets: Where each goes, in bytes from ``target``.
            nbytes: How much each has.
        """
        self._start(len(sources), sources.buffer_info()[0], offsets.buffer_info()[0], nbytes.buffer_info()[0], target)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """All of it: ``nbytes`` from the address ``source`` to ``target``."""
        try:
            self.start(target, array("Q", [source]), array("Q", [0]), array("Q", [nbytes]))
        finally:
            self.finish()

    def close(self) -> None:
        """End the threads. Nothing else is called after that."""
        close, self._close = self._close, _nothing
        close()

    def _forget(self) -> None:
        """In a forked child, which has none of the threads: what they were at would never end there."""
        if self._close is not _nothing:
            self._make_pool(0)


def copy_alone(target: int, sources: array[int], offsets: array[int], nbytes: array[int]) -> None:
    """As :meth:`Copier.start` and all that follows, by the calling thread."""
    assert _library is not None
    _library[0].copy_alone(
        len(sources),
        sources.buffer_info()[0],
        offsets.buffer_info()[0],
        nbytes.buffer_info()[0],
        target,
        sum(nbytes) >= _STREAMED_BYTES,
    )


def _nothing() -> None:
    pass


_open: weakref.WeakSet[Copier] = weakref.WeakSet()


def _forget_all() -> None:
    for copier in list(_open):
        copier._forget()  # noqa: SLF001 - of this module


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
