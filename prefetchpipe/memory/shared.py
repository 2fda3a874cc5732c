"""Memory that one process writes and another one reads: a few flags, then bytes.

Anonymous where the platform has it (Linux ``memfd``): it goes with its last mapping, also when a process is killed, and
the size of ``/dev/shm`` is no limit. Elsewhere torch's own shared memory, which that one bounds.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import torch

__all__ = ["Segment", "has_anonymous"]

_FLAG_BYTES = 4096
"""A page, so that the bytes behind it can be page-locked by themselves."""

Handle = tuple[str, Any]


class Segment:
    """One piece of shared memory, mapped in this process.

    Args:
        handle: From :attr:`handle` of the process that made it. It must still live: an anonymous segment is opened
            through its file descriptor there.

    Attributes:
        flags: One byte each, read and written by index; 0 at first.
        tensor: The bytes, flat ``uint8``, page-aligned; with ``nbytes`` and ``free`` it can stand for a pinned block.
        handle: What another process opens it with; can be pickled for it by ``ForkingPickler``.
    """

    __slots__ = ("_fd", "flags", "handle", "nbytes", "tensor")

    def __init__(self, handle: Handle) -> None:
        self._fd = -1
        self.handle = handle
        kind, place = handle
        if kind == "memfd":
            pid, number, nbytes = place
            # An object, not a number: torch raises the death of a worker from a signal handler, between any two steps.
            with open(f"/proc/{pid}/fd/{number}", "r+b", buffering=0) as file:  # noqa: PTH123 - half the time of Path
                self.flags: Any = mmap.mmap(file.fileno(), nbytes)
            whole = np.frombuffer(self.flags, np.uint8)
        else:
            whole = self.flags = place.numpy()
        with torch.inference_mode(False):  # filled by later passes too, whatever their mode
            # A storage that begins behind the flags: layouts count from the start of a storage.
            self.tensor = torch.from_numpy(whole[_FLAG_BYTES:])
        self.nbytes = len(self.tensor)

    @classmethod
    def create(cls, nbytes: int, *, anonymous: bool = True) -> Segment:
        """A new segment with ``nbytes`` of data, all zero.

        Args:
            nbytes: Size of :attr:`tensor`.
            anonymous: False: the portable way even where there is a better one.

        Raises:
            OSError: No memory, or no file descriptor, is left.
            RuntimeError: As that, from torch's shared memory.
        """
        total = _FLAG_BYTES + nbytes
        if not anonymous or not has_anonymous():
            with torch.inference_mode(False):
                return cls(("torch", torch.zeros(total, dtype=torch.uint8, device="cpu").share_memory_()))
        fd = os.memfd_create("prefetchpipe", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, total)
            segment = cls(("memfd", (os.getpid(), fd, total)))
        except BaseException:
            os.close(fd)
            raise
        segment._fd = fd
        return segment

    def free(self) -> None:
        """It goes with the last reference."""

    def __del__(self) -> None:
        if self._fd >= 0 and self.handle[1][0] == os.getpid():
            with suppress(OSError):
                os.close(self._fd)

    def __reduce__(self) -> tuple[Any, ...]:
        return Segment, (self.handle,)


@cache
def has_anonymous() -> bool:
    """Whether a segment can be made without a name, and opened by another process of this user."""
    try:
        fd = os.memfd_create("prefetchpipe", os.MFD_CLOEXEC)
    except (AttributeError, OSError):
        return False
    try:
        os.close(os.open(f"/proc/{os.getpid()}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
    except OSError:  # no /proc here
        return False
    finally:
        os.close(fd)
    return True
