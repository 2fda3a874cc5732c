"""Rows that are on their way before they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from prefetchpipe.device.base import Device, Event, Stream
from prefetchpipe.tables.index import Index
from prefetchpipe.tables.kernels import RowKernels

if TYPE_CHECKING:
    from prefetchpipe.tables.table import HostTable

__all__ = ["MOST_PATCHES", "Ready", "RowsAhead", "take_all"]

# ruff: noqa: SLF001 - several of them are taken together

MOST_PATCHES = 8
"""Steps whose new values wait for rows ahead: each keeps rows of its batch on the device, and is a launch more then."""


class Ready:
    """The event behind a gather; when nobody will wait for it any more it is used again.

    Args:
        event: Recorded there.
        idle: Where it goes then.
    """

    __slots__ = ("_idle", "event")

    def __init__(self, event: Event, idle: list[Event]) -> None:
        self.event = event
        self._idle = idle

    def __del__(self) -> None:
        self._idle.append(self.event)  # whoever waits for it has been told what to wait for


class RowsAhead:
    """Rows gathered on the copy stream, and what was written back to the table since.

    Made by :func:`gather_ahead`. :meth:`take` gives exactly what a gather at that moment would give.

    Args:
        table: Whose rows.
        device: Of the table.
        index: Which rows.
        rows: The rows.
        ready: Behind the gather.
        most_patches: After more writes than these the rows are given up, and gathered again when taken.
    """

    __slots__ = ("__weakref__", "_device", "_index", "_maker", "_most_patches", "_patches", "_ready", "_rows", "_table")

    def __init__(
        self,
        table: HostTable,
        device: Device,
        index: Index,
        rows: torch.Tensor,
        ready: Ready,
        *,
        most_patches: int = MOST_PATCHES,
    ) -> None:
        self._table = table
        self._device = device
        self._index = index
        self._rows: torch.Tensor | None = rows
        self._patches: list[tuple[Index, torch.Tensor]] = []
        self._maker: Stream = None
        self._ready = ready
        self._most_patches = most_patches

    def patch(self, index: Index, rows: torch.Tensor, stream: Stream) -> None:
        """Some rows of the table have new values, ``rows``, which ``stream`` makes on the device."""
        if self._patches and (stream != self._maker or len(self._patches) >= self._most_patches):
            self.drop()
        elif self._rows is not None:
            self._patches.append((index, rows))
            self._maker = stream

    def drop(self) -> None:
        """The table was written to in another way: gather again when asked."""
        self._rows = None
        self._patches.clear()

    def take(self) -> torch.Tensor:
        """The rows, [ids, dim], ordered on the current stream. Once."""
        return take_all([self])[0]

    def _take(self, stream: Stream, waited: Ready | None) -> tuple[torch.Tensor, list[tuple[Index, torch.Tensor]]]:
        """The rows as they are now, and what they miss; ``stream`` waits for ``waited`` already."""
        rows, self._rows = self._rows, None
        patches, self._patches = self._patches, []
        device = self._device
        # Contract 3: they were gathered on the copy stream, behind their ids, which may be of another stream than this.
        if self._ready is not waited:
            device.wait(stream, self._ready.event)
        if rows is None or (patches and self._maker != stream):  # contract 3: new values of another stream
            return self._table.gather_rows(self._index), []
        device.record_use(rows, stream)  # contract 4: they were allocated there too
        return rows, patches


def take_all(aheads: Sequence[RowsAhead]) -> list[torch.Tensor]:
    """:meth:`RowsAhead.take` of several tables; what they miss in common is brought in together."""
    taken: list[tuple[Index, Device, torch.Tensor, list[tuple[Index, torch.Tensor]]]] = []
    stream = aheads[0]._device.current_stream()
    waited: Ready | None = None
    for ahead in aheads:
        taken.append((ahead._index, ahead._device, *ahead._take(stream, waited)))
        waited = ahead._ready
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, (index, _, _, patches) in enumerate(taken):
        groups.setdefault((id(index), *(id(new_index) for new_index, _ in patches)), []).append(number)
    for numbers in groups.values():
        index, device, _, patches = taken[numbers[0]]
        rows = [taken[number][2] for number in numbers]
        for turn, (new_index, _) in enumerate(patches):
            _replace(rows, index, [taken[number][3][turn][1] for number in numbers], new_index, device)
    return [rows for _, _, rows, _ in taken]


def _replace(
    rows: Sequence[torch.Tensor], index: Index, news: Sequence[torch.Tensor], new_index: Index, device: Device
) -> None:
    """Each of ``rows`` with the values of its new ones where the ids are the same; they ascend, so no host looks."""
    if not len(index) or not len(new_index):
        return
    kernels = RowKernels.of(device) if index.resident and new_index.resident else None
    if kernels is not None:
        kernels.patch(rows, index.ids, news, new_index.ascending, stream=device.current_stream())
        return
    device.before_kernels()
    at = torch.searchsorted(new_index.ids, index.ids).clamp_(max=len(new_index) - 1)
    same = new_index.ids[at] == index.ids
    for old, new in zip(rows, news, strict=True):
        if same.device == old.device:
            torch.where(same[:, None], new.index_select(0, at), old, out=old)
            continue
        here = same.nonzero().view(-1)
        old.index_copy_(0, here.to(old.device), new.index_select(0, at[here].to(old.device)))
