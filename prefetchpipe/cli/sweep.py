"""``prefetchpipe sweep module:function``: which batch size, depth and number of workers pay for this loader?"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
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
from prefetchpipe.cli.measure.grid import Difference, Point, compare, measure_grid
from prefetchpipe.cli.measure.nvml import Usage
from prefetchpipe.cli.measure.passes import EmptyLoaderError, Window
from prefetchpipe.cli.targets import axes_of, find, make_loader, said_by_user
from prefetchpipe.cli.terminal import (
    CliError,
    console,
    note,
    only_json_on_stdout,
    print_json,
    progress,
    whole_numbers,
)

__all__ = ["sweep"]

_OURS = (CliError, EmptyLoaderError)
_STYLES = {"better": "green", "worse": "bold red", "same within spread": "dim", "spread unknown": "dim"}


def sweep(
    loader: Annotated[str, typer.Argument(help="module:function or file.py:function; see docs/cli.md.")],
    batch_sizes: Annotated[str | None, typer.Option(help="Separated by commas; default 32,128,512.")] = None,
    depths: Annotated[str, typer.Option(help="Separated by commas.")] = "1,2,4",
    workers: Annotated[str | None, typer.Option(help="Separated by commas; default 0,2.")] = None,
    step: Annotated[str | None, typer.Option(help="module:function called with each batch.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; default: what is there.")] = None,
    batches: Annotated[int, typer.Option(help="Batches in each timed window.", min=1)] = 30,
    warm: Annotated[int, typer.Option(help="Batches before each window.", min=0)] = 5,
    repeats: Annotated[int, typer.Option(help="Windows for each point.", min=1)] = 3,
    chart: Annotated[Path, typer.Option(help="Where the chart goes (PNG).")] = Path("sweep.png"),
    no_chart: Annotated[bool, typer.Option("--no-chart", help="Draw none.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the results as JSON.")] = None,
    against: Annotated[Path | None, typer.Option("--compare", help="Results file of an earlier run.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> None:
    """Measure a loader of yours over batch sizes, depths and workers: table, chart, comparison with an earlier run."""
    target = None if no_chart else chart
    check_chart(target)
    results.check_out(out)
    before = None if against is None else results.load(against, "sweep")
    earlier = [] if before is None else _read(before, against)
    where = torch_device(device)
    depth_values = whole_numbers("--depths", depths, minimum=1)
    sizes = None if batch_sizes is None else whole_numbers("--batch-sizes", batch_sizes, minimum=1)
    counts = None if workers is None else whole_numbers("--workers", workers, minimum=0)
    with only_json_on_stdout(active=as_json):
        factory = find("LOADER", loader)
        work = None if step is None else find("--step", step)
        points = _grid(loader, axes_of(loader, factory), sizes, depth_values, counts)
        _measure(points, _maker(loader, factory), where, work, repeats=repeats, warm=warm, batches=batches)
    _stop_if_nothing_worked(points)
    differences = compare(earlier, points)
    options = {"loader": loader, "step": step, "batches": batches, "warm": warm, "repeats": repeats}
    result = results.document(
        "sweep",
        options,
        where,
        points=[dataclasses.asdict(point) for point in points],
        comparison=[dataclasses.asdict(difference) for difference in differences],
    )
    if out is not None:
        results.save(result, out)
    if target is not None:
        from prefetchpipe.cli.charts.sweep import draw

        draw(points, headline=_headline(points), where=_where(result), path=target)
        note(f"chart: {target}")
    if as_json:
        print_json(result)
    else:
        render(console(), points, differences, _changed(before, result))


def _stop_if_nothing_worked(points: Sequence[Point]) -> None:
    if not any(point.windows for point in points):
        reasons = dict.fromkeys(point.error for point in points)
        raise CliError(f"nothing could be measured: {'; '.join(reasons)}", exit_code=1)


def _grid(
    spec: str, axes: set[str], sizes: list[int] | None, depths: list[int], counts: list[int] | None
) -> list[Point]:
    for axis, option, given in (("batch_size", "--batch-sizes", sizes), ("num_workers", "--workers", counts)):
        if given is not None and axis not in axes:
            raise CliError(f"{option}: {spec!r} has no parameter {axis!r}; leave the option out, or add the parameter")
    chosen_sizes: Sequence[int | None] = (sizes or [32, 128, 512]) if "batch_size" in axes else [None]
    chosen_counts: Sequence[int | None] = (counts or [0, 2]) if "num_workers" in axes else [None]
    return [Point(size, depth, count) for count, size, depth in itertools.product(chosen_counts, chosen_sizes, depths)]


def _maker(spec: str, factory: Callable[..., Any]) -> Callable[[Point], Any]:
    def make(point: Point) -> Any:
        asked = {"batch_size": point.batch_size, "num_workers": point.num_workers}
        return make_loader(spec, factory, **{name: value for name, value in asked.items() if value is not None})

    return make


def _measure(
    points: list[Point],
    make: Callable[[Point], Any],
    device: torch.device,
    step: Callable[[Any], Any] | None,
    *,
    repeats: int,
    warm: int,
    batches: int,
) -> None:
    with progress("sweeping", len(points) * repeats) as advance:
        measure_grid(
            points,
            make,
            device,
            repeats=repeats,
            warm=warm,
            batches=batches,
            step=step,
            explain=lambda error: str(error) if isinstance(error, _OURS) else said_by_user(error),
            done=lambda point: advance(_named(point)),
        )


def _read(result: dict[str, Any], path: Path | None) -> list[Point]:
    try:
        points = []
        for item in result["points"]:
            windows = [Window(**{**window, "usage": Usage(**window["usage"])}) for window in item["windows"]]
            points.append(Point(**{**item, "windows": windows}))
        _where(result)
        compare(points, points)
    except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise CliError(f"{path} is no results file of sweep: {error!r}") from error
    return points


def render(out: Console, points: Sequence[Point], differences: Sequence[Difference], changed: Sequence[str]) -> None:
    """Print the table and the comparison for a person."""
    table = Table(title="Batches as the loop gets them", title_justify="left", box=None, padding=(0, 1, 0, 0))
    for name in ("workers", "batch", "depth", "ms/batch", "samples/s", "range", "GB/s", "waiting", "GPU", "memory"):
        table.add_column(name, justify="right", overflow="fold")  # no digit is cut off
    best = max((point for point in points if point.windows), key=_median_rate, default=None)
    for point in points:
        table.add_row(*_row(point), style="bold green" if point is best else "")
    out.print(table)
    for error in dict.fromkeys(point.error for point in points if point.error):
        where = [_named(point) for point in points if point.error == error]
        more = f" and {len(where) - 1} more" if len(where) > 1 else ""
        out.print(Text(f"{where[0]}{more}: {error}", style="red"))
    if best is not None:
        out.print(Text(f"\nMost samples a second: {_named(best)}."))
        if best.windows[-1].verdict:
            out.print(Text(best.windows[-1].verdict))
    if differences:
        _render_comparison(out, differences)
    for line in changed:
        out.print(Text(line, style="yellow"))


def _render_comparison(out: Console, differences: Sequence[Difference]) -> None:
    table = Table(title="\nAgainst the earlier run", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("workers", "batch", "depth", "samples/s then", "now", "now / then"):
        table.add_column(name, justify="right", overflow="fold")
    table.add_column("", overflow="fold")
    for difference in differences:
        size, depth, count = difference.key
        table.add_row(
            _number(count),
            _number(size),
            str(depth),
            f"{difference.before.median:,.0f}",
            f"{difference.now.median:,.0f}",
            f"{difference.ratio:.2f}",
            Text(difference.verdict, style=_STYLES[difference.verdict]),
        )
    out.print(table)


def _row(point: Point) -> list[str]:
    head = [_number(point.num_workers), _number(point.batch_size), str(point.depth)]
    ms, samples, rate = point.milliseconds(), point.samples_per_second(), point.gb_per_second()
    if ms is None or samples is None or rate is None:
        return [*head, "error", "-", "-", "-", "-", "-", "-"]
    waiting, percent, memory = point.wait_share(), point.gpu_percent(), point.memory_bytes()
    return [
        *head,
        f"{ms.median:.3g}",
        f"{samples.median:,.0f}",
        f"{samples.low:,.0f}-{samples.high:,.0f}",
        f"{rate.median:.3g}",
        "-" if waiting is None else f"{waiting:.0%}",
        "-" if percent is None else f"{percent:.0f} %",
        "-" if memory is None else f"{memory / (1 << 30):.1f} GiB",
    ]


def _changed(before: dict[str, Any] | None, now: dict[str, Any]) -> list[str]:
    """What makes the two runs hard to compare."""
    if before is None:
        return []
    pairs = [
        ("loader", before["options"].get("loader"), now["options"]["loader"]),
        ("step", before["options"].get("step"), now["options"]["step"]),
        *((name, before["machine"].get(name), now["machine"].get(name)) for name in ("cpu", "cores", "gpu", "device")),
        ("torch", before.get("torch"), now["torch"]),
    ]
    return [f"Not the same {name}: {old} then, {new} now." for name, old, new in pairs if old != new]


def _headline(points: Sequence[Point]) -> str:
    best = max(points, key=_median_rate)
    rate, samples = best.gb_per_second(), best.samples_per_second()
    if rate is None or samples is None:
        return "Nothing was measured"
    return f"Fastest with {_named(best)}: {samples.median:,.0f} samples/s, {rate.median:.3g} GB/s"


def _where(result: dict[str, Any]) -> str:
    machine, options = result["machine"], result["options"]
    step = f"step {options['step']}" if options["step"] else "no step"
    return (
        f"{options['loader']}, {step}; {machine.get('gpu', 'no GPU')}, {machine['cores']} cores; "
        f"torch {result['torch']}; {result['date'][:10]}. "
        f"Median of {options['repeats']} windows of {options['batches']} batches; bars: lowest to highest."
    )


def _median_rate(point: Point) -> float:
    rate = point.samples_per_second()
    return 0.0 if rate is None else rate.median


def _named(point: Point) -> str:
    parts = [f"batch size {point.batch_size}"] if point.batch_size is not None else []
    parts.append(f"depth {point.depth}")
    if point.num_workers is not None:
        parts.append(f"{point.num_workers or 'no'} worker{'s' if point.num_workers != 1 else ''}")
    return ", ".join(parts)


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)
