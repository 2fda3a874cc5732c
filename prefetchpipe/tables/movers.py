"""The three ways that rows move: torch on the CPU, kernels over page-locked memory, and staging buffers.

A mover trusts its index and its values: the table has checked them. Calls come one at a time, under the table's lock.
"""

from __future__ import annotations

from typing import NoReturn, Protocol

import torch

from prefetchpipe.device.base import Device
from prefetchpipe.errors import PinnedMemoryError
from prefetchpipe.memory.pinned import PinnedMemory
from prefetchpipe.tables.distinct import Distinct, distinct_on_host
from prefetchpipe.tables.index import PAD, Index, check_range
from prefetchpipe.tables.kernelmover import KernelMover
from prefetchpipe.tables.kernels import RowKernels
from prefetchpipe.tables.memory import HostRows, Staging

__all__ = ["ClosedMover", "HostMover", "Mover", "StagedMover", "make_mover", "write_rows"]


_PLAIN = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Mover(Protocol):
    """Moves rows of one table; all work goes to the stream that is current in the calling thread."""

    on_device: bool
    """Ids are wanted on the device: nothing of a gather or scatter then passes through the host."""

    def place(self, index: Index) -> Index:
        """``index`` where this mover wants it."""

    def distinct(self, index: Index) -> Distinct:
        """The distinct ids of an index, where this mover wants them."""

    def gather(self, index: Index, out: torch.Tensor) -> None:
        """Rows into ``out``, [ids, width] on the device."""

    def scatter(self, index: Index, values: torch.Tensor, *, unique: bool) -> None:
        """``values``, dense and on the device, into the rows; the last one for equal ids."""

    def add(self, index: Index, values: torch.Tensor) -> None:
        """Add ``values`` to the rows, occurrence by occurrence."""

    def settle(self) -> None:
        """Block until the host may read and write the rows: waits for this table's own work only."""

    def poll(self) -> None:
        """Raise an ``IndexError`` that the device has found by now; never waits."""

    def close(self) -> None:
        """As :meth:`settle`; nothing on the device uses the rows any more."""


def make_mover(rows: HostRows, device: Device, budget: PinnedMemory) -> Mover:
    """The way for this memory on this device."""
    if not device.staged:
        return HostMover(rows)
    kernels = RowKernels.of(device) if rows.pinned else None
    if kernels is not None:
        try:
            return KernelMover(rows, device, budget, kernels)
        except PinnedMemoryError:  # not even the few bytes of its fault record
            pass
    return StagedMover(rows, device, budget)


def write_rows(table: torch.Tensor, ids: torch.Tensor, values: torch.Tensor, *, unique: bool) -> None:
    """``table[ids] = values`` in host memory; of equal ids the last one is written."""
    if unique:
        plain = _PLAIN.get(table.dtype.itemsize, table.dtype)  # torch lacks the operator for float8 and uint16
        table.view(plain).index_copy_(0, ids, values.view(plain))
        return
    # NumPy assigns in order, so the last one wins; torch's threads may not. Bytes, since NumPy lacks some dtypes.
    raw, new = (t.view(-1).view(torch.uint8).view(len(t), -1).numpy() for t in (table, values.contiguous()))
    piece = next(size for size in (8, 4, 2, 1) if raw.shape[1] % size == 0)
    raw.view(f"u{piece}")[ids.numpy()] = new.view(f"u{piece}")


class HostMover:
    """torch's own operators; all of it has happened when a call returns."""

    on_device = False

    def __init__(self, rows: HostRows) -> None:
        self._rows = rows

    def place(self, index: Index) -> Index:
        """It is there."""
        return index

    def distinct(self, index: Index) -> Distinct:
        """See the protocol."""
        return distinct_on_host(index)

    def gather(self, index: Index, out: torch.Tensor) -> None:
        """See the protocol."""
        torch.index_select(self._rows.tensor, 0, index.ids, out=out)

    def scatter(self, index: Index, values: torch.Tensor, *, unique: bool) -> None:
        """See the protocol."""
        if len(index):
            write_rows(self._rows.tensor, index.ids, values, unique=unique)

    def add(self, index: Index, values: torch.Tensor) -> None:
        """See the protocol."""
        self._rows.tensor.index_add_(0, index.ids, values)

    def settle(self) -> None:
        """It has settled."""

    def poll(self) -> None:
        """Ids in host memory are checked at once."""

    def close(self) -> None:
        """Nothing is under way."""


