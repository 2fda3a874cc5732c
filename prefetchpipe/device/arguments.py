"""The arguments of a kernel launch as the driver takes them, in memory that is used again."""

from __future__ import annotations

import ctypes
from struct import Struct
from typing import Any

__all__ = ["Arguments"]


class Arguments:
    """Values of eight bytes each, and an array of their addresses: making the two costs more than filling them.

    Args:
        count: Arguments of the kernel.

    Attributes:
        address: Of the array of addresses.
    """

    __slots__ = ("_params", "_values", "_write", "address")

    _free: dict[int, list[Arguments]] = {}  # noqa: RUF012 - one for the process

    def __init__(self, count: int) -> None:
        self._values = (ctypes.c_longlong * count)()
        start = ctypes.addressof(self._values)
        self._params = (ctypes.c_void_p * count)(*range(start, start + 8 * count, 8))
        self._write = Struct(f"{count}q").pack_into
        self.address = ctypes.addressof(self._params)

    @classmethod
    def of(cls, args: tuple[Any, ...]) -> Arguments:
        """``args`` (tensors stand for their addresses), until :meth:`leave`; of this call alone till then."""
        free = cls._free.get(len(args))
        try:
            made = free.pop() if free else cls(len(args))
        except IndexError:  # another thread took the last one
            made = cls(len(args))
        made._write(made._values, 0, *[a if type(a) is int else a.data_ptr() for a in args])
        return made

    def leave(self) -> None:
        """The driver has read them."""
        self._free.setdefault(len(self._values), []).append(self)
