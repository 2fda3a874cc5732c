"""What a results file holds. One JSON file is one run on one machine; times of different files are never mixed."""

from __future__ import annotations

import dataclasses
import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "OURS",
    "SCHEMA",
    "TUNED_PLAIN",
    "Cell",
    "RaceCount",
    "Regime",
    "Result",
    "RowResult",
    "Value",
    "load",
    "newest",
    "save",
]

SCHEMA = 1
OURS = "prefetchpipe"
"""Contenders whose name starts with this are ours, the others are peers."""
TUNED_PLAIN = ("plain", "pinned", "pinned-loader")
"""The tuned plain loop is the fastest of these."""


@dataclass
class Cell:
    """One contender in one row and regime.

    Attributes:
        contender: Its name.
        steps: Batches in each timed window.
        ms: Milliseconds per batch, one number per repeat, in the order taken.
        error: Why there are no (more) times.
        stats: What the contender says about itself after the last repeat.
    """

    contender: str
    steps: int = 0
    ms: list[float] = field(default_factory=list)
    error: str | None = None
    stats: dict[str, Any] | None = None

    @property
    def ours(self) -> bool:
        """Whether this is prefetchpipe or a variant of it."""
        return self.contender.startswith(OURS)

    @property
    def median(self) -> float | None:
        """Median milliseconds per batch, ``None`` without times."""
        return statistics.median(self.ms) if self.ms else None

    @property
    def spread(self) -> float | None:
        """(largest - smallest) / median."""
        return (max(self.ms) - min(self.ms)) / statistics.median(self.ms) if self.ms else None


@dataclass
class Regime:
    """All contenders of a row under one amount of compute per step.

    Attributes:
        name: ``transfer``, ``balanced`` or ``compute``.
        compute_ms: The step function alone on a batch that stays on the device.
        ideal_ms: The yardstick: no loop can be faster than the largest of its parts.
        ideal_is: Which part that is.
    """

    name: str
    compute_ms: float
    ideal_ms: float
    ideal_is: str
    cells: list[Cell] = field(default_factory=list)

    def cell(self, contender: str) -> Cell | None:
        """The cell of ``contender``, if it took part."""
        return next((cell for cell in self.cells if cell.contender == contender), None)


@dataclass
class RaceCount:
    """Wrong batches of one contender when the GPU is slow and the CPU runs ahead."""

    row: str
    contender: str
    variant: str = ""
    wrong: int | None = None
    of: int = 0
    error: str | None = None


@dataclass
class Value:
    """A measurement that is not a time per batch."""

    name: str
    value: float | None
    unit: str
    target: str = ""
    ok: bool | None = None
    raw: list[float] = field(default_factory=list)
    note: str = ""


@dataclass
class RowResult:
    """One row of the table.

    Attributes:
        left_out: Contender to reason, for contenders that cannot or need not take part here.
        parts: Named milliseconds that the yardstick is made of (link, source alone, packing).
    """

    name: str
    title: str = ""
    source: str = ""
    batch_bytes: int = 0
    leaves: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    regimes: list[Regime] = field(default_factory=list)
    race: list[RaceCount] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0

    def wrong(self, contender: str) -> int | None:
        """Wrong batches of ``contender`` in this row's race, the worst of its variants; ``None``: not checked."""
        counts = [c.wrong for c in self.race if c.contender == contender and c.wrong is not None]
        return max(counts) if counts else None

    def right(self, contender: str) -> bool:
        """Whether ``contender`` went through this row's race without a wrong batch or an error, or had none to run."""
        return not any(count.wrong or count.error for count in self.race if count.contender == contender)

    def tuned_plain(self, regime: Regime) -> Cell | None:
        """The fastest loop with torch alone and no index by hand."""
        plain = [c for c in regime.cells if c.contender in TUNED_PLAIN and c.median is not None]
        return min(plain, key=lambda cell: cell.median or 0.0, default=None)

    def best_right_peer(self, regime: Regime) -> Cell | None:
        """The fastest peer that is right."""
        right = [c for c in regime.cells if not c.ours and c.median is not None and self.right(c.contender)]
        return min(right, key=lambda cell: cell.median or 0.0, default=None)


@dataclass
class Result:
    """A whole run."""

    date: str
    command: list[str]
    machine: dict[str, Any]
    versions: dict[str, str]
    git_commit: str
    limits: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    rows: list[RowResult] = field(default_factory=list)
    seconds: float = 0.0
    complete: bool = False
    schema: int = SCHEMA

    def row(self, name: str) -> RowResult | None:
        """The row called ``name``, if it was run."""
        return next((row for row in self.rows if row.name == name), None)


def save(result: Result, path: Path) -> None:
    """Write ``result`` as JSON; a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(path.suffix + ".part")
    partial.write_text(json.dumps(dataclasses.asdict(result), indent=1, default=str) + "\n", encoding="utf-8")
    partial.replace(path)


def load(path: Path) -> Result:
    """Read a results file.

    Raises:
        ValueError: The file has another schema version, or lacks a field.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    if data.get("schema") != SCHEMA:
        raise ValueError(f"{path} has schema {data.get('schema')!r}; this code reads schema {SCHEMA}")
    try:
        rows = [_row(row) for row in data.pop("rows")]
        return Result(rows=rows, **data)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is no results file: {error}") from error


def newest(folder: Path) -> Path | None:
    """The complete results file with the latest date inside; runs that are quick or have no times are left aside."""
    dated = []
    for path in folder.glob("*.json"):
        data = json.loads(path.read_text(encoding="utf-8"))
        timed = any(row.get("regimes") for row in data.get("rows", ()))
        if data.get("schema") == SCHEMA and data.get("complete") and timed and not data["machine"].get("quick"):
            dated.append((data["date"], path))
    return max(dated)[1] if dated else None


def _row(data: dict[str, Any]) -> RowResult:
    regimes = [
        Regime(**{**regime, "cells": [Cell(**cell) for cell in regime["cells"]]}) for regime in data.pop("regimes")
    ]
    race = [RaceCount(**count) for count in data.pop("race")]
    values = [Value(**value) for value in data.pop("values")]
    return RowResult(regimes=regimes, race=race, values=values, **data)
