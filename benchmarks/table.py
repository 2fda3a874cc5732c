"""Markdown tables from a results file."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.schema import OURS, Cell, RaceCount, Regime, Result, RowResult

__all__ = [
    "REGIMES",
    "explanation",
    "full_table",
    "heading",
    "limits_line",
    "race_table",
    "summary",
    "summary_table",
    "values_table",
]

REGIMES = {"transfer": "transfer-bound", "balanced": "balanced", "compute": "compute-bound"}


def summary(result: Result) -> str:
    """The block of the README: what ran where, times, wrong batches, other measurements, what was missing."""
    start = f"{heading(result)} {explanation()}", limits_line(result)
    parts = [*start, summary_table(result), race_table(result), values_table(result), _missing(result)]
    return "\n\n".join(part for part in parts if part)


def explanation() -> str:
    """How to read the table."""
    return (
        "Milliseconds per batch, medians of interleaved repeats, ± half the range. *Ideal* is the largest of compute, "
        "bytes over the link, and what the source takes at best; *best right peer* is the fastest other loop that gave "
        "no wrong batch in the race; *tuned plain* is the fastest of `.to`, pinned and `DataLoader(pin_memory=True)`."
    )


def heading(result: Result) -> str:
    """Machine, versions, date, commit."""
    chosen = ("torch", "cupy-cuda13x", "cupy-cuda12x", "numpy")
    versions = ", ".join(f"{name} {result.versions[name]}" for name in chosen if name in result.versions)
    machine = result.machine.get("name", "unknown machine")
    return f"{machine[:1].upper()}{machine[1:]}; {versions}; {result.date[:10]}, commit {result.git_commit}."


def limits_line(result: Result) -> str:
    """Measured limits of the machine, in GB/s."""
    names = {
        "h2d_gb_per_s": "H2D",
        "d2h_gb_per_s": "D2H",
        "both_ways_gb_per_s": "both ways",
        "pageable_h2d_gb_per_s": "H2D from pageable memory",
    }
    said = [f"{label} {result.limits[key]:.1f}" for key, label in names.items() if key in result.limits]
    packing = result.limits.get("packing_gb_per_s", {})
    if packing:
        said.append(
            "packing " + ", ".join(f"{rate:.1f} ({threads})" for threads, rate in packing.items()) + " (threads)"
        )
    return f"Limits of this machine in the same run, GB/s: {'; '.join(said)}." if said else ""


def summary_table(result: Result) -> str:
    """One line per row and regime: ideal, best right peer, ours."""
    lines = []
    for row in result.rows:
        for regime in row.regimes:
            ours, peer = regime.cell(OURS), row.best_right_peer(regime)
            if ours is None and peer is None:
                continue
            lines.append(
                (
                    row.name,
                    f"{row.batch_bytes / 1e6:.3g} MB, {row.leaves}",
                    REGIMES.get(regime.name, regime.name),
                    f"{_ms(regime.ideal_ms)} ({regime.ideal_is})",
                    f"{_with_spread(peer)} {peer.contender}" if peer else "-",
                    _with_spread(ours),
                    _ratio(peer, ours),
                    _ratio(ours, row.tuned_plain(regime)),
                    f"{ours.median / regime.ideal_ms:.2f}" if ours and ours.median and regime.ideal_ms else "-",
                )
            )
    header = (
        "row",
        "batch, leaves",
        "regime",
        "ideal",
        "best right peer",
        OURS,
        "times faster",
        "x tuned plain",
        "x ideal",
    )
    return _markdown(header, lines)


def full_table(result: Result) -> str:
    """Every contender of every row and regime, fastest first, rows where we lose like the others."""
    blocks = []
    for row in result.rows:
        if row.error:
            blocks.append(f"**{row.name}**: {row.error}")
        for regime in row.regimes:
            blocks.append(
                f"**{row.name}, {REGIMES.get(regime.name, regime.name)}** ({row.title}; {_parts(row, regime)})"
            )
            blocks.append(_regime_table(row, regime))
        left_out = {name: why for name, why in row.left_out.items() if name not in result.missing}
        if left_out and row.regimes:
            blocks.append("Left out: " + "; ".join(f"{name}: {why}" for name, why in left_out.items()) + ".")
    blocks.append(_missing(result))
    return "\n\n".join(block for block in blocks if block)


def race_table(result: Result) -> str:
    """Wrong batches by contender and workload; the worst over depths, with and without a transform."""
    counts: dict[tuple[str, str], list[RaceCount]] = {}
    for row in result.rows:
        for count in row.race:
            counts.setdefault((count.contender, count.row), []).append(count)
    if not counts:
        return ""
    names = list(dict.fromkeys(contender for contender, _ in counts))
    workloads = list(dict.fromkeys(workload for _, workload in counts))
    lines = [(name, *(_race_entry(counts.get((name, workload), [])) for workload in workloads)) for name in names]
    total = max(count.of for group in counts.values() for count in group)
    varied = any(count.variant for group in counts.values() for count in group)
    which = "the worst of all depths (and of transform on and off)" if varied else "one run each, with default options"
    said = f"Wrong batches out of {total} behind a slow GPU, {which}:"
    return f"{said}\n\n{_markdown(('contender', *workloads), lines)}"


def values_table(result: Result) -> str:
    """Measurements that are not a time per batch."""
    lines = [
        (
            row.name,
            value.name,
            "-" if value.value is None else f"{value.value:.3g} {value.unit}".strip(),
            value.target or "-",
            {True: "yes", False: "**no**", None: "-"}[value.ok],
            value.note or "",
        )
        for row in result.rows
        for value in row.values
    ]
    return _markdown(("row", "what", "measured", "target", "met", "note"), lines)


def _regime_table(row: RowResult, regime: Regime) -> str:
    cells = sorted(regime.cells, key=lambda cell: (cell.median is None, cell.median))
    peer = row.best_right_peer(regime)
    lines = []
    for cell in cells:
        wrong = row.wrong(cell.contender)
        right = "-" if wrong is None else ("yes" if wrong == 0 else f"no, {wrong} wrong")
        best = f"{cell.median / peer.median:.2f}" if cell.median and peer and peer.median else "-"
        ideal = f"{cell.median / regime.ideal_ms:.2f}" if cell.median and regime.ideal_ms else "-"
        lines.append((cell.contender, cell.error or _with_spread(cell), ideal, best, right, str(cell.steps)))
    return _markdown(("contender", "ms", "x ideal", "x best right peer", "right", "steps"), lines)


def _parts(row: RowResult, regime: Regime) -> str:
    link, source = row.parts.get("link_ms", 0.0), row.parts.get("source_ms", 0.0)
    sizes = f"{row.batch_bytes / 1e6:.3g} MB, {row.leaves} leaves"
    return f"{sizes}; compute {_ms(regime.compute_ms)}, link {_ms(link)}, source {_ms(source)} ms: {row.source}"


def _missing(result: Result) -> str:
    if not result.missing:
        return ""
    return "Missing in this run: " + "; ".join(f"{name} ({why})" for name, why in result.missing.items()) + "."


def _race_entry(counts: list[RaceCount]) -> str:
    wrong = [count.wrong for count in counts if count.wrong is not None]
    if wrong:
        return str(max(wrong))
    failed = [count for count in counts if count.error and count.of]
    return "error" if failed else "-"


def _ratio(peer: Cell | None, ours: Cell | None) -> str:
    if peer is None or ours is None or not peer.median or not ours.median:
        return "-"
    return f"{peer.median / ours.median:.2f}"


def _with_spread(cell: Cell | None) -> str:
    if cell is None or cell.median is None:
        return "error" if cell is not None and cell.error else "-"
    return f"{_ms(cell.median)} ± {50 * (cell.spread or 0.0):.0f} %"


def _ms(value: float) -> str:
    return f"{value:.4f}" if value < 0.1 else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    if not lines:
        return ""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join(
        "| " + " | ".join(str(field).replace("|", "/").replace("\n", " ") for field in row) + " |" for row in rows
    )