class StagedMover:
    """Rows are collected in a page-locked buffer by the host, or in an ordinary one, and copied from there.

    A scatter comes back in two halves: the copy to the host, and the host's writing, which is done when somebody next
    needs the table. One scatter at most is half-way.
    """

    on_device = False

    def __init__(self, rows: HostRows, device: Device, budget: PinnedMemory) -> None:
        self._rows = rows
        self._device = device
        self._out = [Staging(device, budget), Staging(device, budget)]
        self._back = Staging(device, budget)
        self._half: tuple[Index, torch.Tensor, bool, bool] | None = None

    def place(self, index: Index) -> Index:
        """To the host: waits for what is queued on the current stream, and checks the range there."""
        if not index.resident:
            return index
        ids = index.ids
        host = torch.empty(len(index), dtype=torch.int64, device="cpu")
        if len(index):
            stream = self._device.current_stream()
            self._device.copy_to_host(host.view(torch.uint8), ids, stream)
            event = self._device.new_event()
            self._device.record(event, stream)
            self._device.synchronize(event)  # contract 3: the ids are read by the host next
        # Distinct ids that the kernels of another table have found have PAD between them.
        check_range(host[host != PAD] if index.is_distinct else host, len(self._rows.tensor), index.shape)
        return Index(host, index.shape, resident=False, is_distinct=index.is_distinct)

    def distinct(self, index: Index) -> Distinct:
        """See the protocol."""
        return distinct_on_host(self.place(index))

    def gather(self, index: Index, out: torch.Tensor) -> None:
        """See the protocol."""
        self.settle()  # contract 3: a gather after a scatter sees it
        nbytes = out.numel() * out.dtype.itemsize
        if not nbytes:
            return
        self._out.reverse()
        staging = self._out[0]
        buffer = staging.acquire(nbytes)
        rows = buffer.view(out.dtype).view(out.shape)
        if index.is_distinct:
            is_pad = index.ids == PAD
            torch.index_select(self._rows.tensor, 0, index.ids.masked_fill(is_pad, 0), out=rows)
            rows[is_pad] = 0  # as kernels do
        else:
            torch.index_select(self._rows.tensor, 0, index.ids, out=rows)
        stream = self._device.current_stream()
        self._device.copy(out, buffer, stream)
        staging.leave(stream)

    def scatter(self, index: Index, values: torch.Tensor, *, unique: bool) -> None:
        """See the protocol."""
        self._bring(index, values, unique=unique, adding=False)

    def add(self, index: Index, values: torch.Tensor) -> None:
        """See the protocol."""
        self._bring(index, values, unique=False, adding=True)

    def _bring(self, index: Index, values: torch.Tensor, *, unique: bool, adding: bool) -> None:
        self.settle()  # the buffer still holds the scatter before this one
        nbytes = values.numel() * values.dtype.itemsize
        if not nbytes:
            return
        buffer = self._back.acquire(nbytes)
        stream = self._device.current_stream()
        self._device.copy_to_host(buffer, values, stream)
        # Contract 5: the ids may be the caller's own memory, and are read when the host writes.
        held = Index(index.ids.clone(), index.shape, resident=False, is_distinct=index.is_distinct)
        self._half = (held, buffer.view(values.dtype).view(values.shape), unique, adding)
        self._back.leave(stream)

    def settle(self) -> None:
        """The second half of the last scatter."""
        half, self._half = self._half, None
        if half is None:
            return
        self._back.wait()  # contract 3: the rows have arrived on the host
        index, values, unique, adding = half
        if adding:
            self._rows.tensor.index_add_(0, index.ids, values)
            return
        ids = index.ids
        if index.is_distinct:
            is_id = ids != PAD
            if not bool(is_id.all()):
                ids, values = ids[is_id], values[is_id]
        write_rows(self._rows.tensor, ids, values, unique=unique)

    def poll(self) -> None:
        """Ids are checked by the host."""

    def close(self) -> None:
        """See the protocol."""
        self.settle()
        for staging in (*self._out, self._back):
            staging.free()


class ClosedMover:
    """Stands in for the mover of a table that was closed: kernels would be given memory that is somebody else's now."""

    def __init__(self, mover: Mover) -> None:
        self.on_device = mover.on_device

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise RuntimeError("this HostTable was closed, and its rows are gone")

    place = distinct = gather = scatter = add = _refuse
    poll = _refuse  # calls that move rows begin with it, before they take their index for one of an empty table

    def settle(self) -> None:
        """Nothing is outstanding."""

    def close(self) -> None:
        """It is closed."""
