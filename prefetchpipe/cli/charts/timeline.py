"""The timeline of a pipeline: a row for each lane, a colour and a number for each batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefetchpipe.cli.charts.style import GREY, INK, PALETTE, new_figure, save, title
from prefetchpipe.cli.measure.timeline import busy_shares, lanes_of
from prefetchpipe.pipeline.recorder import Span

__all__ = ["draw"]

_BAR = 0.72
_CHARACTER_SHARE = 0.011  # width of a digit, as a share of the panel's
_CYCLE = PALETTE[:6]
_DARK = ("#0072B2", "#D55E00", "#009E73")
_MEANINGS = {
    "loader": "next(loader)",
    "packing": "into the slot",
    "copy": "to the device",
    "compute": "the loop's work",
    "wait": "the loop waits",
}


def draw(spans: Sequence[Span], *, headline: str, where: str, path: Path) -> None:
    """Write the chart.

    Args:
        spans: At least one.
        headline: What is seen.
        where: Loader, machine, date.
        path: Of the PNG.
    """
    lanes = lanes_of(spans)
    shares = busy_shares(spans)
    begin = min(span.start_seconds for span in spans)
    whole = max(span.start_seconds + span.seconds for span in spans) - begin
    figure, panels = new_figure(1, 1, size=(11.0, 1.6 + 0.62 * len(lanes)))
    panel = panels[0, 0]
    for row, lane in enumerate(lanes):
        for span in (span for span in spans if span.lane == lane):
            _bar(panel, span, row, start=(span.start_seconds - begin) * 1e3, whole=whole * 1e3)
        panel.text(
            1.008,
            row,
            f"{shares[lane]:.0%} {'waiting' if lane == 'wait' else 'busy'}",
            transform=panel.get_yaxis_transform(),
            va="center",
            fontsize=9.5,
        )
    panel.set_xlim(0, whole * 1e3)
    panel.set_ylim(len(lanes) - 0.5, -0.5)
    names = [f"{lane}\n{_MEANINGS[lane]}" if lane in _MEANINGS else lane for lane in lanes]
    panel.set_yticks(range(len(lanes)), names, fontsize=9.5)
    panel.tick_params(axis="y", length=0)
    panel.spines["left"].set_visible(False)
    panel.grid(axis="x", color="#e6e6e6", lw=0.6)
    panel.set_xlabel("ms; the number and the colour of a bar are its batch's", fontsize=9.5)
    title(figure, headline, where)
    save(figure, path)


def _bar(panel: Any, span: Span, row: int, *, start: float, whole: float) -> None:
    waiting = span.lane == "wait"
    colour = "#d9d9d9" if waiting else _CYCLE[span.batch % len(_CYCLE)]
    width = max(span.seconds * 1e3, whole * 5e-4)  # a short one stays visible
    panel.broken_barh([(start, width)], (row - _BAR / 2, _BAR), facecolors=colour, edgecolor="white", linewidth=0.4)
    text = str(span.batch)
    if width > whole * _CHARACTER_SHARE * (len(text) + 0.6):
        ink = GREY if waiting else "white" if colour in _DARK else INK
        panel.text(start + width / 2, row, text, ha="center", va="center", fontsize=8.5, color=ink, clip_on=True)
