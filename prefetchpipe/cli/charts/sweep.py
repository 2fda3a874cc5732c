"""GB/s over batch size: one panel for each number of workers, one line for each depth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefetchpipe.cli.charts.style import PALETTE, new_figure, place_labels, save, title
from prefetchpipe.cli.measure.grid import Point

__all__ = ["draw"]

_ASIDE = 0.03


def draw(points: Sequence[Point], *, headline: str, where: str, path: Path) -> None:
    """Write the chart; without batch sizes, over depth.

    Args:
        points: Those without times are left out; at least one has some.
        headline: What is seen.
        where: Loader, machine, date.
        path: Of the PNG.
    """
    timed = [point for point in points if point.windows]
    workers = list(dict.fromkeys(point.num_workers for point in timed))
    figure, panels = new_figure(1, len(workers), size=(2.4 + 4.2 * len(workers), 4.6), sharey=True)
    top = max(rate.high for point in timed if (rate := point.gb_per_second()))
    shown = [[point for point in timed if point.num_workers == count] for count in workers]
    ends = [_panel(panel, chosen) for panel, chosen in zip(panels.flat, shown, strict=True)]
    for panel, count in zip(panels.flat, workers, strict=True):
        panel.set_ylim(0, top * 1.08 or 1.0)  # batches without a tensor have no bytes
        if count is not None:
            name = f"{count or 'no'} worker{'' if count == 1 else 's'}"
            panel.set_title(name, fontsize=10.5, loc="left")
    panels.flat[0].set_ylabel("GB/s delivered", fontsize=9.5)
    title(figure, headline, where)
    figure.canvas.draw()  # settles the layout, so that the labels know where the lines end
    for panel, labels in zip(panels.flat, ends, strict=True):
        place_labels(panel, labels)
    save(figure, path)


def _panel(panel: Any, points: Sequence[Point]) -> list[tuple[float, float, str, str]]:
    """Draw the lines; returns where each ends, its name and its colour."""
    by_size = any(point.batch_size is not None for point in points)
    depths = sorted({point.depth for point in points})
    lines = {depth: [point for point in points if point.depth == depth] for depth in depths}
    if not by_size:
        lines = {0: list(points)}
    ends = []
    for order, (depth, line) in enumerate(lines.items()):
        colour = PALETTE[order % len(PALETTE)]
        line.sort(key=_place)
        rates = [rate for point in line if (rate := point.gb_per_second()) is not None]
        # A little aside, so that the bars of several depths do not cover each other.
        aside = 1.0 + _ASIDE * (order - (len(lines) - 1) / 2)
        places, middle = [_place(point) * aside for point in line], [rate.median for rate in rates]
        below = [rate.median - rate.low for rate in rates]
        above = [rate.high - rate.median for rate in rates]
        panel.errorbar(
            places, middle, yerr=[below, above], color=colour, lw=1.8, marker="o", ms=4.5, elinewidth=1, capsize=2
        )
        if by_size:
            ends.append((places[-1], middle[-1], f"depth {depth}", colour))
    ticks = sorted({_place(point) for point in points})
    panel.set_xscale("log", base=2)
    panel.set_xticks(ticks, [str(tick) for tick in ticks])
    panel.minorticks_off()
    panel.set_xlim(ticks[0] * 0.85, ticks[-1] * 1.15)
    panel.set_xlabel("batch size" if by_size else "depth", fontsize=9.5)
    panel.grid(axis="y", color="#e6e6e6", lw=0.6)
    return ends


def _place(point: Point) -> int:
    return point.depth if point.batch_size is None else point.batch_size
