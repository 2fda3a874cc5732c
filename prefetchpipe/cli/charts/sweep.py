"""GB/s over batch size: one panel for each number of workers, one line for each depth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefetchpipe.cli.charts.style import PALETTE, new_figure, place_labels, save, title
from prefetchpipe.cli.measure.grid import Point

__all__ = ["draw"]


def draw(points: Sequence[Point], *, headline: str, where: str, path: Path) -> None:
    """Write the chart.

    Args:
        points: Those without times are left out; at least one has some.
        headline: What is seen.
        where: Loader, machine, date.
        path: Of the PNG.
    """
    timed = [point for point in points if point.windows]
    workers = list(dict.fromkeys(point.num_workers for point in timed))
    depths = sorted({point.depth for point in timed})
    figure, panels = new_figure(1, len(workers), size=(2.0 + 4.2 * len(workers), 4.6), sharey=True)
    colours = {depth: PALETTE[index % len(PALETTE)] for index, depth in enumerate(depths)}
    top = max(rate.high for point in timed if (rate := point.gb_per_second()))
    for panel, count in zip(panels.flat, workers, strict=True):
        _panel(panel, [point for point in timed if point.num_workers == count], colours)
        panel.set_ylim(0, top * 1.08)
        if count is not None:
            panel.set_title(
                f"{count} worker{'s' if count != 1 else ''}" if count else "no workers", fontsize=10.5, loc="left"
            )
    panels.flat[0].set_ylabel("GB/s delivered", fontsize=9.5)
    title(figure, headline, where, width=28 + 40 * len(workers))
    figure.canvas.draw()
    for panel, count in zip(panels.flat, workers, strict=True):
        _label(panel, [point for point in timed if point.num_workers == count], colours)
    save(figure, path)


def _panel(panel: Any, points: Sequence[Point], colours: dict[int, str]) -> None:
    sizes = sorted({point.batch_size for point in points if point.batch_size is not None})
    lines = _lines(points)
    for order, (depth, line) in enumerate(lines.items()):
        rates = [rate for point in line if (rate := point.gb_per_second()) is not None]
        # A little aside, so that the bars of several depths do not cover each other.
        aside = 1.0 + 0.03 * (order - (len(lines) - 1) / 2)
        places = [(point.batch_size or 1) * aside for point in line]
        below = [rate.median - rate.low for rate in rates]
        above = [rate.high - rate.median for rate in rates]
        middle = [rate.median for rate in rates]
        panel.errorbar(
            places,
            middle,
            yerr=[below, above],
            color=colours[depth],
            lw=1.8,
            marker="o",
            ms=4.5,
            elinewidth=1,
            capsize=2,
        )
    if sizes:
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [str(size) for size in sizes])
        panel.minorticks_off()
        panel.set_xlim(sizes[0] * 0.85, sizes[-1] * 1.12)
        panel.set_xlabel("batch size", fontsize=9.5)
    else:
        panel.set_xlim(0.85, 1.15)
        panel.set_xticks([])
    panel.grid(axis="y", color="#e6e6e6", lw=0.6)


def _label(panel: Any, points: Sequence[Point], colours: dict[int, str]) -> None:
    ends = []
    place = 0
    for depth, line in _lines(points).items():
        rate = line[-1].gb_per_second()
        place = max(place, line[-1].batch_size or 1)
        if rate is not None:
            ends.append((rate.median, f"depth {depth}", colours[depth]))
    place_labels(panel, ends, place)


def _lines(points: Sequence[Point]) -> dict[int, list[Point]]:
    lines: dict[int, list[Point]] = {}
    for point in sorted(points, key=lambda point: (point.depth, point.batch_size or 0)):
        lines.setdefault(point.depth, []).append(point)
    return lines
