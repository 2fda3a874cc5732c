"""The numbers of all rows of a table: one table of width 1 each."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from prefetchpipe.tables.table import HostTable

__all__ = ["TableColumns"]


class TableColumns:
    """Read and written by the host.

    Args:
        add: Called for a name that is new, with its dtype; makes a table.
    """

    def __init__(self, add: weakref.WeakMethod[Callable[..., None]]) -> None:
        self.tables: dict[str, HostTable] = {}
        self._add = add

    def read(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """[ids] each, in host memory."""
        return {name: table.host_tensor()[ids, 0] for name, table in self.tables.items()}

    def write(self, ids: torch.Tensor, values: Mapping[str, torch.Tensor]) -> None:
        """[ids] each; a name that is new gets a table."""
        for name, value in values.items():
            if name not in self.tables:
                add = self._add()
                assert add is not None
                add(name, value.dtype, is_number=True)
            self.tables[name].host_tensor()[ids, 0] = value
