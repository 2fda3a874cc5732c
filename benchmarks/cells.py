"""All contenders of one row under one regime, taking turns."""

from __future__ import annotations

import dataclasses
import gc
import math
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.compute import Step
from benchmarks.contenders import Contender, Prepared
from benchmarks.measure import interleaved, seconds_per_step
from benchmarks.rows.base import Context, LoaderRow
from benchmarks.schema import Cell
from benchmarks.sources import Source

__all__ = ["Cells"]

_WARM_MS = 1000.0
"""A loader that needs longer than this for the untimed steps has nothing to warm up: one step is enough."""


@dataclass
class _Entry:
    cell: Cell
    source: Source
    prepared: Prepared
    warm: int


class Cells:
    """Times contenders against each other; what one of them raises ends its part alone.

    Args:
        row: Whose batches.
        step: Work per batch.
        context: Device, options, progress.
        regime: For the progress.
    """

    def __init__(self, row: LoaderRow, step: Step, context: Context, regime: str) -> None:
        self._row, self._step, self._context, self._regime = row, step, context, regime
        self._warm, self._tail = row.window(context.env)
        self._entries: dict[str, _Entry] = {}
        self._cells: dict[str, Cell] = {}

    def run(self, contenders: list[Contender], repeats: int) -> list[Cell]:
        """Prepare, calibrate and time ``contenders``."""
        try:
            for contender in contenders:
                self._cells[contender.name] = Cell(contender.name)
                try:
                    self._prepare(contender)
                except Exception as error:
                    self._failed(contender.name, error)
            ready = {name: self._timed(name) for name in self._entries if self._cells[name].error is None}
            for name, taken in interleaved(ready, repeats, failed=self._failed).items():
                self._cells[name].ms = taken
                stats = self._entries[name].prepared.stats
                self._cells[name].stats = _plain(stats()) if stats is not None else None
        finally:
            self._close()
        medians = {name: cell.median for name, cell in self._cells.items()}
        said = ", ".join(f"{name} {median:.3f}" for name, median in medians.items() if median is not None)
        self._context.progress.say(f"{self._row.name}  {self._regime}  ms: {said}")
        return list(self._cells.values())

    def _prepare(self, contender: Contender) -> None:
        """Untimed passes: allocators, caches and worker processes get warm, and the window finds its length."""
        row, env, seconds = self._row, self._context.env, self._context.options.seconds
        source, cell = row.source(env), self._cells[contender.name]
        source.set_steps(self._warm + row.least + self._tail)
        entry = _Entry(cell, source, contender.prepare(source, env), min(self._warm, row.least))
        self._entries[contender.name] = entry
        ms = self._measure(entry, row.least)
        entry.warm = self._warm if self._warm * ms < _WARM_MS else 1
        if ms * row.least < seconds * 1e3:
            ms = min(ms, self._measure(entry, self._steps(ms, seconds / 2)))
        cell.steps = self._steps(ms, seconds)

    def _measure(self, entry: _Entry, steps: int) -> float:
        self._context.watch()
        entry.source.set_steps(entry.warm + steps + self._tail)
        return 1e3 * seconds_per_step(
            entry.prepared.batches,
            self._step,
            self._context.env.synchronize,
            warm=entry.warm,
            steps=steps,
            drain=self._row.drain,
        )

    def _timed(self, name: str) -> Any:
        entry = self._entries[name]
        return lambda: self._measure(entry, entry.cell.steps)

    def _steps(self, ms: float, seconds: float) -> int:
        return max(self._row.least, min(math.ceil(seconds * 1e3 / max(ms, 1e-3)), self._row.most))

    def _failed(self, name: str, error: Exception) -> None:
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"[:500]
        self._cells[name].error = text
        self._context.progress.say(f"{self._row.name}  {self._regime}  {name}: {text}", style="red")

    def _close(self) -> None:
        for entry in self._entries.values():
            if entry.prepared.close is not None:
                entry.prepared.close()
        self._entries.clear()
        gc.collect()
        if self._context.env.cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def _plain(stats: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(stats) and not isinstance(stats, type):
        return dataclasses.asdict(stats)
    return dict(stats) if isinstance(stats, dict) else dict(vars(stats))
