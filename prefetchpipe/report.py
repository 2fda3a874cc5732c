"""``Stats`` for people: one line, a block of text for a terminal, a table for a notebook."""

from __future__ import annotations

import html as escaping
import textwrap
from typing import TYPE_CHECKING

from prefetchpipe.verdict import size, time

if TYPE_CHECKING:
    from prefetchpipe.stats import Stats

__all__ = ["html", "line", "text"]

_WIDTH = 79
_LABEL = 10
_BAR = 20


def line(stats: Stats) -> str:
    """One line."""
    waiting = stats.waiting_percent
    share = "" if waiting is None else f", {waiting:.0f}% of the loop waiting"
    return (
        f"<Stats: {stats.batches} batches, {size(stats.copied_bytes)} to {stats.device}{share}, "
        f"bottleneck {stats.bottleneck}>"
    )


def text(stats: Stats) -> str:
    """A block of lines for a terminal of 80 columns."""
    lines = textwrap.wrap(stats.verdict, _WIDTH)
    for label, value in _rows(stats):
        lines += textwrap.wrap(
            value, _WIDTH, initial_indent=label.ljust(_LABEL), subsequent_indent=" " * _LABEL, break_long_words=False
        )
    costs = _costs(stats)
    longest = max((seconds for _, seconds in costs), default=0.0)
    for label, seconds in costs:
        bar = "#" * round(_BAR * seconds / longest) if longest else ""
        lines.append(f"{'':{_LABEL}}{label:<16}{time(seconds):>10}  {bar}".rstrip())
    return "\n".join(lines)


def html(stats: Stats) -> str:
    """A table."""
    cell = "text-align:left;padding:1px 12px 1px 0;vertical-align:top"
    body = [
        f'<tr><th style="{cell}">{escaping.escape(label)}</th>'
        f'<td style="{cell}" colspan="2">{escaping.escape(value)}</td></tr>'
        for label, value in _rows(stats)
    ]
    costs = _costs(stats)
    longest = max((seconds for _, seconds in costs), default=0.0)
    for label, seconds in costs:
        width = round(200 * seconds / longest) if longest else 0
        bar = f'<div style="width:{width}px;height:0.8em;background:#4c78a8"></div>'
        body.append(
            f'<tr><td style="{cell}">{escaping.escape(label)}</td>'
            f'<td style="{cell};text-align:right">{time(seconds)}</td><td style="{cell}">{bar}</td></tr>'
        )
    return (
        f'<div><p style="max-width:60em"><b>{escaping.escape(stats.verdict)}</b></p>'
        f'<table style="border-collapse:collapse">{"".join(body)}</table></div>'
    )


def _rows(stats: Stats) -> list[tuple[str, str]]:
    """Label and value."""
    rows = [("batches", _batches(stats)), ("path", f"{stats.path}: {stats.path_reason or 'no batch was asked for'}")]
    if stats.workers != "none":
        reason = f": {stats.workers_reason}" if stats.workers_reason else ""
        rows.append(("workers", f"{stats.num_workers}, {stats.workers}{reason}"))
    asked = "" if stats.depth == stats.depth_asked else f" (asked for {stats.depth_asked})"
    memory = f"{size(stats.pinned_bytes)} pinned, {size(stats.peak_device_bytes)} on the device ahead at most"
    rows.append(("memory", f"{memory}; depth {stats.depth}{asked}, {stats.depth_reached} reached"))
    if stats.pageable_bytes:
        rows.append(("", f"{size(stats.pageable_bytes)} went through pageable memory: page-locked memory was refused"))
    rate = _rate(stats)
    if rate:
        rows.append(("rate", rate))
    if stats.steady.taken_batches:
        rows.append(("time", f"a batch, averages of {stats.steady.taken_batches} behind the warm-up:"))
    return rows


def _batches(stats: Stats) -> str:
    passes = f"{stats.passes} pass{'' if stats.passes == 1 else 'es'}"
    return f"{stats.batches} in {passes}, {size(stats.copied_bytes)} to {stats.device}"


def _rate(stats: Stats) -> str:
    parts = []
    if stats.achieved_gb_per_second is not None:
        parts.append(f"{stats.achieved_gb_per_second:.3g} GB/s over the whole loop")
    if stats.copy_gb_per_second is not None:
        parts.append(f"{stats.copy_gb_per_second:.3g} GB/s while copying")
    if stats.limit_gb_per_second is not None:
        parts.append(f"{stats.limit_gb_per_second:.3g} GB/s is the link's measured limit")
    return ", ".join(parts)


def _costs(stats: Stats) -> list[tuple[str, float]]:
    """Seconds of an average batch, by where they go; what is zero is left out."""
    steady = stats.steady
    sent, taken = steady.sent_batches, steady.taken_batches
    if not sent or not taken:
        return []
    packing = steady.send_seconds - steady.transform_seconds - steady.slot_wait_seconds
    copy = stats.timed_seconds * stats.copied_bytes / stats.timed_bytes if stats.timed_bytes else 0.0
    costs = [
        ("loader", steady.fetch_seconds / sent),
        ("packing", packing / sent),
        ("transform", steady.transform_seconds / sent),
        ("copy", copy / max(stats.batches, 1)),
        ("wait for slots", steady.slot_wait_seconds / sent),
        ("wait for device", steady.device_wait_seconds / sent),
        ("loop: waiting", steady.next_seconds / taken),
        ("loop: working", steady.loop_seconds / taken),
    ]
    return [(label, seconds) for label, seconds in costs if seconds > 0]
