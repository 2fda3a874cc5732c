"""Tables of one index: rows come ahead of use, and go back, together."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from prefetchpipe.device.base import Event, Stream
from prefetchpipe.tables.ahead import MOST_PATCHES, RowsAhead
from prefetchpipe.tables.index import Index
from prefetchpipe.tables.kernelmover import KernelMover

if TYPE_CHECKING:
    from prefetchpipe.tables.table import HostTable

__all__ = ["can_count", "gather_ahead", "gather_rows", "write_back"]

# ruff: noqa: SLF001 - the other half of HostTable

_ALIGNED = 128
"""Elements between the starts of tables' rows in one piece: a multiple of the bytes that any kernel reads at once."""


def gather_ahead(tables: Sequence[HostTable], index: Index, *, most_patches: int = MOST_PATCHES) -> RowsAhead:
    """Rows that are wanted later, on the copy stream; what is written back until then reaches them.

    The caller has taken care of ``no_grad`` and ``beside_captures``, here and below.

    Args:
        tables: Of one device.
        index: A checked index of distinct ids, ascending.
        most_patches: As for :class:`RowsAhead`.
    """
    first = tables[0]
    device = first.where
    with _Locked(tables):
        # Contract 3: ids on the device come from the caller's stream.
        device.record(first._handover, device.current_stream())
        with device.on_copy_stream():
            device.wait(device.copy_stream, first._handover)
            rows, memory = _room(tables, len(index))
            ready = first._idle.pop() if first._idle else device.new_event()
            _gather(tables, index, rows, ready)
            device.record(ready, device.copy_stream)
        if index.resident:
            device.record_use(index.ids, device.copy_stream)  # contract 4
        ahead = RowsAhead(tables, index, rows, memory, gather_rows, ready, first._idle, most_patches=most_patches)
        new = weakref.ref(ahead)
        for table in tables:
            table._ahead = [ref for ref in table._ahead if ref() is not None]
            table._ahead.append(new)
        return ahead


def gather_rows(tables: Sequence[HostTable], index: Index) -> list[torch.Tensor]:
    """As :meth:`HostTable.gather_rows` of each, [ids, dim] on the current stream."""
    with _Locked(tables):
        rows, _ = _room(tables, len(index))
        _gather(tables, index, rows)
        return rows


