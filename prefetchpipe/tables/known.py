"""Which state an optimizer class turned out to have, written beside its mapped files so that they are found again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch

__all__ = ["KnownStates"]

_FILE = "states.json"


class KnownStates:
    """The list of state tables in a folder, for classes whose state is not known before the first step.

    Args:
        folder: Where the mapped files are.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _FILE
        self._known: dict[str, tuple[str, bool]] = {}
        if self._path.exists():
            self._known = {
                name: (dtype, number) for name, (dtype, number) in json.loads(self._path.read_text()).items()
            }

    def read(self) -> Iterator[tuple[str, torch.dtype, bool]]:
        """Name, dtype, and whether it is one number a row, of each table that was made before."""
        for name, (dtype, is_number) in list(self._known.items()):
            yield name, getattr(torch, dtype), is_number

    def add(self, name: str, dtype: torch.dtype, *, is_number: bool) -> None:
        """A table was made."""
        entry = (str(dtype).removeprefix("torch."), is_number)
        if self._known.get(name) != entry:
            self._known[name] = entry
            self._path.write_text(json.dumps(self._known))
