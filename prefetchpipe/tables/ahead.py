"""Rows that are on their way before they are asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from prefetchpipe.device.base import Device
from prefetchpipe.tables.index import Index

if TYPE_CHECKING:
    from prefetchpipe.tables.table import HostTable

__all__ = ["RowsAhead"]


class RowsAhead:
    """Rows gathered on the copy stream, and what was written back to the table since.

    Made by :meth:`HostTable.gather_ahead`. :meth:`take` gives exactly what a gather at that moment would give.
    """

    __slots__ = ("__weakref__", "_device", "_index", "_patches", "_ready", "_rows", "_table")

    def __init__(self, table: HostTable, device: Device, index: Index, rows: torch.Tensor) -> None:
        self._table = table
        self._device = device
        self._index = index
        self._rows: torch.Tensor | None = rows
        self._patches: list[tuple[Index, torch.Tensor]] = []
        self._ready = device.new_event()
        device.record(self._ready, device.copy_stream)

    def patch(self, index: Index, rows: torch.Tensor) -> None:
        """Some rows of the table have new values, ``rows``, which are on the device already."""
        if self._rows is not None:
            self._patches.append((index, rows))

    def drop(self) -> None:
        """The table was written to in another way: gather again when asked."""
        self._rows = None
        self._patches.clear()

    def take(self) -> torch.Tensor:
        """The rows, [ids, dim], ordered on the current stream. Once."""
        rows, self._rows = self._rows, None
        patches, self._patches = self._patches, []
        device = self._device
        stream = device.current_stream()
        # Contract 3: they were gathered on the copy stream, behind their ids, which may be of another stream than this.
        device.wait(stream, self._ready)
        if rows is None:
            return self._table.gather_rows(self._index)
        device.record_use(rows, stream)  # contract 4: they were allocated there too
        if patches:
            device.before_kernels()
        for index, new in patches:
            _replace(rows, self._index, new, index)
        return rows


def _replace(rows: torch.Tensor, index: Index, new: torch.Tensor, new_index: Index) -> None:
    """``rows`` with the values of ``new`` where the ids are the same; both ascending, so no host needs to look."""
    if not len(index) or not len(new_index):
        return
    at = torch.searchsorted(new_index.ids, index.ids).clamp_(max=len(new_index) - 1)
    same = new_index.ids[at] == index.ids
    if same.device == rows.device:
        torch.where(same[:, None], new.index_select(0, at), rows, out=rows)
        return
    here = same.nonzero().view(-1)
    rows.index_copy_(0, here.to(rows.device), new.index_select(0, at[here].to(rows.device)))