def _room(tables: Sequence[HostTable], count: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """For so many rows of each table, and the memory that it is in.

    The first table's rows lie apart: they become a leaf, which a graph may hold for longer than the states. Those are
    one piece where the dtypes agree: it is allocated, freed, and kept for other streams once.
    """
    first, empty, dtype = tables[0], tables[0].where.empty, tables[-1].dtype
    rows = [empty(torch.Size((count, first.shape[1])), (first.shape[1], 1), first.dtype)]
    cuts, end = [], 0
    for table in tables[1:]:
        width = table.shape[1]
        if table.dtype is not dtype or len(tables) == 2:  # noqa: PLR2004 - one state
            rows += [empty(torch.Size((count, one.shape[1])), (one.shape[1], 1), one.dtype) for one in tables[1:]]
            return rows, rows
        cuts.append(((count, width), (width, 1), end))
        end += (count * width + _ALIGNED - 1) // _ALIGNED * _ALIGNED
    if not cuts:
        return rows, rows
    memory = empty(torch.Size((end,)), (1,), dtype)
    return [*rows, *(memory.as_strided(*cut) for cut in cuts)], [*rows, memory]


def _gather(tables: Sequence[HostTable], index: Index, rows: Sequence[torch.Tensor], read: Event | None = None) -> None:
    """Into ``rows``. The caller records ``read`` behind it; None: the tables have events of their own."""
    for movers, group in _groups(tables):
        if movers:
            movers[0].gather_all(movers, movers[0].place(index), [rows[number] for number in group], read)
        else:
            mover = tables[group[0]]._mover
            mover.gather(mover.place(index), rows[group[0]])


def can_count(tables: Sequence[HostTable], counted: HostTable) -> bool:
    """Whether the launch that writes rows back to ``tables`` can count in ``counted`` as well."""
    first = tables[0]._mover
    return isinstance(first, KernelMover) and first.moves_with(counted._mover)


def write_back(
    tables: Sequence[HostTable], index: Index, rows: Sequence[torch.Tensor], counted: HostTable | None = None
) -> None:
    """Write rows that the caller gives up, on the copy stream; rows gathered ahead get the new values.

    Args:
        tables: Of one device.
        index: A checked index of distinct ids, ascending.
        rows: For each table [ids, dim] on the device. They must not be changed afterwards.
        counted: One float32 a row, which grows by one; see :func:`can_count`.
    """
    first = tables[0]
    device = first.where
    with _Locked(tables if counted is None else [*tables, counted]):
        if counted is not None:
            counted._invalidate()
        count = None if counted is None else counted._mover
        stream = device.current_stream()
        is_awaited = _patch(tables, index, rows, stream)
        # Contract 3: the rows are written after the step that makes them.
        device.record(first._handover, stream)
        with device.on_copy_stream():
            device.wait(device.copy_stream, first._handover)
            for movers, group in _groups(tables):
                some = [rows[number] for number in group]
                if movers:
                    here = count if isinstance(count, KernelMover) and 0 in group else None
                    movers[0].scatter_all(movers, movers[0].place(index), some, unique=True, counted=here)
                else:
                    mover = tables[group[0]]._mover
                    mover.scatter(mover.place(index), some[0], unique=True)
        memory = list({new.untyped_storage().data_ptr(): new for new in rows}.values())
        for new in memory:
            device.record_use(new, device.copy_stream)  # contract 4: the copy stream still reads them
        if index.resident:
            device.record_use(index.ids, device.copy_stream)
        if is_awaited:
            # Contract 4: rows ahead will be patched with them on this stream, which need not be the one that they and
            # their ids were allocated on: that is the copy stream, or the forward pass's.
            for new in (*memory, index.ascending) if index.resident else memory:
                device.record_use(new, stream)


def _patch(tables: Sequence[HostTable], index: Index, rows: Sequence[torch.Tensor], stream: Stream) -> bool:
    """Tell the rows ahead; whether there are any."""
    aheads: dict[int, RowsAhead] = {}
    for table in tables:
        table.version += 1
        for ref in table._ahead:
            ahead = ref()
            if ahead is not None:
                aheads[id(ahead)] = ahead
    if aheads:
        news = dict(zip(tables, rows, strict=True))
        for ahead in aheads.values():
            ahead.patch(index, news, stream)
    return bool(aheads)


def _groups(tables: Sequence[HostTable]) -> list[tuple[list[KernelMover], list[int]]]:
    """Which of them go in one launch: movers and numbers; no movers for a table that goes alone, without kernels."""
    groups: list[tuple[list[KernelMover], list[int]]] = []
    for number, table in enumerate(tables):
        mover = table._mover
        if not isinstance(mover, KernelMover):
            groups.append(([], [number]))
            continue
        for movers, group in groups:
            if movers and movers[0].moves_with(mover):
                movers.append(mover)
                group.append(number)
                break
        else:
            groups.append(([mover], [number]))
    return groups


class _Locked:
    """All of their locks; in one order in every thread, so that two of them cannot wait for each other."""

    __slots__ = ("_held", "_locks")

    def __init__(self, tables: Sequence[HostTable]) -> None:
        self._locks = [table._lock for table in (sorted(tables, key=id) if len(tables) > 1 else tables)]
        self._held: list[Any] = []

    def __enter__(self) -> None:
        try:
            for lock in self._locks:
                lock.acquire()
                self._held.append(lock)
        except BaseException:  # Ctrl-C
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        for lock in reversed(self._held):
            lock.release()
