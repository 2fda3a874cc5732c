"""Break-even curves: time of one call over size, one panel for each operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefetchpipe.cli.charts.style import GREY, PALETTE, new_figure, place_labels, save, title
from prefetchpipe.cli.measure.crossover import Crossover
from prefetchpipe.cli.measure.curves import CPU_SIDES, GPU_SIDES, Curve
from prefetchpipe.cli.measure.operations import OPERATIONS

__all__ = ["draw"]

_COLOURS = dict(zip((*CPU_SIDES, *GPU_SIDES), PALETTE, strict=False))


def draw(
    curves: Sequence[Curve], found: Mapping[str, Sequence[Crossover]], *, headline: str, where: str, path: Path
) -> None:
    """Write the chart.

    Args:
        curves: Of all operations.
        found: Crossovers by operation.
        headline: What is seen.
        where: Machine, dtype, date.
        path: Of the PNG.
    """
    names = list(dict.fromkeys(curve.op for curve in curves))
    columns = min(2, len(names))
    rows = -(-len(names) // columns)
    figure, panels = new_figure(rows, columns, size=(6.2 * columns, 3.6 * rows + 0.9))
    for panel in panels.flat[len(names) :]:
        panel.set_visible(False)
    for panel, name in zip(panels.flat, names, strict=False):
        _panel(panel, [curve for curve in curves if curve.op == name], found.get(name, ()), name)
    title(figure, headline, where)
    figure.canvas.draw()  # settles the layout, so that the labels know where the lines end
    for panel, name in zip(panels.flat, names, strict=False):
        chosen = [curve for curve in curves if curve.op == name]
        ends = [(curve.sizes[-1], curve.medians[-1] * 1e3, curve.side, _COLOURS[curve.side]) for curve in chosen]
        place_labels(panel, ends)
    save(figure, path)


def _panel(panel: Any, curves: Sequence[Curve], found: Sequence[Crossover], name: str) -> None:
    sizes = curves[0].sizes
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(sizes, [str(size) for size in sizes])
    panel.minorticks_off()
    if len(sizes) > 1:
        panel.set_xlim(sizes[0] * 0.9, sizes[-1] * 1.05)
    for curve in curves:
        colour = _COLOURS[curve.side]
        low = [min(repeats) * 1e3 for repeats in curve.seconds]
        high = [max(repeats) * 1e3 for repeats in curve.seconds]
        panel.fill_between(sizes, low, high, color=colour, alpha=0.18, lw=0)
        panel.plot(sizes, [value * 1e3 for value in curve.medians], color=colour, lw=1.8, marker="o", ms=4)
    panel.grid(axis="y", color="#e6e6e6", lw=0.6)
    panel.yaxis.set_major_formatter(lambda milliseconds, _: _time(milliseconds))
    panel.set_xlabel("n", fontsize=9.5)
    panel.set_ylabel("time of one call", fontsize=9.5)
    panel.set_title(f"{name}: {OPERATIONS[name].title}", fontsize=10.5, loc="left")
    inside = sorted((crossover for crossover in found if crossover.size is not None), key=lambda c: c.size or 0.0)
    bottom, top = panel.get_ylim()
    panel.set_ylim(bottom, top * (top / bottom) ** (0.09 * max(1, len(inside))))  # room for the words above the lines
    for level, crossover in enumerate(inside):
        beyond_half = (crossover.size or 0.0) ** 2 > sizes[0] * sizes[-1]  # then the words stand left of their line
        panel.axvline(crossover.size, color=_COLOURS[crossover.faster], lw=1, ls=":")
        panel.annotate(
            f"{crossover.faster} faster from n = {crossover.size:.0f}",
            xy=(crossover.size, 0.99 - 0.075 * level),
            xycoords=("data", "axes fraction"),
            xytext=(-4 if beyond_half else 4, 0),
            textcoords="offset points",
            fontsize=8.5,
            va="top",
            ha="right" if beyond_half else "left",
            color=_COLOURS[crossover.faster],
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )
    if not inside and len(curves) > 1:
        panel.text(
            0.02, 0.99, "no crossover in this range", transform=panel.transAxes, fontsize=8.5, va="top", color=GREY
        )


def _time(milliseconds: float) -> str:
    for unit, size in (("s", 1e3), ("ms", 1.0), ("\u00b5s", 1e-3)):
        if milliseconds >= size * 0.9999:
            return f"{milliseconds / size:g} {unit}"
    return f"{milliseconds * 1e6:g} ns"
