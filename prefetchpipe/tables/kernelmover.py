"""Rows in page-locked memory, moved by kernels."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch

from prefetchpipe.device.base import Device, Event, HostBlock, Stream
from prefetchpipe.memory.pinned import PinnedMemory
from prefetchpipe.tables.distinct import Distinct
from prefetchpipe.tables.index import FEW_IDS, Index, check_range, out_of_range
from prefetchpipe.tables.kernels import RowKernels
from prefetchpipe.tables.memory import HostRows, Staging, numpy_dtype
from prefetchpipe.tables.source import NO_KEY
from prefetchpipe.tables.ways import Ways

__all__ = ["KernelMover"]

# ruff: noqa: SLF001 - several of them move together


class KernelMover:
    """Kernels read and write the rows in page-locked memory; the host takes no part and waits for nothing.

    Tables that move together share the events of that: a table's last write, or its last read on a stream, may be an
    event that another one has recorded. One that is recorded again stands behind all that it stood for before, since
    every write waits for the write before it, and reads have one event a stream.
    """

    on_device = True

    def __init__(self, rows: HostRows, device: Device, budget: PinnedMemory, kernels: RowKernels) -> None:
        self._rows = rows
        self._count = rows.tensor.shape[0]  # len() of a tensor is slow, and asked for at every move
        self._device = device
        self._budget = budget
        self._kernels = kernels
        self._ids = [Staging(device, budget), Staging(device, budget)]
        self._own: Event = device.new_event()
        self._written: Event = self._own
        self._reads: dict[Stream, Event] = {}
        self._by_copy_stream = False  # the last write was queued there
        self._ways = Ways(device, rows.tensor.numel() * rows.tensor.dtype.itemsize)
        self._fault_block: HostBlock = budget.alloc(48)
        # What kernels report: one record for ids as they were given, and one for distinct ids.
        self._faults = tuple(self._fault_block.tensor.view(torch.int64).zero_().view(2, 3))
        self._told = tuple(fault.numpy() for fault in self._faults)  # NumPy looks at one number in a tenth of the time

    def place(self, index: Index) -> Index:
        """To the device, by a copy on the current stream."""
        if index.resident:
            return index
        return Index(self._copied(index, torch.int64), index.shape, resident=True, is_distinct=index.is_distinct)

    def _copied(self, index: Index, dtype: torch.dtype) -> torch.Tensor:
        """The ids of an index in host memory, on the device by a copy on the current stream."""
        nbytes = len(index) * dtype.itemsize
        ids = self._device.empty(torch.Size((len(index),)), (1,), dtype)
        if nbytes:
            self._ids.reverse()
            staging = self._ids[0]
            buffer = staging.acquire(nbytes)
            if len(index) <= FEW_IDS:
                np.copyto(buffer.numpy().view(numpy_dtype(dtype)), index.ids.numpy(), casting="same_kind")
            else:
                buffer.view(dtype).copy_(index.ids)
            stream = self._device.current_stream()
            self._device.copy(ids, buffer, stream)
            staging.leave(stream)
        return ids

    def distinct(self, index: Index) -> Distinct:
        """On the device: the host would have to wait for their number, so there is room for the most there can be."""
        fault, rows = self._fault_of(index), self._count
        if not len(index):
            ids = self.place(index).ids
            return Distinct(Index(ids, (0,), resident=True, is_distinct=True), ids)
        # In host memory they have been checked, so they are the keys that sort them.
        is_key = not index.resident and rows <= NO_KEY
        ids = self._copied(index, torch.int32) if is_key else self.place(index).ids
        return self._kernels.distinct(ids, index.shape, rows, fault=fault, device=self._device)

    def gather(self, index: Index, out: torch.Tensor) -> None:
        """See the protocol."""
        self.gather_all([self], index, [out])

    def gather_all(
        self,
        movers: Sequence[KernelMover],
        index: Index,
        outs: Sequence[torch.Tensor],
        read: Event | None = None,
    ) -> None:
        """Rows of several tables of this length, this one among them, by one launch.

        ``read`` is an event of this stream alone, which the caller records behind it; None: there is one.
        """
        device = self._device
        stream = device.current_stream()
        for event in self._writes_before(movers, stream):
            device.wait(stream, event)  # contract 3: a gather after a scatter sees it, on any stream
        if len(index):
            tables = [mover._rows.tensor for mover in movers]
            fault = self._fault_of(index)

            def move(order: torch.Tensor | None) -> None:
                self._kernels.gather(tables, index.ids, order, outs, fault=fault, stream=stream)

            self._run("gather", index, stream, move)
        if read is None:
            read = self._reads.get(stream) or device.new_event()
            device.record(read, stream)
        for mover in movers:
            mover._reads[stream] = read

    def scatter(self, index: Index, values: torch.Tensor, *, unique: bool) -> None:
        """See the protocol."""
        self.scatter_all([self], index, [values], unique=unique)

    def scatter_all(
        self,
        movers: Sequence[KernelMover],
        index: Index,
        values: Sequence[torch.Tensor],
        *,
        unique: bool,
        counted: KernelMover | None = None,
    ) -> None:
        """Values of several tables of this length, this one among them, by one launch; one is counted up, too."""
        written = movers if counted is None else [*movers, counted]
        stream = self._before_write(written)
        if len(index):
            tables = [mover._rows.tensor for mover in movers]
            fault = self._fault_of(index)
            counts = None if counted is None else counted._rows.tensor

            def move(order: torch.Tensor | None) -> None:
                self._kernels.scatter(tables, index.ids, order, values, fault=fault, stream=stream, counts=counts)

            if unique:
                self._run("scatter", index, stream, move)
            else:
                move(self._order(index, stream))
        self._after_write(written, stream)

    def add(self, index: Index, values: torch.Tensor) -> None:
        """See the protocol."""
        if not self._kernels.can_add(values.dtype):
            self._add_on_host(index, values)
            return
        stream = self._before_write([self])
        if len(index):
            fault, order = self._fault_of(index), self._order(index, stream)
            self._kernels.add(self._rows.tensor, index.ids, order, values, fault=fault, stream=stream)
        self._after_write([self], stream)

    def moves_with(self, other: object) -> bool:
        """Whether rows of both can go in one launch."""
        return isinstance(other, KernelMover) and other._count == self._count

    def _run(self, what: str, index: Index, stream: Stream, move: Callable[[torch.Tensor | None], None]) -> None:
        """As they are, or sorted first; distinct ids ascend already."""
        if index.is_distinct:
            move(None)
        else:
            self._ways.run(what, len(index), stream, lambda: move(None), lambda: move(self._order(index, stream)))

    def _fault_of(self, index: Index) -> torch.Tensor:
        given: torch.Tensor = self._faults[0]
        distinct: torch.Tensor = self._faults[1]
        return distinct if index.is_distinct else given

    def _order(self, index: Index, stream: Stream) -> torch.Tensor:
        rows = self._count
        keys = self._kernels.keys(index.ids, rows, fault=None, device=self._device, stream=stream)
        self._device.before_kernels()
        return torch.sort(keys, stable=True)[1]  # stable: the last of equal ids stays the last

    def _before_write(self, movers: Sequence[KernelMover]) -> Stream:
        stream = self._device.current_stream()
        copy_stream = self._device.copy_stream
        reads = {
            id(event): event
            for mover in movers
            for reader, event in mover._reads.items()
            if stream is not copy_stream or reader is not copy_stream
        }
        for event in self._writes_before(movers, stream):
            self._device.wait(stream, event)  # contract 3: the scatter before this has written its rows
        for event in reads.values():
            self._device.wait(stream, event)  # contract 3: a gather before this still reads the old rows
        return stream

    def _writes_before(self, movers: Sequence[KernelMover], stream: Stream) -> Collection[Event]:
        """Of the last writes those that ``stream`` has to wait for.

        The copy stream is behind what was queued on it; other streams may go, and their numbers be used again.
        """
        is_copy_stream = stream is self._device.copy_stream
        return {
            id(mover._written): mover._written for mover in movers if not (is_copy_stream and mover._by_copy_stream)
        }.values()

    def _after_write(self, movers: Sequence[KernelMover], stream: Stream) -> None:
        self._device.record(self._own, stream)
        for mover in movers:
            mover._written = self._own
            mover._by_copy_stream = stream is self._device.copy_stream

    def _add_on_host(self, index: Index, values: torch.Tensor) -> None:
        """For the dtypes without a kernel; waits for the current stream."""
        self._device.before_kernels()
        ids, new = index.ids.cpu(), values.cpu()
        check_range(ids, self._count, index.shape)
        self.settle()
        self._rows.tensor.index_add_(0, ids, new)

    def settle(self) -> None:
        """Contract 3: a host read waits for the scatters, a host write for the gathers too; never for the device."""
        self._device.synchronize(self._written)
        for event in self._reads.values():
            self._device.synchronize(event)
        self.poll()

    def poll(self) -> None:
        """A look at page-locked memory."""
        for fault, is_distinct in zip(self._told, (False, True), strict=True):
            if fault[0] == 2:  # noqa: PLR2004 - the kernel writes it last
                _, value, position = fault.tolist()
                fault[:] = 0
                raise out_of_range(value, None if is_distinct else position, self._count, None)

    def close(self) -> None:
        """See the protocol."""
        self._device.synchronize(self._written)
        for event in self._reads.values():
            self._device.synchronize(event)  # contract 6: kernels may still be reading this memory
        for staging in self._ids:
            staging.free()
        self._faults = tuple(torch.zeros(2, 3, dtype=torch.int64, device="cpu"))
        self._told = tuple(fault.numpy() for fault in self._faults)
        self._budget.free(self._fault_block)
