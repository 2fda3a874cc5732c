"""PNG charts of a results file: one figure per row, a panel per regime, bars sorted, ours highlighted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.schema import OURS, Cell, Regime, Result, RowResult
from benchmarks.table import REGIMES

__all__ = ["draw"]

_FEWEST_POINTS = 2

_OURS, _PEER, _WRONG, _IDEAL = "#d1495b", "#8d99ae", "#e3c16f", "#1b4965"


def draw(result: Result, folder: Path) -> list[Path]:
    """Write one PNG for each row that has times.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for row in result.rows:
        regimes = [regime for regime in row.regimes if any(cell.ms for cell in regime.cells)]
        if not regimes:
            continue
        bars = max(sum(1 for cell in regime.cells if cell.ms) for regime in regimes)
        figure, panels = plt.subplots(
            len(regimes), 1, figsize=(9, len(regimes) * (1.25 + 0.36 * bars) + 0.9), squeeze=False, layout="constrained"
        )
        for panel, regime in zip(panels[:, 0], regimes, strict=True):
            _panel(panel, row, regime)
        machine = result.machine.get("name", "")
        figure.suptitle(f"{row.name}: {_wrapped(row.title)}\n{machine}, {result.date[:10]}", fontsize=12)
        path = folder / f"{row.name}.png"
        figure.savefig(path, dpi=120)
        plt.close(figure)
        written.append(path)
    if path := _over_workers(result, folder, plt):
        written.append(path)
    return written


def _over_workers(result: Result, folder: Path, plt: Any) -> Path | None:
    """GB/s over the number of worker processes, a line per contender; None without at least two numbers."""
    rows = [row for row in result.rows if "workers" in row.parts and row.name.endswith("-workers")]
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for regime in row.regimes:
            if regime.name == "transfer":
                for cell in regime.cells:
                    if cell.median:
                        rate = row.batch_bytes / cell.median / 1e6
                        lines.setdefault(cell.contender, []).append((int(row.parts["workers"]), rate))
    if len(rows) < _FEWEST_POINTS:
        return None
    figure, panel = plt.subplots(figsize=(9, 5.5), layout="constrained")
    last = max(int(row.parts["workers"]) for row in rows)
    taken: list[float] = []
    gap = 0.045 * max(rate for points in lines.values() for _, rate in points)
    for name, points in sorted(lines.items(), key=lambda line: line[1][-1][1]):
        is_ours = name.startswith(OURS)
        places, rates = zip(*sorted(points), strict=True)
        panel.plot(places, rates, marker="o", ms=5, lw=2.4 if is_ours else 1.4, color=_OURS if is_ours else _PEER)
        at = max([rates[-1], *(height + gap for height in taken)])
        taken.append(at)
        panel.annotate(name, (places[-1], at), xytext=(8, 0), textcoords="offset points", va="center", fontsize=9)
    link = result.limits.get("h2d_gb_per_s")
    if link:
        panel.axhline(link, color=_IDEAL, lw=1.5, ls="--")
        panel.annotate(f"the link, {link:.0f} GB/s", (1, link), xytext=(0, 4), textcoords="offset points", fontsize=9)
    panel.set_xlim(0.5, last * 1.35)
    panel.set_ylim(bottom=0)
    panel.set_xticks(sorted({int(row.parts["workers"]) for row in rows}))
    panel.set_xlabel("worker processes")
    panel.set_ylabel("GB/s (more is better)")
    panel.set_title(f"{_wrapped(rows[0].title.replace(' 1 workers', ' N workers'))}", fontsize=11, loc="left")
    figure.suptitle(f"Batches on the device, {result.machine.get('name', '')}, {result.date[:10]}", fontsize=12)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    path = folder / "over-workers.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _panel(panel: Any, row: RowResult, regime: Regime) -> None:
    cells = sorted((cell for cell in regime.cells if cell.ms), key=lambda cell: cell.median or 0.0, reverse=True)
    places = range(len(cells))
    medians = [cell.median or 0.0 for cell in cells]
    lows = [median - min(cell.ms) for median, cell in zip(medians, cells, strict=True)]
    highs = [max(cell.ms) - median for median, cell in zip(medians, cells, strict=True)]
    colours = [_OURS if cell.ours else _WRONG if row.wrong(cell.contender) else _PEER for cell in cells]
    panel.barh(places, medians, color=colours, height=0.72, xerr=[lows, highs], error_kw={"lw": 1, "capsize": 2})
    panel.set_yticks(list(places), [_label(row, cell) for cell in cells], fontsize=10)
    spread = max(medians) / max(min(medians), 1e-9)
    if spread > 30:
        panel.set_xscale("log")
        panel.set_xlim(min([*medians, regime.ideal_ms or min(medians)]) * 0.6, max(medians) * 4)
    else:
        panel.set_xlim(0, max(median + high for median, high in zip(medians, highs, strict=True)) * 1.18)
    for place, median, high in zip(places, medians, highs, strict=True):
        panel.annotate(
            f"{median:.3g} ms",
            (median + high, place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    title = REGIMES.get(regime.name, regime.name)
    if regime.ideal_ms:
        panel.axvline(regime.ideal_ms, color=_IDEAL, lw=1.5, ls="--")
        title += f", dashed: ideal {regime.ideal_ms:.3g} ms ({regime.ideal_is})"
    panel.set_title(title, fontsize=11, loc="left")
    panel.set_xlabel("ms per batch (less is better)", fontsize=10)
    panel.tick_params(axis="x", labelsize=9)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def _label(row: RowResult, cell: Cell) -> str:
    wrong = row.wrong(cell.contender)
    return f"{cell.contender} ({wrong} wrong)" if wrong else cell.contender


def _wrapped(text: str, width: int = 80) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, width))
