"""The protocol that a device speaks: allocate, copy, record, wait, query.

Three implementations: :mod:`prefetchpipe.device.cuda` (the only file that imports CuPy and ``torch.cuda``),
:mod:`prefetchpipe.device.cpu` and :class:`prefetchpipe.testing.SimulatedDevice`. Streams and events are opaque to
everything else. A device object belongs to the process: one copy stream each, shared by all prefetchers (contract 14).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch

__all__ = ["Device", "Event", "HostBlock", "Kernel", "Stream"]

Stream = Any
Event = Any
Kernel = Callable[[Stream, int, int, tuple[Any, ...]], None]
"""Launches on a stream: blocks, threads a block, arguments (tensors stand for their addresses, numbers are int64)."""


class HostBlock(Protocol):
    """A block of page-locked host memory of exactly ``nbytes``."""

    nbytes: int
    tensor: torch.Tensor
    """All bytes of the block, as a flat ``uint8`` CPU tensor."""

    def free(self) -> None:
        """Give the memory back. No copy may be in flight any more (contract 6)."""


@runtime_checkable
class Device(Protocol):
    """Where batches arrive."""

    torch_device: torch.device
    """Where the leaves of a batch live, index resolved."""

    staged: bool
    """True: copies go through pinned slots. False: batches are packed straight into their final memory (CPU)."""

    host_memory: bool
    """True: tensors of this device read as CPU tensors, so that only :meth:`is_resident` tells them from others."""

    copy_stream: Stream
    """The one side stream of this device; copies and transforms run on it."""

    @property
    def d2h_stream(self) -> Stream:
        """The one side stream for copies back to the host, so that both directions overlap; made at first use."""

    def bind_thread(self) -> None:
        """Make this device and its copy stream current for the rest of the calling thread (ours, never a user's)."""

    def on_copy_stream(self) -> AbstractContextManager[None]:
        """Make them current for a ``with`` block in a thread of the user's, and put everything back."""

    def on_stream(self, stream: Stream) -> AbstractContextManager[None]:
        """As :meth:`on_copy_stream`, with ``stream``."""

    def beside_captures(self) -> AbstractContextManager[None]:
        """Around our calls in a thread of the user's: legal while another thread captures a graph (contract 13)."""

    def current_stream(self) -> Stream:
        """The stream of this device that is current in the calling thread."""

    def generators(self) -> tuple[torch.Generator, ...]:
        """Global random generators of this device, beside the CPU's (contract 10)."""

    def host_alloc(self, nbytes: int) -> HostBlock:
        """Page-locked host memory of exactly ``nbytes``.

        Raises:
            PinnedMemoryError: The system refuses. No error is left behind in the thread (contract 15).
        """

    def host_register(self, tensor: torch.Tensor) -> None:
        """Page-lock the memory of a flat ``uint8`` CPU tensor where it is; it starts at a page.

        Raises:
            PinnedMemoryError: As for :meth:`host_alloc`.
        """

    def host_unregister(self, tensor: torch.Tensor) -> None:
        """Take :meth:`host_register` back. No copy may be in flight any more (contract 6)."""

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the copy engine can read ``tensor`` where it is."""

    def is_resident(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is on this device already, so that it is handed on as it is (contract 16)."""

    def alloc(self, nbytes: int) -> torch.Tensor:
        """``nbytes`` of device memory as a flat ``uint8`` tensor, ordered by the copy stream.

        Raises:
            torch.OutOfMemoryError: The device is full.
        """

    def empty(self, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As :meth:`alloc`, for one dense tensor."""

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
        """Launch an asynchronous copy on ``stream``: all bytes of a flat ``uint8`` host ``src`` to a dense ``dst``."""

    def copy_small(self, tensor: torch.Tensor) -> torch.Tensor:
        """A dense host tensor on the device, by a copy queued on the current stream; its bytes have left it then.

        For some kilobytes: the page-locked memory in between is the device's own, and not counted.

        Raises:
            RuntimeError: Memory is refused.
        """

    def copy_to_host(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
        """Launch an asynchronous copy on ``stream``: all bytes of a dense ``src`` to a flat ``uint8`` host ``dst``."""

    def before_kernels(self) -> None:
        """Called before torch kernels of ours run on the stream that is current in the calling thread."""

    def compile_kernels(self, source: str, names: tuple[str, ...]) -> Mapping[str, Kernel] | None:
        """The kernels ``names`` of a CUDA source; None where none can be had."""

    def fill(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Copy device tensors on the stream that is current in the calling thread (``static=True``)."""

    def before_transform(self) -> None:
        """Called on the copy stream before a transform is."""

    def new_event(self) -> Event:
        """An event without timing, never recorded (which counts as passed)."""

    def record(self, event: Event, stream: Stream) -> None:
        """Record ``event`` at the present tail of ``stream``."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Make later work on ``stream`` wait for ``event``; the host does not wait."""

    def query(self, event: Event) -> bool:
        """Whether ``event`` has passed."""

    def synchronize(self, event: Event) -> None:
        """Block the calling thread (without the GIL) until ``event`` has passed."""

    def new_timing_event(self) -> Event:
        """An event that :meth:`elapsed_seconds` can read; recorded, queried and waited for like any other."""

    def elapsed_seconds(self, start: Event, end: Event) -> float:
        """Seconds on the device between two timing events that have passed."""

    def annotate(self, name: str) -> AbstractContextManager[None]:
        """A named range for the device's own profiler (NVTX on CUDA) around a ``with`` block."""

    def record_use(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Keep the memory of ``tensor``, once freed, until the work queued on ``stream`` by then has passed."""
