"""Rows of the table. A module in here adds rows by having ``ROWS``, a tuple of :class:`Row` objects."""

from __future__ import annotations

import importlib
import pkgutil

from benchmarks.rows.base import Row

__all__ = ["GROUPS", "all_rows", "select"]

GROUPS = {
    "loader": "batches from one process",
    "workers": "DataLoader with worker processes",
    "scaling": "the same over the number of workers: 1, 2, 4, 8, 12",
    "measure": "what is not a time per batch",
    "race": "wrong batches",
    "ranks": "several processes on one host, a GPU each",
    "host": "from the GPU back, tables on the host",
}
_ORDER = list(GROUPS)


def all_rows() -> dict[str, Row]:
    """Every row by name, in the order of :data:`GROUPS`."""
    found: list[Row] = []
    for module in pkgutil.iter_modules(__path__):
        found.extend(getattr(importlib.import_module(f"{__name__}.{module.name}"), "ROWS", ()))
    return {row.name: row for row in sorted(found, key=lambda row: (_ORDER.index(row.group), row.rank))}


def select(names: list[str]) -> list[Row]:
    """Rows by name or by group; ``all`` is every row.

    Raises:
        ValueError: A name is neither.
    """
    rows = all_rows()
    chosen: dict[str, Row] = {}
    for name in names:
        matching = {key: row for key, row in rows.items() if name in (key, row.group, "all")}
        if not matching:
            raise ValueError(f"no row or group {name!r}; rows: {', '.join(rows)}; groups: {', '.join(GROUPS)}, all")
        chosen |= matching
    return list(chosen.values())
