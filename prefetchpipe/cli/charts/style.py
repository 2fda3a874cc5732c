"""How all charts look: a palette that colour-blind readers can tell apart, labels beside the lines, no frame."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefetchpipe.cli.terminal import CliError

__all__ = ["GREY", "INK", "PALETTE", "check_chart", "new_figure", "place_labels", "save", "title"]

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito, https://jfly.uni-koeln.de/color/; yellow left out, which is too light for a line."""
_TITLE_CHARACTER, _SMALL_CHARACTER = 0.106, 0.071  # inches, for 13 pt bold and 9 pt
INK, GREY = "#222222", "#8a8a8a"


def check_chart(path: Path | None) -> None:
    """Before anything is measured: can the chart be drawn and written?

    Raises:
        CliError: No matplotlib, or a name that does not end in ``.png``.
    """
    if path is None:
        return
    if path.suffix.lower() != ".png":
        raise CliError(f"--chart: {str(path)!r}; allowed: a name that ends in .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise CliError("charts need matplotlib: pip install 'prefetchpipe[cli]', or leave them out with --no-chart")


def new_figure(rows: int, columns: int, *, size: tuple[float, float], **shared: Any) -> tuple[Any, Any]:
    """Figure and panels, for files only: no display is asked for, and no state of pyplot is touched.

    Args:
        rows: Of panels.
        columns: Of panels.
        size: Inches.
        **shared: ``sharex``, ``sharey``.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False, **shared)
    for panel in panels.flat:
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
        panel.tick_params(labelsize=9, colors=INK)
        panel.set_axisbelow(True)
    return figure, panels


def title(figure: Any, text: str, below: str) -> None:
    """What is seen, and under it in grey where it was measured."""
    width, height = figure.get_size_inches()
    lines = textwrap.wrap(text, int((width - 0.3) / _TITLE_CHARACTER))
    small = textwrap.wrap(below, int((width - 0.3) / _SMALL_CHARACTER))
    used = 0.25 * len(lines) + 0.12
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - (used + 0.19 * len(small)) / height))
    place = {"va": "top", "linespacing": 1.2}
    figure.text(0.15 / width, 1 - 0.1 / height, "\n".join(lines), fontsize=13, fontweight="bold", color=INK, **place)
    figure.text(0.15 / width, 1 - used / height, "\n".join(small), fontsize=9, color=GREY, **place)


def place_labels(panel: Any, labels: Sequence[tuple[float, float, str, str]], *, gap: float = 0.062) -> None:
    """Names at the right end of lines, moved apart where they would cover each other.

    Args:
        panel: Its axes are final: limits and scales are not changed afterwards.
        labels: End of the line (x, y), text, colour.
        gap: Least distance, as a share of the panel's height.
    """
    to_panel = panel.transData + panel.transAxes.inverted()
    ends = sorted(labels, key=lambda label: to_panel.transform(label[:2])[1])
    heights = [float(to_panel.transform(end[:2])[1]) for end in ends]
    for index in range(1, len(heights)):
        heights[index] = max(heights[index], heights[index - 1] + gap)
    if heights:
        heights[-1] = min(heights[-1], 1.0)
    for index in range(len(heights) - 2, -1, -1):
        heights[index] = min(heights[index], heights[index + 1] - gap)
    for height, (x, y, text, colour) in zip(heights, ends, strict=True):
        panel.annotate(
            text,
            xy=(x, y),
            xycoords="data",
            xytext=(1.03, height),
            textcoords="axes fraction",
            color=colour,
            fontsize=9.5,
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.7, "alpha": 0.6, "shrinkA": 0, "shrinkB": 3},
        )


def save(figure: Any, path: Path) -> None:
    """Write the PNG.

    Raises:
        CliError: The file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, facecolor="white")
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}") from error
