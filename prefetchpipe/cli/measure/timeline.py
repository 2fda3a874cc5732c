"""What the spans of a trace say: how busy each lane is, and how much of it runs behind the loop's own work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prefetchpipe.pipeline.recorder import LANES, Span

__all__ = ["busy_shares", "headline", "hidden_share", "lanes_of", "window"]

_FEEDING = ("loader", "packing", "copy")
_WORTH_SAYING = 0.02
_FULL = 0.9
_MOST_BATCHES = 10


def lanes_of(spans: Sequence[Span]) -> list[str]:
    """The lanes that there are, from the source of a batch to its use; others come after these."""
    there = dict.fromkeys(span.lane for span in spans)
    return [lane for lane in LANES if lane in there] + [lane for lane in there if lane not in LANES]


def window(spans: Sequence[Span]) -> list[Span]:
    """The spans of the last batches, as many as can be told apart on a chart: the start of a pass is not typical."""
    last = max((span.batch for span in spans), default=0)
    return [span for span in spans if span.batch > last - _MOST_BATCHES]


def busy_shares(spans: Sequence[Span]) -> dict[str, float]:
    """For each lane the share of the whole time in which something was going on there."""
    if not spans:
        return {}
    begin = min(span.start_seconds for span in spans)
    total = max(span.start_seconds + span.seconds for span in spans) - begin
    if total <= 0:
        return dict.fromkeys(lanes_of(spans), 0.0)
    return {lane: _length(_covered(spans, [lane])) / total for lane in lanes_of(spans)}


def hidden_share(spans: Sequence[Span]) -> float | None:
    """Of the time for loading, packing and copying, the share during which the loop's work ran; None without any."""
    feeding, work = _covered(spans, _FEEDING), _covered(spans, ["compute"])
    whole = _length(feeding)
    if whole <= 0:
        return None
    both = _length(feeding) + _length(work) - _length(_merged([*feeding, *work]))
    return both / whole


def headline(spans: Sequence[Span]) -> str:
    """One sentence: who sets the pace, and what is hidden."""
    shares = busy_shares(spans)
    feeding = {lane: share for lane, share in shares.items() if lane in _FEEDING}
    work = shares.get("compute", 0.0)
    if not feeding and not work:
        return "No work was recorded"
    hidden = hidden_share(spans)
    aside = ""
    if hidden is not None and work > _WORTH_SAYING:
        aside = f"; {hidden:.0%} of loading, packing and copying runs behind its work"
    if work >= _FULL or not feeding:
        return f"The loop sets the pace: its own work fills {work:.0%} of the time{aside}"
    busiest = max(feeding, key=lambda lane: feeding[lane])
    before = f"the busiest lane before it is {busiest} ({feeding[busiest]:.0%})"
    return f"The loop works {work:.0%} of the time; {before}{aside}"


def _covered(spans: Iterable[Span], lanes: Iterable[str]) -> list[tuple[float, float]]:
    chosen = set(lanes)
    return _merged((s.start_seconds, s.start_seconds + s.seconds) for s in spans if s.lane in chosen)


def _merged(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _length(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)
