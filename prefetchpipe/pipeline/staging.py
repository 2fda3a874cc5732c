"""Packing: from the loader's tensors into a pinned slot, and from there, piece by piece, onto the wire."""

from __future__ import annotations

import threading
from _queue import SimpleQueue  # the C class itself
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from prefetchpipe.batch.few import FewLeaves
from prefetchpipe.batch.job import Job
from prefetchpipe.batch.layout import Layout, flat_bytes
from prefetchpipe.batch.rows import Rows, Stacked, copy_all
from prefetchpipe.device.base import Device, Stream
from prefetchpipe.memory.ring import Slot
from prefetchpipe.native import Copier
from prefetchpipe.pipeline.threadstate import limit_packing_threads
from prefetchpipe.pipeline.timing import Probe

__all__ = ["LARGE_BYTES", "Packers", "Send", "stage", "stage_in_pieces"]

Send = Callable[[torch.Tensor, Callable[[torch.Tensor], None]], None]

LARGE_BYTES = 64 << 20
"""A batch beyond this is packed and copied in pieces, through slots of their size: the copy of one starts while the
next is packed, and what was packed is still in the processor's caches when it is copied. Smaller batches lose more to
parallel regions, one a piece, than they gain (docs/performance.md)."""

_PIECE_BYTES = 20 << 20

_MANY_SPANS = 8
_MANY_BYTES = 1 << 20
_MAX_PACKERS = 6

_Share = tuple[list[torch.Tensor], list[torch.Tensor]]


