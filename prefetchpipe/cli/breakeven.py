"""``prefetchpipe breakeven``: is the GPU faster for this at all, and from which size on?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from prefetchpipe.cli import results
from prefetchpipe.cli.charts.style import check_chart
from prefetchpipe.cli.doctor import torch_device
from prefetchpipe.cli.measure.crossover import Crossover
from prefetchpipe.cli.measure.curves import CPU_SIDES, GPU_SIDES, Curve, crossovers, measure_operation, missing_sides
from prefetchpipe.cli.measure.operations import DTYPES, OPERATIONS
from prefetchpipe.cli.terminal import (
    CliError,
    choices,
    console,
    note,
    only_json_on_stdout,
    print_json,
    progress,
    whole_numbers,
)

__all__ = ["breakeven"]

_SIZES = "32,64,128,256,512,1024,2048"


def breakeven(
    sizes: Annotated[str, typer.Option(help="Sizes n, separated by commas.")] = _SIZES,
    ops: Annotated[str, typer.Option(help=f"Of {', '.join(OPERATIONS)}.")] = ",".join(OPERATIONS),
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "float32",
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; default: what is there.")] = None,
    seconds: Annotated[float, typer.Option(help="Length of one timed window.", min=0.0, max=3600.0)] = 0.03,
    repeats: Annotated[int, typer.Option(help="Windows for each point.", min=1)] = 5,
    chart: Annotated[Path, typer.Option(help="Where the chart goes (PNG).")] = Path("breakeven.png"),
    no_chart: Annotated[bool, typer.Option("--no-chart", help="Draw none.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the results as JSON.")] = None,
    redraw: Annotated[Path | None, typer.Option("--from", help="Earlier results to show.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> None:
    """Time NumPy and torch on CPU and GPU, without and with the copies, over sizes; find the crossover."""
    target = None if no_chart else chart
    check_chart(target)
    results.check_out(out)
    if redraw is not None:
        result = results.load(redraw, "breakeven")
    else:
        names = choices("--ops", ops, tuple(OPERATIONS))
        numbers = whole_numbers("--sizes", sizes, minimum=1)
        if dtype not in DTYPES:
            raise CliError(f"--dtype: unknown {dtype!r}; allowed: {', '.join(DTYPES)}")
        where = torch_device(device)
        with only_json_on_stdout(active=as_json):
            result = _measured(names, numbers, dtype=dtype, device=where, seconds=seconds, repeats=repeats)
    curves, found = _read(result, redraw)
    if out is not None:
        results.save(result, out)
    if target is not None:
        from prefetchpipe.cli.charts.breakeven import draw

        draw(curves, found, headline=_headline(found, curves[0].sizes[-1]), where=_where(result), path=target)
        note(f"chart: {target}")
    if as_json:
        print_json(result)
    else:
        render(console(), curves, found, result["missing"])


def _measured(
    names: list[str], sizes: list[int], *, dtype: str, device: torch.device, seconds: float, repeats: int
) -> dict[str, Any]:
    curves: list[Curve] = []
    with progress("measuring", len(names) * len(sizes)) as advance:
        for name in names:
            try:
                curves += measure_operation(
                    name,
                    sizes,
                    dtype=dtype,
                    device=device,
                    seconds=seconds,
                    repeats=repeats,
                    done=lambda name=name: advance(name),  # type: ignore[misc] # bound per operation
                )
            except (RuntimeError, MemoryError) as error:
                text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                raise CliError(f"{name} with --dtype {dtype}: {text}", exit_code=1) from error
    options = {"sizes": sizes, "ops": names, "dtype": dtype, "seconds": seconds, "repeats": repeats}
    return results.document(
        "breakeven",
        options,
        device,
        missing=missing_sides(device, dtype),
        curves=[{"op": c.op, "side": c.side, "sizes": c.sizes, "seconds": c.seconds} for c in curves],
        crossovers={
            name: [{"faster": c.faster, "than": c.than, "kind": c.kind, "size": c.size} for c in found]
            for name, found in _crossovers(curves).items()
        },
    )


def _read(result: dict[str, Any], path: Path | None) -> tuple[list[Curve], dict[str, list[Crossover]]]:
    try:
        curves = [
            Curve(item["op"], item["side"], tuple(map(int, item["sizes"])), tuple(_times(item["seconds"])))
            for item in result["curves"]
        ]
        found = {name: [Crossover(**item) for item in items] for name, items in result["crossovers"].items()}
        if not curves or not set(found) <= set(OPERATIONS) or found != _crossovers(curves):
            raise ValueError("curves and crossovers do not belong together")
        dict(result["missing"])
        _where(result)
    except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise CliError(f"{path} is no results file of breakeven: {error!r}") from error
    return curves, found


def _times(seconds: Sequence[Sequence[float]]) -> list[tuple[float, ...]]:
    times = [tuple(map(float, repeats)) for repeats in seconds]
    if not all(repeats and min(repeats) > 0 for repeats in times):
        raise ValueError("a time that is none")
    return times


def _crossovers(curves: Sequence[Curve]) -> dict[str, list[Crossover]]:
    by_op = {op: [curve for curve in curves if curve.op == op] for op in dict.fromkeys(curve.op for curve in curves)}
    for curve in curves:
        sizes = by_op[curve.op][0].sizes
        if curve.side not in CPU_SIDES + GPU_SIDES or not sizes or sizes != curve.sizes or min(sizes) < 1:
            raise ValueError(f"no curve of {curve.op}: {curve.side!r} over {curve.sizes}")
        if len(curve.seconds) != len(sizes):
            raise ValueError(f"{len(curve.seconds)} times for {len(sizes)} sizes")
    return {op: crossovers(chosen) for op, chosen in by_op.items()}


def render(out: Console, curves: Sequence[Curve], found: dict[str, list[Crossover]], missing: dict[str, str]) -> None:
    """Print tables and crossovers for a person."""
    for name, crossings in found.items():
        chosen = [curve for curve in curves if curve.op == name]
        out.print(Text(f"{name}: {OPERATIONS[name].title}", style="bold"))
        table = Table(box=None, padding=(0, 2, 0, 0))
        table.add_column("n", justify="right")
        for curve in chosen:
            table.add_column(f"{curve.side}, ms", justify="right")
        for index, size in enumerate(chosen[0].sizes):
            best = min(curve.medians[index] for curve in chosen)
            cells = [curve.medians[index] for curve in chosen]
            table.add_row(str(size), *(Text(f"{t * 1e3:.4g}", style="bold" if t == best else "") for t in cells))
        out.print(table)
        for crossover in crossings:
            if crossover.kind != "not measured":
                out.print(f"  {_said(crossover)}")
        out.print()
    for side, why in missing.items():
        out.print(f"Not measured: {side} ({why}).")


def _said(crossover: Crossover) -> str:
    pair = f"{crossover.faster} against {crossover.than}"
    if crossover.kind == "at":
        return f"{pair}: faster from n = {crossover.size:.0f} on"
    if crossover.kind == "from the start":
        return f"{pair}: faster at every size measured"
    return f"{pair}: break-even not reached"


def _headline(found: dict[str, list[Crossover]], largest: int) -> str:
    """The chart's title: what the GPU with its copies needs, or without a GPU what torch needs, to be worth it."""
    chosen = {name: items for name, items in found.items() if items}
    with_copies = {name: items[-1] for name, items in chosen.items()}
    if any(crossover.kind != "not measured" for crossover in with_copies.values()):
        subject, by_op = "The GPU, copies included, is faster than the CPU", with_copies
    else:
        subject, by_op = "torch on the CPU is faster than NumPy", {name: items[0] for name, items in chosen.items()}
    said = [", ".join(f"{name} from n = {c.size:.0f}" for name, c in by_op.items() if c.size is not None)]
    for kind, words in (("from the start", "at every size"), ("not reached", f"not up to n = {largest}")):
        names = [name for name, crossover in by_op.items() if crossover.kind == kind]
        if names:
            said.append(f"{words}: {', '.join(names)}")
    parts = [part for part in said if part]
    return f"{subject}: {'; '.join(parts)}" if parts else "Time of one call over size; there is nothing to compare with"


def _where(result: dict[str, Any]) -> str:
    machine, options = result["machine"], result["options"]
    device = machine.get("gpu") or f"no GPU, so {len(CPU_SIDES)} of {len(CPU_SIDES) + len(GPU_SIDES)} sides"
    return (
        f"{device}; {machine['cpu']}, {machine['cores']} cores; {options['dtype']}; torch {result['torch']}; "
        f"{result['date'][:10]}. Median of {options['repeats']}, shaded: lowest to highest."
    )
