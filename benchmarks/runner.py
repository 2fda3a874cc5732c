"""Rows x regimes x contenders, interleaved."""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import math
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import limits, schema
from benchmarks.batches import leaves, map_leaves, nbytes
from benchmarks.compute import Step, make_step
from benchmarks.contenders import Contender, Prepared, all_contenders, select
from benchmarks.environment import describe_machine, git_commit, now, versions
from benchmarks.measure import interleaved, seconds_per_step
from benchmarks.race import run_race
from benchmarks.rows.base import Context, LoaderRow, Row
from benchmarks.schema import Cell, Regime, Result, RowResult
from benchmarks.sources import Source

__all__ = ["FACTORS", "run", "run_loader_row"]

FACTORS = {"transfer": 0.0, "balanced": 1.0, "compute": 3.5}
"""Compute per step of each regime, in units of the row's basis."""

_WARM_MS = 1000.0


@dataclasses.dataclass
class _Entry:
    contender: Contender
    source: Source
    prepared: Prepared


def run(rows: list[Row], context: Context, command: list[str], out: Path | None) -> Result:
    """Run ``rows`` one after another; the file is written after each, so that nothing is lost with a later one."""
    env, progress = context.env, context.progress
    result = Result(now(), command, describe_machine(env), versions(), git_commit())
    start = time.perf_counter()
    # The pools are large and live long: keep them out of the collections between the windows.
    gc.collect()
    gc.freeze()
    for contender in all_contenders(context.options.variants):
        reason = contender.missing(env)
        if reason is not None:
            context.missing[contender.name] = result.missing[contender.name] = reason
            progress.say(f"missing: {contender.name}: {reason}", style="yellow")
    result.limits = limits.measure(env)
    progress.say("limits  " + "  ".join(f"{key} {_short(value)}" for key, value in result.limits.items()))
    for row in rows:
        progress.say(f"{row.name}: {row.title}", style="bold")
        began = time.perf_counter()
        try:
            context.watch()
            found = row.run(context)
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            found = RowResult(row.name, row.title, error=f"{type(error).__name__}: {error}")
        finally:
            faulthandler.cancel_dump_traceback_later()
        found.seconds = time.perf_counter() - began
        result.rows.append(found)
        result.seconds = time.perf_counter() - start
        if out is not None:
            schema.save(result, out)
    result.complete = True
    if out is not None:
        schema.save(result, out)
    return result


def run_loader_row(row: LoaderRow, context: Context) -> RowResult:
    """One row: race, then every regime."""
    env, options, progress = context.env, context.options, context.progress
    try:
        example = row.example(env)
        result = RowResult(row.name, row.title, batch_bytes=nbytes(example), leaves=len(leaves(example)))
        link = env.link_ms(result.batch_bytes)
        floor, result.source = row.floor(env)
        result.parts = {"link_ms": link, "source_ms": floor}
        contenders = _taking_part(row, example, context, result)
        if options.race and env.cuda:
            for contender in contenders:
                context.watch()
                count = run_race(row, contender, env)
                result.race.append(count)
                if count.wrong or count.error:
                    said = count.error or f"{count.wrong} of {count.of} wrong"
                    progress.say(f"{row.name}  race  {contender.name}: {said}", style="yellow")
        basis = max(link, floor)
        resident = map_leaves(lambda leaf: leaf.to(env.device), example)
        for name in (name for name in FACTORS if name in options.regimes and name in row.regimes):
            if FACTORS[name] and not env.cuda:
                continue
            if row.basis == "loop" and FACTORS[name]:
                basis = max(basis, _loop_ms(row, result, contenders, context))
            step, compute = make_step(env, FACTORS[name] * basis, resident)
            parts = {"compute": compute, "link": link, "source": floor}
            ideal_is = max(parts, key=lambda part: parts[part])
            regime = Regime(name, compute, parts[ideal_is], ideal_is)
            regime.cells = _cells(row, step, contenders, context, regime=name)
            result.regimes.append(regime)
        return result
    finally:
        row.release()


