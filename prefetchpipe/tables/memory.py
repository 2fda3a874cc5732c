"""Where the rows of a table are: page-locked memory, ordinary memory, or a mapped file."""

from __future__ import annotations

import ctypes
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prefetchpipe.device.base import Device, Event, HostBlock, Stream
from prefetchpipe.errors import PinnedMemoryError, PrefetchWarning
from prefetchpipe.memory.pinned import PinnedMemory

__all__ = ["HostRows", "Keeper", "Staging", "beside", "numpy_dtype"]

_NUMPY = {
    dtype: np.dtype(str(dtype).removeprefix("torch."))
    for dtype in (
        torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool,
    )
}  # fmt: skip


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """NumPy's dtype for ``dtype``; where it has none (bfloat16, float8), unsigned integers of the same width."""
    known = _NUMPY.get(dtype)
    return np.dtype(f"u{dtype.itemsize}") if known is None else known


def beside(path: Path) -> Path:
    """Where a file is written that then takes the place of ``path``."""
    return path.with_name(f"{path.name}.part")


class HostRows:
    """The memory of a table.

    Args:
        shape: Rows and width.
        dtype: Of the elements.
        device: Whose copy engine or kernels will read it.
        budget: Where page-locked memory comes from.
        path: A ``.npy`` file to map; made if it is not there.

    Attributes:
        tensor: All rows, a CPU tensor.
        pinned: The device can read and write the rows where they are.
        existed: The mapped file was there before, so its rows are kept.

    Raises:
        ValueError: The file at ``path`` holds something else.
    """

    def __init__(
        self, shape: tuple[int, int], dtype: torch.dtype, device: Device, budget: PinnedMemory, path: Any
    ) -> None:
        self.existed = False
        self._budget = budget
        self._block: HostBlock | None = None
        self._mapped: np.memmap[Any, Any] | None = None
        self._path: Path | None = None
        self._part: Path | None = None
        nbytes = shape[0] * shape[1] * dtype.itemsize
        with torch.inference_mode(False):
            if path is not None:
                self.tensor = self._map(Path(path), shape, dtype)
            elif nbytes and device.staged:
                self.tensor = self._pin(nbytes).view(dtype).view(shape)
            else:
                self.tensor = torch.empty(shape, dtype=dtype, device="cpu")
        self.pinned = self._block is not None

    def _pin(self, nbytes: int) -> torch.Tensor:
        try:
            self._block = self._budget.alloc(nbytes)
        except PinnedMemoryError as refused:
            warnings.warn(
                f"the table's {nbytes} bytes cannot be page-locked ({refused}); it lives in ordinary memory and its "
                "rows go through a staging buffer, which is slower",
                PrefetchWarning,
                stacklevel=5,
            )
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return self._block.tensor

    def _map(self, path: Path, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        wanted = numpy_dtype(dtype)
        self._path = path = path.resolve()
        self.existed = path.exists()
        if not self.existed:
            self._part = beside(path)
            mapped = np.lib.format.open_memmap(self._part, mode="w+", dtype=wanted, shape=shape)
        else:
            try:
                mapped = np.lib.format.open_memmap(path, mode="r+")
            except (ValueError, OSError) as error:
                raise ValueError(f"path={str(path)!r} is no .npy file that can be mapped: {error}") from error
            if mapped.shape != shape or mapped.dtype != wanted or not mapped.flags.c_contiguous:
                raise ValueError(
                    f"path={str(path)!r} holds {mapped.dtype} of shape {mapped.shape}, not {wanted} of shape {shape}"
                )
        self._mapped = mapped
        return torch.from_numpy(mapped.view(np.ndarray)).view(dtype)

    @property
    def are_zeros(self) -> bool:
        """A new file: nothing needs to be written for it to read as zeros, and it takes no room on the disk yet."""
        return self._part is not None

    def publish(self) -> None:
        """A new file is filled: from here on it is there. Until then, an error or a kill leaves no half of a table."""
        part, self._part = self._part, None
        if part is not None:
            assert self._path is not None
            part.replace(self._path)

    def discard(self) -> None:
        """A new file could not be filled."""
        part, self._part = self._part, None
        if part is not None:
            part.unlink()

    def is_mapped_from(self, path: Path) -> bool:
        """Whether ``path`` is the file that holds these rows."""
        try:
            return self._mapped is not None and self._path is not None and self._path.samefile(path)
        except FileNotFoundError:
            return False

    def flush(self) -> None:
        """Write changed pages of a mapped file to disk."""
        if self._mapped is not None:
            self._mapped.flush()

    def free(self) -> None:
        """Give page-locked memory back; nothing on the device may be using it any more (contract 6)."""
        self.tensor = torch.empty((0, self.tensor.shape[1]), dtype=self.tensor.dtype, device="cpu")
        self._mapped = None
        block, self._block = self._block, None
        if block is not None:
            self._budget.free(block)


class Staging:
    """One block that rows pass through, and the event of the last copy in or out of it.

    Args:
        device: Whose events say when the block is free.
        budget: Where page-locked memory comes from; when it is used up the block is ordinary memory.
    """

    __slots__ = ("_block", "_budget", "_device", "_event", "_is_used", "_part", "_tensor")

    def __init__(self, device: Device, budget: PinnedMemory) -> None:
        self._device = device
        self._budget = budget
        self._block: HostBlock | None = None
        self._tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._part = self._tensor
        self._event: Event = device.new_event()
        self._is_used = False

    def acquire(self, nbytes: int) -> torch.Tensor:
        """``nbytes`` of it, flat ``uint8``; blocks until its last copy has passed."""
        self.wait()
        if self._tensor.numel() < nbytes:
            self._grow(nbytes)
        if self._part.numel() != nbytes:
            self._part = self._tensor[:nbytes]  # batches mostly have one size, and a slice takes its time
        return self._part

    def _grow(self, nbytes: int) -> None:
        self.free()
        with torch.inference_mode(False):
            try:
                self._block = self._budget.alloc(nbytes)
            except PinnedMemoryError:  # the table has warned, or its budget says so on purpose
                self._tensor = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            else:
                self._tensor = self._block.tensor

    def leave(self, stream: Stream) -> None:
        """A copy in or out is queued on ``stream``."""
        self._device.record(self._event, stream)
        self._is_used = True

    def wait(self) -> None:
        """Block until the last copy in or out has passed."""
        if self._is_used:
            self._device.synchronize(self._event)  # contract 6: the copy may still be running
            self._is_used = False

    def free(self) -> None:
        """Wait, then give the memory back."""
        self.wait()
        self._tensor = self._part = torch.empty(0, dtype=torch.uint8, device="cpu")
        block, self._block = self._block, None
        if block is not None:
            self._budget.free(block)


class Keeper:
    """Held by the table and by every view of its rows; when it goes, the memory does."""

    def view_of(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` once more, as a tensor that holds this object."""
        if not rows.numel():
            return rows
        with torch.inference_mode(False):
            buffer = (ctypes.c_uint8 * (rows.numel() * rows.dtype.itemsize)).from_address(rows.data_ptr())
            buffer.keeper = self  # type: ignore[attr-defined]
            return torch.frombuffer(buffer, dtype=torch.uint8).view(rows.dtype).view(rows.shape)