def stage(
    device: Device,
    layout: Layout | FewLeaves,
    slot: Slot,
    *,
    leaves: Sequence[torch.Tensor],
    stream: Stream,
    copier: Copier | None = None,
    packers: Packers | None = None,
    probe: Probe | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Pack ``leaves`` into ``slot`` and launch the copies to new device memory on ``stream``.

    Runs on the thread that sends; the GIL is free while bytes move. All bytes have left ``leaves`` when it returns
    (contract 5).

    Returns:
        The leaves on the device, and one tensor for each block of the layout over the same memory.
    """
    if copier is not None:
        arrived, memory = _packed_natively(device, layout, slot, leaves=leaves, copier=copier)
    else:
        sources, views = layout.sources(leaves), slot.views(layout)
        arrived, memory = _packed_by_torch(device, layout, sources, views=views, packers=packers)
    pieces = layout.pieces(slot.tensor)
    if probe is not None:
        probe.begin(stream)
    for target, piece in zip(memory, pieces, strict=True):
        device.copy(target, piece, stream)
    if probe is not None:
        probe.end(stream, layout.nbytes)
    return arrived, memory


def _packed_natively(
    device: Device,
    layout: Layout | FewLeaves,
    slot: Slot,
    *,
    leaves: Sequence[torch.Tensor],
    copier: Copier,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    job = Job(layout, leaves)
    try:
        copier.start(slot.tensor.data_ptr(), job.sources, job.offsets, job.nbytes)
        sent = layout.allocate(device.empty, device.alloc)
        job.pack_rest(layout, leaves, lambda number: slot.views(layout)[number])
    finally:
        copier.finish()  # contract 5; also if the device is full: the slot is being written
    return sent


def _packed_by_torch(
    device: Device,
    layout: Layout | FewLeaves,
    sources: list[torch.Tensor],
    *,
    views: list[torch.Tensor],
    packers: Packers | None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    if packers is not None and layout.nbytes >= _MANY_BYTES:
        views, sources = packers.parts(views, sources)
    if packers is not None and len(views) >= _MANY_SPANS and layout.nbytes >= _MANY_BYTES:
        packers.start(views, sources)
        try:
            return layout.allocate(device.empty, device.alloc)
        finally:
            packers.finish()  # also if the device is full: they are writing the slot
    sent = layout.allocate(device.empty, device.alloc)
    copy_all(views, sources)
    return sent


def stage_in_pieces(
    device: Device, layout: Layout, leaves: Sequence[torch.Tensor], send: Send, *, copier: Copier | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """As :func:`stage`, for a large batch.

    Args:
        device: Where it goes.
        layout: Of the whole batch.
        leaves: What it packs.
        send: Brings some bytes through a slot: called with device memory, flat ``uint8``, and with what packs them.
        copier: What copies natively, if anything does.

    Returns:
        As :func:`stage`.
    """
    arrived, memory = layout.allocate(device.empty, device.alloc)
    flat = [flat_bytes(tensor) for tensor in memory]
    rest: list[int] = []
    for number, span in enumerate(layout.spans):
        source = layout.source(number, leaves)
        if span.block == layout.slab:
            rest.append(number)
        elif isinstance(source, Rows) or not source.is_contiguous():
            send(flat[span.block], partial(_pack, layout, [number], leaves, copier))
        else:
            whole = flat_bytes(source)
            for start in range(0, span.nbytes, _PIECE_BYTES):
                end = min(start + _PIECE_BYTES, span.nbytes)
                send(flat[span.block][start:end], partial(_pack_bytes, whole[start:end], copier))
    if rest:
        send(flat[layout.slab], partial(_pack, layout, rest, leaves, copier))
    return arrived, memory


def _pack(layout: Layout, numbers: list[int], leaves: Sequence[Any], copier: Copier | None, slot: torch.Tensor) -> None:
    """Spans of one block, which begins where the slot does."""
    begin = layout.blocks[layout.spans[numbers[0]].block].slot_offset

    def view(number: int) -> torch.Tensor:
        return layout.slot_view(layout.spans[number], slot, begin)

    if copier is None:
        copy_all(list(map(view, numbers)), [layout.source(number, leaves) for number in numbers])
        return
    job = Job(layout, leaves, numbers, begin)
    try:
        copier.start(slot.data_ptr(), job.sources, job.offsets, job.nbytes)
        job.pack_rest(layout, leaves, view)
    finally:
        copier.finish()  # contract 5


def _pack_bytes(source: torch.Tensor, copier: Copier | None, slot: torch.Tensor) -> None:
    if copier is None:
        slot[: len(source)].copy_(source)
        return
    copier.copy(slot.data_ptr(), source.data_ptr(), len(source))


class Packers:
    """A few threads for batches of many small leaves, which torch's own threading packs one after the other.

    Where there are no native copies (:mod:`prefetchpipe.native`).

    Belongs to one producer thread, which packs too. Whoever is awake takes the next share, so nobody waits for a thread
    that is slow to wake. One share each: the GIL is taken once a share, and waiting for it costs more than an uneven
    end (docs/performance.md, part T).

    Args:
        threads: Threads that pack, the calling one included.
        name: Prefix of the thread names.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._count = max(1, min(threads, _MAX_PACKERS))
        self._name = name
        self._threads: list[threading.Thread] = []
        self._shares: deque[_Share] = deque()
        self._left = 0
        self._work: SimpleQueue[deque[_Share] | None] = SimpleQueue()
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()

    def parts(self, views: list[torch.Tensor], sources: list[Any]) -> tuple[list[torch.Tensor], list[Any]]:
        """Stacks of samples in parts: torch copies one sample after the other, with all its threads at each."""
        if self._count == 1 or not any(isinstance(source, Stacked) for source in sources):
            return views, sources
        all_views: list[torch.Tensor] = []
        all_sources: list[Any] = []
        for view, source in zip(views, sources, strict=True):
            is_large = isinstance(source, Stacked) and view.nbytes >= _MANY_BYTES
            some, parts = source.split(view, max(2 * self._count, _MANY_SPANS)) if is_large else ([view], [source])
            all_views += some
            all_sources += parts
        return all_views, all_sources

    def start(self, views: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Begin ``view.copy_(source)`` for all; :meth:`finish` must follow."""
        while len(self._threads) < self._count - 1:
            thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
            thread.start()
            self._threads.append(thread)
        count = min(self._count, len(views))
        self._shares = shares = deque((views[share::count], sources[share::count]) for share in range(count))
        self._left = count
        for _ in self._threads:
            self._work.put(shares)

    def finish(self) -> None:
        """Pack along, and wait for the others; all bytes have left the leaves then (contract 5)."""
        shares, error = self._shares, None
        while (share := _next_of(shares)) is not None:
            self._left -= 1
            try:
                copy_all(*share)
            except BaseException as caught:  # noqa: BLE001 - the others must be waited for first: they write the slot
                error = caught
        for _ in range(self._left):
            error = self._done.get() or error
        if error is not None:
            raise error

    def _run(self) -> None:
        limit_packing_threads(1)
        while (shares := self._work.get()) is not None:
            while (share := _next_of(shares)) is not None:
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


def _next_of(shares: deque[_Share]) -> _Share | None:
    try:
        return shares.popleft()
    except IndexError:
        return None
