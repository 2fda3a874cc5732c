"""Kernels that read and write rows in page-locked host memory: no copy in between, and no CPU core busy.

Rows move as bytes, in the widest pieces that width and addresses allow. A cap on the blocks leaves most multiprocessors
to the step that runs at the same time; bytes over the link need few of them. Kernels that stay in the device's memory
have as many blocks as any operator of torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from prefetchpipe.device.base import Device, Kernel, Stream
from prefetchpipe.tables.distinct import Distinct, Places
from prefetchpipe.tables.index import Index
from prefetchpipe.tables.source import MOST_TABLES, NAMES, NO_KEY, PART, SOURCE, WIDTHS

__all__ = ["RowKernels"]

_THREADS = 512
_UNROLL = 4
_BLOCKS = 32
_BLOCKS_ON_DEVICE = 1024
_SUMMED = {torch.float32: "float", torch.float64: "double", torch.int32: "int", torch.int64: "i64"}
_TOTALLED = {torch.float32: "float", torch.float64: "double"}
_NONE = [(0, 0, 0, 0) * (MOST_TABLES - tables) for tables in range(MOST_TABLES + 1)]
_PIECES = [next(size for size in WIDTHS if not lowest % size) for lowest in range(16)]
"""The widest piece that divides a row and all addresses, by the lowest bits of all of them."""

Tensors = Sequence[torch.Tensor]


class RowKernels:
    """The kernels of one device.

    Args:
        kernels: By name.
        blocks: Most blocks of a launch over the link, one for each multiprocessor that it may take.
    """

    def __init__(self, kernels: dict[str, Kernel], blocks: int = _BLOCKS) -> None:
        self._kernels = kernels
        self._blocks = blocks

    @classmethod
    def of(cls, device: Device) -> RowKernels | None:
        """For ``device``, compiled once; None where there are none."""
        found: RowKernels | None = _compiled.get(device, _UNKNOWN)
        if found is _UNKNOWN:
            kernels = device.compile_kernels(SOURCE, NAMES)
            found = _compiled[device] = None if kernels is None else cls(dict(kernels))
        return found

    # Rows between the host and the device

    def gather(
        self,
        tables: Tensors,
        ids: torch.Tensor,
        order: torch.Tensor | None,
        outs: Tensors,
        *,
        fault: torch.Tensor,
        stream: Stream,
    ) -> None:
        """``out[i] = table[ids[i]]`` of each table; zeros for PAD and for an id out of range.

        Args:
            tables: Of the same length.
            ids: Rows.
            order: In which they are worked through; None: as they are.
            outs: One for each table.
            fault: Where a bad id is told.
            stream: Where it runs.
        """
        count = ids.numel()
        given = (ids, 0 if order is None else order, count, tables[0].shape[0], fault)
        self._move("gather", given, tables, outs, count, stream, blocks=self._blocks, unroll=_UNROLL)

    def scatter(
        self,
        tables: Tensors,
        ids: torch.Tensor,
        order: torch.Tensor | None,
        values: Tensors,
        *,
        fault: torch.Tensor,
        stream: Stream,
        counts: torch.Tensor | None = None,
    ) -> None:
        """``table[ids[i]] = values[i]``: with ``order``, which sorts the ids, the last of equal ones; else distinct.

        Args:
            tables: Of the same length.
            ids: Rows.
            order: As for :meth:`gather`.
            values: One for each table.
            fault: Where a bad id is told.
            stream: Where it runs.
            counts: Numbers of such a table, float32, that grow by one for each of distinct ids.
        """
        count = ids.numel()
        given = (ids, 0 if order is None else order, count, tables[0].shape[0], fault, 0 if counts is None else counts)
        self._move("scatter", given, tables, values, count, stream, blocks=self._blocks)

    def add(
        self,
        table: torch.Tensor,
        ids: torch.Tensor,
        order: torch.Tensor,
        values: torch.Tensor,
        *,
        fault: torch.Tensor,
        stream: Stream,
    ) -> None:
        """``table[ids[i]] += values[i]``, for ``order`` that sorts the ids and keeps equal ones as they are."""
        count, width = ids.numel(), table.shape[1]
        args = (table, ids, order, values, count, width, table.shape[0], fault)
        self._launch(f"add_{_SUMMED[table.dtype]}", count * width, args, stream, blocks=self._blocks)

    @staticmethod
    def can_add(dtype: torch.dtype) -> bool:
        """Whether there is an adding kernel for ``dtype``."""
        return dtype in _SUMMED

    # On the device

    def patch(self, rows: Tensors, ids: torch.Tensor, others: Tensors, keys: torch.Tensor, *, stream: Stream) -> None:
        """``rows[i] = others[j]`` where ``ids[i]`` is the first time in ``keys[j]``, which ascend."""
        count = ids.numel()
        given = (ids, count, keys, keys.numel())
        name = f"patch_{keys.dtype.itemsize}"
        self._move(name, given, rows, others, count, stream, blocks=_BLOCKS_ON_DEVICE)

    def keys(
        self, ids: torch.Tensor, rows: int, *, fault: torch.Tensor | None, device: Device, stream: Stream
    ) -> torch.Tensor:
        """What sorts ``ids`` of a table of so many rows: half as wide where that is enough, which halves the sort.

        Args:
            ids: Rows; int32: keys already.
            rows: Of the table.
            fault: Where a bad id is told; None: it is found later.
            device: Of the kernels.
            stream: Where it runs.
        """
        if rows > NO_KEY or ids.dtype is torch.int32:
            return ids
        count = ids.numel()
        keys = device.empty(torch.Size((count,)), (1,), torch.int32)
        self._launch_here("narrow", count, (ids, keys, count, rows, 0 if fault is None else fault), stream)
        return keys

    def distinct(
        self, ids: torch.Tensor, shape: tuple[int, ...], rows: int, *, fault: torch.Tensor, device: Device
    ) -> Distinct:
        """The distinct ids of at least one id; a bad one is told, and counts as PAD.

        Args:
            ids: Rows, or what sorts them.
            shape: Of the batch.
            rows: Of the table.
            fault: Where a bad id is told.
            device: Of the kernels.
        """
        count, stream = ids.numel(), device.current_stream()
        keys = self.keys(ids, rows, fault=fault, device=device, stream=stream)
        device.before_kernels()
        ordered, order = torch.sort(keys, stable=True)  # stable: gradients are summed in the order of the batch
        room = device.empty(torch.Size((3 * count,)), (1,), torch.int64)  # one allocation for what lives as long
        found, spans = room.as_strided((count,), (1,)), room.as_strided((count,), (1,), count)
        inverse = room.as_strided(shape, _dense(shape), 2 * count)
        name = f"place_{ordered.dtype.itemsize}"
        self._launch_here(name, count, (ordered, order, count, found, inverse, spans), stream)
        index = Index(found, (count,), resident=True, is_distinct=True, keys=ordered)
        return Distinct(index, inverse, Places(order, spans))

    def total(self, values: torch.Tensor, places: Places, *, device: Device) -> torch.Tensor:
        """The sum of ``values`` [..., dim] for each distinct id, in the order of the batch; zeros for PAD.

        Returns:
            [ids, dim].
        """
        width = values.shape[-1]
        count = places.order.numel()
        name, stream = _TOTALLED[values.dtype], device.current_stream()
        out = device.empty(torch.Size((count, width)), (width, 1), values.dtype)
        parts = device.empty(torch.Size((2 * -(-count // PART), width)), (width, 1), values.dtype)
        given = (places.spans, count, width)
        self._launch_here(f"parts_{name}", count * width, (values, places.order, *given, parts, out), stream)
        self._launch_here(f"totals_{name}", count * width, (parts, *given, out), stream)
        return out

    @staticmethod
    def can_total(dtype: torch.dtype) -> bool:
        """Whether there is a kernel that sums up values of ``dtype`` by row."""
        return dtype in _TOTALLED

    # Launching

    def _move(  # noqa: PLR0917 - what all of them have
        self,
        name: str,
        given: tuple[object, ...],
        tables: Tensors,
        rows: Tensors,
        count: int,
        stream: Stream,
        *,
        blocks: int,
        unroll: int = 1,
    ) -> None:
        """One launch for up to MOST_TABLES tables."""
        if len(tables) > MOST_TABLES:
            for some in (slice(MOST_TABLES), slice(MOST_TABLES, None)):
                self._move(name, given, tables[some], rows[some], count, stream, blocks=blocks, unroll=unroll)
            return
        args: list[object] = [*given, len(tables)]
        widest = 0
        for table, row in zip(tables, rows, strict=True):
            nbytes = table.shape[1] * table.itemsize
            size = _PIECES[(nbytes | table.data_ptr() | row.data_ptr()) & 15]
            width = nbytes // size
            args += (table, row, width, size)
            widest = max(widest, width)
        args += _NONE[len(tables)]
        self._launch(name, count * widest, tuple(args), stream, blocks=blocks, unroll=unroll)

    def _launch_here(self, name: str, pieces: int, args: tuple[object, ...], stream: Stream) -> None:
        self._launch(name, pieces, args, stream, blocks=_BLOCKS_ON_DEVICE)

    def _launch(
        self, name: str, pieces: int, args: tuple[object, ...], stream: Stream, *, blocks: int, unroll: int = 1
    ) -> None:
        self._kernels[name](stream, max(1, min(blocks, -(-pieces // (_THREADS * unroll)))), _THREADS, args)


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    return tuple(strides)


_UNKNOWN: Any = object()
_compiled: weakref.WeakKeyDictionary[Device, RowKernels | None] = weakref.WeakKeyDictionary()
