"""Row ids: what is taken as an index, and how it is checked before any byte moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from prefetchpipe.batch.move import array_to_tensor
from prefetchpipe.device.base import Device

__all__ = ["FEW_IDS", "PAD", "Index", "check_range", "out_of_range", "read_index"]

PAD = (1 << 63) - 1
"""Stands between the distinct ids where their number is known to the device only: no row at all."""

FEW_IDS = 1 << 17
"""Up to here NumPy looks at ids, in this thread: torch wakes others from 32,768 on, for some 10 us of work, and on a
busy machine of many cores waits long for the last of them (docs/performance.md)."""

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(slots=True, eq=False)  # not frozen: one is made for every batch, at twice the cost then
class Index:
    """Row ids, flat.

    Attributes:
        ids: int64, one dimension, contiguous.
        shape: As the caller gave them.
        resident: They are on the table's device. Otherwise they are in host memory, and their range has been checked.
        is_distinct: They are the distinct ids of some other index, so their positions say nothing to its user.
        keys: What ascends, where distinct ids have PAD between them: each stands where its first key does.
    """

    ids: torch.Tensor
    shape: tuple[int, ...]
    resident: bool
    is_distinct: bool = False
    keys: torch.Tensor | None = None

    @property
    def ascending(self) -> torch.Tensor:
        """The keys; of ids that ascend, themselves."""
        return self.ids if self.keys is None else self.keys

    def __len__(self) -> int:
        return self.ids.numel()


def read_index(index: Any, rows: int, device: Device) -> Index:
    """Take ``index`` as row ids of a table of ``rows`` rows.

    Args:
        index: Integers of any shape: a tensor in host memory or on ``device``, a NumPy array, a sequence, one int.
        rows: Rows of the table.
        device: The table's.

    Raises:
        TypeError: Not integers; bool and float are none.
        ValueError: A tensor on another device.
        IndexError: An id in host memory is out of range.
    """
    tensor = _as_tensor(index)
    shape = tuple(tensor.shape)
    if device.is_resident(tensor):
        if tensor.dtype is not torch.int64:
            device.before_kernels()
        return Index(_flat(tensor), shape, resident=True)
    if tensor.device.type != "cpu":
        raise ValueError(f"index is on {tensor.device}; allowed: host memory or {device!r}")
    ids = _flat(tensor)
    check_range(ids, rows, shape)
    return Index(ids, shape, resident=False)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype is not torch.int64 or not tensor.is_contiguous():
        tensor = tensor.to(torch.int64).contiguous()
    return tensor.view(-1)


def check_range(ids: torch.Tensor, rows: int, shape: tuple[int, ...]) -> None:
    """Ids in host memory: from 0 to ``rows - 1``, or an ``IndexError`` that names the first that is not."""
    if not ids.numel():
        return
    if ids.numel() <= FEW_IDS:
        array = ids.numpy()
        if int(array.view(np.uint64).max()) < rows:  # a negative one is very large then
            return
    else:
        low, high = torch.aminmax(ids)
        if int(low) >= 0 and int(high) < rows:
            return
    position = int(((ids < 0) | (ids >= rows)).nonzero()[0])
    raise out_of_range(int(ids[position]), position, rows, shape)


def out_of_range(value: int, position: int | None, rows: int, shape: tuple[int, ...] | None) -> IndexError:
    """The error for one id.

    Args:
        value: The id.
        position: Where it stands in the flat index; None if that is not known.
        rows: Rows of the table.
        shape: Shape of the index; None if it is not known any more.
    """
    where = position if shape is None or position is None else tuple(map(int, np.unravel_index(position, shape)))
    allowed = f"0 to {rows - 1}" if rows else "none, the table has no rows"
    if isinstance(where, tuple) and len(where) == 1:
        where = where[0]
    place = "" if where is None else f" at position {where}"
    return IndexError(
        f"index {value}{place} is out of range for a table of {rows} rows; allowed: {allowed} "
        "(negative ids do not count from the end)"
    )


def _as_tensor(index: Any) -> torch.Tensor:
    if isinstance(index, torch.Tensor):
        if index.dtype not in _INTEGERS:
            raise TypeError(f"index must be integers, not {index.dtype}")
        return index
    array = np.asarray(index)
    if array.size == 0 and not isinstance(index, (np.ndarray, np.generic)):
        array = array.astype(np.int64)  # an empty list says nothing about its type
    if array.dtype.kind not in "iu":
        raise TypeError(f"index must be integers, not {array.dtype} (a {type(index).__name__})")
    if array.dtype.kind == "u" and array.dtype.itemsize == 8 and array.size and int(array.max()) >= PAD:  # noqa: PLR2004
        position = int(array.argmax())
        raise IndexError(f"index {int(array.max())} at position {position} is out of range for any table")
    tensor = array_to_tensor(array.astype(np.int64, copy=False))
    assert tensor is not None
    return tensor
