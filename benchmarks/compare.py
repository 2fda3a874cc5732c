"""Two results files side by side."""

from __future__ import annotations

from benchmarks.schema import Cell, Result
from benchmarks.table import REGIMES

__all__ = ["compare"]


def compare(before: Result, after: Result) -> str:
    """Text: every cell that both have, with the ratio of medians, marked where the ranges do not overlap.

    Times of different runs are compared as ratios to ideal, since a machine's limits change from run to run.
    """
    lines = [
        f"before: {before.date} {before.git_commit} {before.machine.get('name', '')}",
        f"after:  {after.date} {after.git_commit} {after.machine.get('name', '')}",
        "",
        *(
            f"version of {name}: {old or 'none'} -> {new or 'none'}"
            for name, old, new in _changed_versions(before, after)
        ),
        f"{'row':16} {'regime':15} {'contender':24} {'before ms':>10} {'after ms':>10} {'ratio':>6} {'by ideal':>8}",
    ]
    for row in after.rows:
        old_row = before.row(row.name)
        if old_row is None:
            continue
        for regime in row.regimes:
            old_regime = next((r for r in old_row.regimes if r.name == regime.name), None)
            if old_regime is None:
                continue
            for cell in regime.cells:
                old = old_regime.cell(cell.contender)
                if old is None or not old.median or not cell.median:
                    continue
                ratio = cell.median / old.median
                ideal = old_regime.ideal_ms / regime.ideal_ms if old_regime.ideal_ms and regime.ideal_ms else 1.0
                lines.append(
                    f"{row.name:16} {REGIMES.get(regime.name, regime.name):15} {cell.contender:24} "
                    f"{old.median:10.4f} {cell.median:10.4f} {ratio:6.2f} {ratio * ideal:8.2f}{_mark(old, cell)}"
                )
        for value in row.values:
            old_value = next((v for v in old_row.values if v.name == value.name), None)
            if old_value is not None and old_value.value is not None and value.value is not None:
                lines.append(
                    f"{row.name:16} {value.name:40} {old_value.value:10.3f} -> {value.value:10.3f} {value.unit}"
                )
    return "\n".join(lines)


def _mark(old: Cell, new: Cell) -> str:
    if min(new.ms) > max(old.ms):
        return "  slower"
    if max(new.ms) < min(old.ms):
        return "  faster"
    return ""


def _changed_versions(before: Result, after: Result) -> list[tuple[str, str | None, str | None]]:
    names = sorted(before.versions.keys() | after.versions.keys())
    pairs = [(name, before.versions.get(name), after.versions.get(name)) for name in names]
    return [pair for pair in pairs if pair[1] != pair[2]]
