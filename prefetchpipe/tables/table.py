"""``HostTable``: a matrix in host memory whose rows are read and written by the device."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from prefetchpipe.device import portable, resolve
from prefetchpipe.device.base import Device, Event
from prefetchpipe.memory.pinned import PinnedMemory
from prefetchpipe.options import whole
from prefetchpipe.tables.ahead import RowsAhead
from prefetchpipe.tables.distinct import Distinct
from prefetchpipe.tables.files import read_rows, save_rows
from prefetchpipe.tables.index import Index, read_index
from prefetchpipe.tables.initial import Init, as_values, fill_rows
from prefetchpipe.tables.memory import HostRows, Keeper
from prefetchpipe.tables.movers import ClosedMover, Mover, make_mover, write_rows

__all__ = ["HostTable"]


class HostTable:
    """``num_rows`` x ``dim`` values in host memory, with rows gathered to the device and scattered back by index.

    Work goes to the stream that is current in the calling thread. Order is kept by events of this table: a gather
    after a scatter sees it, whatever streams the two ran on, and a host read waits for what is outstanding here (and
    on tables that an optimizer steps together with this one), never for the device. Methods may be called from any
    thread.

    **Index**: integers of any shape (tensor in host memory or on the device, NumPy array, sequence, int). Ids count
    from 0; negative ids are errors, they do not count from the end. Ids in host memory are checked before any byte
    moves. Ids on the device of a page-locked table are checked there, without a wait: a bad one reads as zeros and is
    not written, and the ``IndexError`` is raised by the next call on this table after the device has got there, at the
    latest by the next host read, :meth:`synchronize` or :meth:`save`. The id 2**63 - 1 is padding there: it reads as
    zeros and is not written, without an error. (Where there are no kernels, without CuPy or
    with a table in ordinary memory, ids on the device are brought to the host, which waits, and are checked there.)

    **Repeated ids**: :meth:`scatter` keeps the last occurrence, :meth:`scatter_add` adds all of them in their order, on
    every path.

    Args:
        num_rows: Rows, at least 0.
        dim: Values a row, at least 1.
        dtype: Of the values.
        device: Where rows go, as for :class:`prefetchpipe.GPUPrefetcher`.
        init: None or ``"zeros"``; a callable that fills the CPU tensor it is given, such as
            ``torch.nn.init.normal_``; or a tensor or array of shape [num_rows, dim].
        path: A ``.npy`` file that is mapped and holds the rows, for tables larger than memory. If it is there its rows
            are kept, and ``init`` must be None. A new one appears when ``init`` is done.
        max_pinned_bytes: Upper bound for the page-locked memory of this table, staging included. A table that does not
            fit lives in ordinary memory, with one warning.

    Attributes:
        shape: (num_rows, dim).
        dtype: Of the values.
        device: Where rows go.
        where: The device's object, for the package itself.
        pinned: Whether the device reads and writes the rows where they are.
        version: Counts the writes.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: An argument has a value that is not allowed, or ``path`` holds another table.

    Example:
        >>> table = HostTable(5, 2, device="cpu")
        >>> table.scatter([1, 3, 1], torch.tensor([[1.0, 1.0], [3.0, 3.0], [9.0, 9.0]]))
        >>> table.gather([[1], [3]]).tolist()
        [[[9.0, 9.0]], [[3.0, 3.0]]]
        >>> table[1:2]
        array([[9., 9.]], dtype=float32)
    """

    def __init__(
        self,
        num_rows: int,
        dim: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device | Device | None = None,
        init: Init = None,
        *,
        path: str | os.PathLike[str] | None = None,
        max_pinned_bytes: int | None = None,
    ) -> None:
        whole("num_rows", num_rows, minimum=0)
        whole("dim", dim, minimum=1)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, not {dtype!r}")
        if max_pinned_bytes is not None:
            whole("max_pinned_bytes", max_pinned_bytes, minimum=0)
        if isinstance(init, str) and init != "zeros":
            raise ValueError(f"init must be None, 'zeros', a callable, a tensor or an array, not {init!r}")
        self.where = resolve(device)
        self.shape = (num_rows, dim)
        self.dtype = dtype
        self.device = self.where.torch_device
        self.version = 0
        with torch.no_grad(), self.where.beside_captures():
            budget = PinnedMemory(self.where, max_pinned_bytes)
            self._rows = HostRows(self.shape, dtype, self.where, budget, path)
            if self._rows.existed and init is not None:
                raise ValueError(f"init must be None: path={str(path)!r} is there, and its rows are kept")
            if not self._rows.existed:
                self._fill(init)
            self._mover: Mover = make_mover(self._rows, self.where, budget)
        self.pinned = self._rows.pinned
        self._handover = self.where.new_event()
        self._idle: list[Event] = []
        self._ahead: list[weakref.ref[RowsAhead]] = []
        # Reentrant: the collector may close another table in here.
        self._lock = threading.RLock()
        self._keeper = Keeper()
        self._finalizer = weakref.finalize(self._keeper, _close, self._rows, self._mover, self.where, os.getpid())

    def _fill(self, init: Init) -> None:
        try:
            if not (self._rows.are_zeros and (init is None or isinstance(init, str))):
                fill_rows(self._rows.tensor, init)
        except BaseException:
            self._rows.discard()
            raise
        self._rows.publish()

    # Rows to the device and back

    def gather(self, index: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        """Rows by index.

        Args:
            index: Row ids of any shape.
            out: Where to put them: [*index.shape, dim], this dtype, dense, on the device.

        Returns:
            [*index.shape, dim] on the device, ordered on the current stream. It belongs to the caller.

        Raises:
            IndexError: See the class.
            TypeError: The index is not made of integers.
            ValueError: ``out`` does not fit.
        """
        with self._lock, torch.no_grad(), self.where.beside_captures():
            self._mover.poll()
            found = read_index(index, self.shape[0], self.where)
            if out is not None:
                self._check("out", out, found)
                if self.where.staged != self.where.is_resident(out) or out.device != self.device:
                    raise ValueError(f"out must be on {self.where!r}, not {out.device}")
                if not out.is_contiguous():
                    raise ValueError(f"out must be contiguous; its strides are {out.stride()}")
            return self.gather_rows(found, out).view(*found.shape, self.shape[1])

    def gather_rows(self, index: Index, out: torch.Tensor | None = None) -> torch.Tensor:
        """As :meth:`gather`, for a checked index: [ids, dim]."""
        with self._lock:
            placed = self._mover.place(index)
            if out is None:
                out = self.where.empty(torch.Size((len(index), self.shape[1])), (self.shape[1], 1), self.dtype)
            rows = out.view(len(index), self.shape[1])
            self._mover.gather(placed, rows)
            return rows

    def scatter(self, index: Any, values: Any, *, unique: bool = False) -> None:
        """Write rows by index; of repeated ids the last occurrence stays.

        Args:
            index: Row ids of any shape.
            values: [*index.shape, dim] of this dtype, on the device or in host memory, with any strides. Values in host
                memory are written by the host, which waits for what is outstanding on this table.
            unique: A promise that no id occurs twice, which saves a sort. If it does, either may stay.

        Raises:
            IndexError: See the class; nothing has been written then if the index is in host memory.
            TypeError: The index is not made of integers.
            ValueError: ``values`` does not fit; nothing has been written.
        """
        self._write(index, values, "scatter", unique=unique)

    def scatter_add(self, index: Any, values: Any) -> None:
        """Add to rows by index; repeated ids add up, in their order.

        Deterministic on the CPU and on the device: one thread adds all occurrences of an id. (float16, bfloat16 and
        other dtypes without a kernel are added by the host, which waits for the current stream.)

        Args:
            index: Row ids of any shape.
            values: [*index.shape, dim] of this dtype, on the device or in host memory, with any strides.

        Raises:
            IndexError: As for :meth:`scatter`.
            TypeError: As for :meth:`scatter`.
            ValueError: As for :meth:`scatter`.
        """
        self._write(index, values, "add", unique=False)

    def _write(self, index: Any, values: Any, how: str, *, unique: bool) -> None:
        with self._lock, torch.no_grad(), self.where.beside_captures():
            self._mover.poll()
            found = read_index(index, self.shape[0], self.where)
            values = as_values(values)
            self._check("values", values, found)
            self._invalidate()
            if values.device.type == "cpu" and not self.where.is_resident(values):
                self._write_here(found, values, how, unique=unique)
                return
            if values.device != self.device:
                raise ValueError(f"values must be in host memory or on {self.where!r}, not on {values.device}")
            if not values.is_contiguous():
                self.where.before_kernels()
                values = values.contiguous()
                if not self.where.is_resident(values):
                    self._write_here(found, values, how, unique=unique)
                    return
            placed = self._mover.place(found)
            rows = values.view(len(found), self.shape[1])
            if how == "add":
                self._mover.add(placed, rows)
            else:
                self._mover.scatter(placed, rows, unique=unique)

    def _write_here(self, index: Index, values: torch.Tensor, how: str, *, unique: bool) -> None:
        """Values in host memory: the host writes them itself, once nobody is reading or writing the rows."""
        if index.resident:
            ids = index.ids
            self.where.before_kernels()
            index = read_index(ids.cpu().clone().view(index.shape), self.shape[0], self.where)
        self._mover.settle()
        if not len(index):
            return
        rows = values.contiguous().view(len(index), self.shape[1])
        if how == "add":
            self._rows.tensor.index_add_(0, index.ids, rows)
        else:
            write_rows(self._rows.tensor, index.ids, rows, unique=unique)

    def _check(self, name: str, values: torch.Tensor, index: Index) -> None:
        wanted = (*index.shape, self.shape[1])
        if tuple(values.shape) != wanted:
            raise ValueError(f"{name} must have shape {wanted} (index shape and dim), not {tuple(values.shape)}")
        if values.dtype is not self.dtype:
            raise ValueError(f"{name} must be {self.dtype} as the table, not {values.dtype}")

    # Ahead of use

    @property
    def ids_on_device(self) -> bool:
        """Whether ids that are on the device are used there, without a wait of the host."""
        return self._mover.on_device

    def place(self, index: Index) -> Index:
        """``index`` where this table uses it: on the device, or in host memory."""
        with self._lock:
            return self._mover.place(index)

    def distinct(self, index: Index) -> Distinct:
        """The distinct ids of a checked index, where this table uses them."""
        with self._lock:
            return self._mover.distinct(index)

    def _invalidate(self) -> None:
        self.version += 1
        for ref in self._ahead:
            ahead = ref()
            if ahead is not None:
                ahead.drop()

    # Reading and writing on the host

    def host_tensor(self) -> torch.Tensor:
        """All rows as a CPU tensor, without a copy.

        Waits for what is outstanding on this table. Later scatters show in it only after another call of this method;
        write into it only while none is outstanding. The rows live as long as it does, unless the table is closed.
        """
        with self._lock, torch.no_grad(), self.where.beside_captures():
            self._mover.settle()
            self._invalidate()  # the caller may write
            return self._keeper.view_of(self._rows.tensor)

    def numpy(self) -> np.ndarray[Any, Any]:
        """All rows as a NumPy array, without a copy; see :meth:`host_tensor`.

        Raises:
            TypeError: NumPy has no such dtype (bfloat16, float8).
        """
        return self.host_tensor().numpy()

    def __getitem__(self, key: Any) -> Any:
        return self.numpy()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.numpy()[key] = value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:  # noqa: FBT001 - NumPy's
        array = self.numpy()
        if copy or (dtype is not None and np.dtype(dtype) != array.dtype):
            return np.array(array, dtype=dtype)
        return array

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    def poll(self) -> None:
        """Raise what the device has found wrong with an index by now; never waits.

        Raises:
            IndexError: See the class.
            RuntimeError: The table was closed.
        """
        self._mover.poll()

    def synchronize(self) -> None:
        """Wait for what is outstanding on this table; raises what the device has found wrong with an index.

        Raises:
            IndexError: See the class.
        """
        with self._lock, torch.no_grad(), self.where.beside_captures():
            self._mover.settle()

    # Files, copies, the end

    def flush(self) -> None:
        """Write all rows of a mapped file to disk."""
        self.synchronize()
        self._rows.flush()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all rows to a ``.npy`` or ``.safetensors`` file, which takes the place of one that is there.

        Onto the very file that this table maps it is :meth:`flush`.

        Raises:
            ValueError: Another ending.
            ImportError: safetensors is not installed (extra ``tables``).
        """
        with self._lock:
            if self._rows.is_mapped_from(Path(path)):
                self.flush()
                return
            self.synchronize()
            save_rows(Path(path), self._rows.tensor)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        device: str | torch.device | Device | None = None,
        *,
        dtype: torch.dtype | None = None,
        max_pinned_bytes: int | None = None,
    ) -> Self:
        """A new table with the rows of a file that :meth:`save` wrote.

        Args:
            path: A ``.npy`` or ``.safetensors`` file with one matrix.
            device: Where rows go.
            dtype: Of the values, for a ``.npy`` file of a dtype that NumPy lacks; None: what the file says.
            max_pinned_bytes: As for the class.

        Raises:
            ValueError: Another ending, or no matrix in it.
        """
        rows = read_rows(Path(path), dtype)
        count, dim = rows.shape
        return cls(count, dim, rows.dtype, device, rows, max_pinned_bytes=max_pinned_bytes)

    def close(self) -> None:
        """Wait for what is outstanding, flush a mapped file, give the memory back. The table is empty afterwards.

        A later call that moves rows raises ``RuntimeError``.
        """
        with self._lock:
            self._finalizer()
            self._mover = ClosedMover(self._mover)
            self.shape = (0, self.shape[1])
            self._invalidate()

    def __repr__(self) -> str:
        kind = "pinned" if self.pinned else "pageable"
        return f"HostTable({self.shape[0]}, {self.shape[1]}, dtype={self.dtype}, device={self.where!r}, {kind})"

    def __reduce__(self) -> Any:
        return type(self), (*self.shape, self.dtype, portable(self.where), self.host_tensor().clone())


def _close(rows: HostRows, mover: Mover, device: Device, process: int) -> None:
    """Also at interpreter exit, so that a mapped file has its last rows; in a forked child nothing is touched."""
    if os.getpid() == process:
        with torch.no_grad(), device.beside_captures():
            mover.close()
            rows.flush()
            rows.free()
