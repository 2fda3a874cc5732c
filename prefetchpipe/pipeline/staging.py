"""Packing: from the loader's tensors into a pinned slot, and from there, piece by piece, onto the wire."""

from __future__ import annotations

import threading
from _queue import SimpleQueue  # the C class itself
from collections.abc import Sequence
from typing import Any

import torch

from prefetchpipe.batch.few import FewLeaves
from prefetchpipe.batch.layout import Layout
from prefetchpipe.batch.rows import Rows, copy_all
from prefetchpipe.device.base import Device, Stream
from prefetchpipe.memory.ring import Slot
from prefetchpipe.pipeline.threadstate import limit_packing_threads
from prefetchpipe.pipeline.timing import Probe

__all__ = ["Packers", "stage"]

_PIECE_BYTES = 64 << 20
"""A leaf beyond this is packed and copied in pieces, so that its copy starts before its packing has ended. Smaller
pieces cost more than they gain: each is a parallel region of its own (docs/performance.md)."""

_MANY_SPANS = 8
_MANY_BYTES = 1 << 20
_MAX_PACKERS = 4


def stage(
    device: Device,
    layout: Layout | FewLeaves,
    slot: Slot,
    *,
    leaves: Sequence[torch.Tensor],
    stream: Stream,
    packers: Packers | None = None,
    probe: Probe | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Pack ``leaves`` into ``slot`` and launch the copies to new device memory on ``stream``.

    Runs on the thread that sends; the GIL is free while bytes move. All bytes have left ``leaves`` when it returns
    (contract 5).

    Returns:
        The leaves on the device, and one tensor for each block of the layout over the same memory.
    """
    views, pieces = slot.views(layout)
    sources = layout.sources(leaves)
    if packers is not None and layout.count >= _MANY_SPANS and layout.nbytes >= _MANY_BYTES:
        packers.start(views, sources)
        try:
            arrived, memory = layout.allocate(device.empty, device.alloc)
        finally:
            packers.finish()  # also if the device is full: they are writing the slot
    else:
        arrived, memory = layout.allocate(device.empty, device.alloc)
        if layout.nbytes > _PIECE_BYTES and isinstance(layout, Layout):
            _stage_large(device, layout, views, sources, memory=memory, pieces=pieces, stream=stream, probe=probe)
            return arrived, memory
        copy_all(views, sources)
    if probe is not None:
        probe.begin(stream)
    for target, piece in zip(memory, pieces, strict=True):
        device.copy(target, piece, stream)
    if probe is not None:
        probe.end(stream, layout.nbytes)
    return arrived, memory


def _stage_large(
    device: Device,
    layout: Layout,
    views: list[torch.Tensor],
    sources: list[torch.Tensor],
    *,
    memory: Sequence[torch.Tensor],
    pieces: list[torch.Tensor],
    stream: Stream,
    probe: Probe | None,
) -> None:
    """Each leaf with memory of its own is on the wire while the next one is packed."""
    copy = device.copy if probe is None else probe.copying(device.copy)
    rest: list[int] = []
    for number, span in enumerate(layout.spans):
        if span.block == layout.slab:
            rest.append(number)
            continue
        target, piece, source = memory[span.block], pieces[span.block], sources[number]
        if span.nbytes <= _PIECE_BYTES or isinstance(source, Rows) or not source.is_contiguous():
            copy_all([views[number]], [source])
            copy(target, piece, stream)
            continue
        flat = source.view(-1).view(torch.uint8)
        to = torch.empty(0, dtype=torch.uint8, device=target.device).set_(
            target.untyped_storage(), target.storage_offset() * target.dtype.itemsize, (span.nbytes,), (1,)
        )
        for start in range(0, span.nbytes, _PIECE_BYTES):
            end = min(start + _PIECE_BYTES, span.nbytes)
            piece[start:end].copy_(flat[start:end])
            copy(to[start:end], piece[start:end], stream)
    if rest:
        copy_all([views[i] for i in rest], [sources[i] for i in rest])
        copy(memory[layout.slab], pieces[layout.slab], stream)


class Packers:
    """A few threads for batches of many small leaves, which torch's own threading packs one after the other.

    Belongs to one producer thread, which packs a share itself. The GIL is taken once a share, not once a leaf.

    Args:
        threads: Threads that pack, the calling one included.
        name: Prefix of the thread names.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._count = max(1, min(threads, _MAX_PACKERS))
        self._name = name
        self._threads: list[threading.Thread] = []
        self._own: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._work: SimpleQueue[Any] = SimpleQueue()
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()

    def start(self, views: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Begin ``view.copy_(source)`` for all; :meth:`finish` must follow."""
        while len(self._threads) < self._count - 1:
            thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
            thread.start()
            self._threads.append(thread)
        count = self._count
        for share in range(1, count):
            self._work.put((views[share::count], sources[share::count]))
        self._own = views[::count], sources[::count]

    def finish(self) -> None:
        """Pack the calling thread's share and wait for the others; all bytes have left the leaves then (contract 5)."""
        own, self._own = self._own, ([], [])
        error: BaseException | None = None
        try:
            if own[0]:
                copy_all(*own)
        except BaseException as caught:  # noqa: BLE001 - the others must be waited for first: they write the slot
            error = caught
        for _ in range(1, self._count):
            error = self._done.get() or error
        if error is not None:
            raise error

    def _run(self) -> None:
        limit_packing_threads(1)
        while (share := self._work.get()) is not None:
            try:
                with torch.no_grad():
                    copy_all(*share)
                self._done.put(None)
            except BaseException as error:  # noqa: BLE001 - raised again where the batch is sent
                self._done.put(error)
            del share

    def close(self) -> None:
        """End the threads."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
