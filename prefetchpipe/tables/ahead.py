"""Rows that are on their way before they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from prefetchpipe.device.base import Device, Event, Stream
from prefetchpipe.tables.index import Index
from prefetchpipe.tables.kernels import RowKernels

if TYPE_CHECKING:
    from prefetchpipe.tables.table import HostTable

__all__ = ["MOST_PATCHES", "RowsAhead"]

Gather = Callable[["Sequence[HostTable]", Index], list[torch.Tensor]]

MOST_PATCHES = 8
"""Steps whose new values wait for rows ahead: each keeps rows of its batch on the device, and is a launch more then."""


class RowsAhead:
    """Rows of tables of one index, gathered on the copy stream, and what was written back to the tables since.

    Made by :func:`gather_ahead`. :meth:`take` gives exactly what a gather at that moment would give.

    Args:
        tables: Whose rows.
        index: Which rows.
        rows: Those of each table.
        memory: Where the rows lie, one tensor for each piece of device memory.
        again: Gathers them on the current stream.
        ready: Recorded behind the gather.
        idle: Where that event goes to be used again, when nobody will wait for it any more.
        most_patches: After more writes than these the rows are given up, and gathered again when taken.
    """

    __slots__ = (
        *("__weakref__", "_again", "_idle", "_index", "_maker", "_memory", "_most_patches", "_patches", "_ready"),
        *("_rows", "tables"),
    )

    def __init__(  # noqa: PLR0917 - one place makes it
        self,
        tables: Sequence[HostTable],
        index: Index,
        rows: list[torch.Tensor],
        memory: list[torch.Tensor],
        again: Gather,
        ready: Event,
        idle: list[Event],
        *,
        most_patches: int = MOST_PATCHES,
    ) -> None:
        self.tables = tables
        self._index = index
        self._rows: list[torch.Tensor] | None = rows
        self._memory = memory
        self._patches: list[tuple[Index, Mapping[HostTable, torch.Tensor]]] = []
        self._maker: Stream = None
        self._again = again
        self._ready = ready
        self._idle = idle
        self._most_patches = most_patches

    def __del__(self) -> None:
        self._idle.append(self._ready)  # whoever waits for it has been told what to wait for

    def patch(self, index: Index, news: Mapping[HostTable, torch.Tensor], stream: Stream) -> None:
        """Some rows of these tables have new values, which ``stream`` makes on the device."""
        if self._patches and (stream != self._maker or len(self._patches) >= self._most_patches):
            self.drop()
        elif self._rows is not None:
            self._patches.append((index, news))
            self._maker = stream

    def drop(self) -> None:
        """A table was written to in another way: gather again when asked."""
        self._rows = None
        self._memory = []
        self._patches.clear()

    def take(self) -> list[torch.Tensor]:
        """The rows, [ids, dim] for each table, ordered on the current stream. Once."""
        device = self.tables[0].where
        stream = device.current_stream()
        rows, self._rows = self._rows, None
        pieces, self._memory = self._memory, []
        patches, self._patches = self._patches, []
        # Contract 3: they were gathered on the copy stream, behind their ids, which may be of another stream than this.
        device.wait(stream, self._ready)
        if rows is None or (patches and self._maker != stream):  # contract 3: new values of another stream
            return self._again(self.tables, self._index)
        for memory in pieces:
            device.record_use(memory, stream)  # contract 4: it was allocated there too
        for new_index, news in patches:
            missing = [(old, news[table]) for old, table in zip(rows, self.tables, strict=True) if table in news]
            _replace(missing, self._index, new_index, device)
        return rows


def _replace(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], index: Index, new_index: Index, device: Device
) -> None:
    """Of each pair the first gets the values of the second where the ids are the same; they ascend: no host looks."""
    if not len(index) or not len(new_index):
        return
    kernels = RowKernels.of(device) if index.resident and new_index.resident else None
    if kernels is not None:
        rows, news = zip(*pairs, strict=True)
        kernels.patch(rows, index.ids, news, new_index.ascending, stream=device.current_stream())
        return
    device.before_kernels()
    at = torch.searchsorted(new_index.ids, index.ids).clamp_(max=len(new_index) - 1)
    same = new_index.ids[at] == index.ids
    for old, new in pairs:
        if same.device == old.device:
            torch.where(same[:, None], new.index_select(0, at), old, out=old)
            continue
        here = same.nonzero().view(-1)
        old.index_copy_(0, here.to(old.device), new.index_select(0, at[here].to(old.device)))
