"""Rows x regimes x contenders, interleaved."""

from __future__ import annotations

import faulthandler
import gc
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks import limits, schema
from benchmarks.batches import leaves, map_leaves, nbytes
from benchmarks.cells import Cells
from benchmarks.compute import Step, make_step
from benchmarks.contenders import Contender, all_contenders, select
from benchmarks.environment import describe_machine, git_commit, now, versions
from benchmarks.race import run_race
from benchmarks.rows.base import Context, LoaderRow, Row
from benchmarks.schema import TUNED_PLAIN, Regime, Result, RowResult

__all__ = ["FACTORS", "run", "run_loader_row"]

FACTORS = {"transfer": 0.0, "balanced": 1.0, "compute": 3.5}
"""Compute per step of each regime, in units of the row's basis."""


def run(
    rows: list[Row], context: Context, command: list[str], out: Path | None, *, commit: str | None = None
) -> Result:
    """Run ``rows`` one after another; the file is written after each, so that nothing is lost with a later one."""
    env, progress = context.env, context.progress
    result = Result(now(), command, describe_machine(env), versions(), commit or git_commit())
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
    gc.unfreeze()
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
            regime.cells = Cells(row, step, context, name).run(contenders, options.repeats)
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
    if regime is None:
        step = Step(context.env)
        cells = Cells(row, step, context, "calibration").run([c for c in contenders if c.name in TUNED_PLAIN], 1)
    else:
        cells = [cell for cell in regime.cells if cell.contender in TUNED_PLAIN]
    medians = [cell.median for cell in cells if cell.median is not None]
    return min(medians, default=0.0)


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "/".join(f"{number:.1f}" for number in value.values())
    return f"{value:.1f}"