def _taking_part(row: LoaderRow, example: Any, context: Context, result: RowResult) -> list[Contender]:
    chosen = []
    for contender in select(context.options.contenders, context.options.variants):
        reason = context.missing.get(contender.name) or contender.missing(context.env)
        if reason is None and row.allowed is not None and not contender.name.startswith(row.allowed):
            reason = row.allowed_why
        if reason is None:
            reason = contender.unfit(row.source(context.env), example)
        if reason is None:
            chosen.append(contender)
        else:
            result.left_out[contender.name] = reason
    return chosen


def _loop_ms(row: LoaderRow, result: RowResult, contenders: list[Contender], context: Context) -> float:
    regime = next((regime for regime in result.regimes if regime.name == "transfer"), None)
    plain = ("plain", "pinned", "pinned-loader")
    if regime is None:
        step = Step(context.env)
        cells = _cells(row, step, [c for c in contenders if c.name in plain], context, regime="calibration", repeats=1)
    else:
        cells = [cell for cell in regime.cells if cell.contender in plain]
    medians = [cell.median for cell in cells if cell.median is not None]
    return min(medians, default=0.0)


def _cells(
    row: LoaderRow,
    step: Step,
    contenders: list[Contender],
    context: Context,
    *,
    regime: str,
    repeats: int | None = None,
) -> list[Cell]:
    env, options, progress = context.env, context.options, context.progress
    warm, tail = row.window(env)
    cells = {contender.name: Cell(contender.name) for contender in contenders}
    entries: dict[str, _Entry] = {}
    warms: dict[str, int] = {}

    def failed(name: str, error: Exception) -> None:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}:{last.lineno}"
        cells[name].error = f"{type(error).__name__}: {error} ({place})"[:500]
        progress.say(f"{row.name}  {regime}  {name}: {cells[name].error}", style="red")

    def measure(name: str, warm: int, steps: int) -> float:
        context.watch()
        entry = entries[name]
        entry.source.set_steps(warm + steps + tail)
        return 1e3 * seconds_per_step(
            entry.prepared.batches, step, env.synchronize, warm=warm, steps=steps, drain=row.drain
        )

    def timed(name: str) -> Callable[[], float]:
        return lambda: measure(name, warms[name], cells[name].steps)

    try:
        for contender in contenders:
            source = row.source(env)
            try:
                source.set_steps(warm + row.least + tail)
                entries[contender.name] = _Entry(contender, source, contender.prepare(source, env))
                # Untimed: allocators, caches and worker processes get warm, and the window finds its length.
                ms = measure(contender.name, min(warm, row.least), row.least)
                steps = math.ceil(options.seconds * 1e3 / max(ms, 1e-3))
                cells[contender.name].steps = max(row.least, min(steps, row.most))
                warms[contender.name] = warm if warm * ms < _WARM_MS else 1
            except Exception as error:
                failed(contender.name, error)
        ready = {name: timed(name) for name in entries if cells[name].error is None}
        taken = interleaved(ready, repeats or options.repeats, failed=failed)
        for name, ms_list in taken.items():
            cells[name].ms = ms_list
            stats = entries[name].prepared.stats
            cells[name].stats = _plain(stats()) if stats is not None else None
        said = ", ".join(f"{name} {cell.median:.3f}" for name, cell in cells.items() if cell.median is not None)
        progress.say(f"{row.name}  {regime}  ms: {said}")
    finally:
        for entry in entries.values():
            if entry.prepared.close is not None:
                entry.prepared.close()
        entries.clear()
        gc.collect()
        if env.cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    return list(cells.values())


def _plain(stats: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(stats) and not isinstance(stats, type):
        return dataclasses.asdict(stats)
    return dict(stats) if isinstance(stats, dict) else dict(vars(stats))


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "/".join(f"{number:.1f}" for number in value.values())
    return f"{value:.1f}"
