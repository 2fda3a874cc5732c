"""``prefetchpipe trace module:function``: a few batches on a time line, for Perfetto and as a chart."""

from __future__ import annotations

import dataclasses
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
from prefetchpipe.cli.measure.timeline import busy_shares, headline, hidden_share, lanes_of, window
from prefetchpipe.cli.targets import axes_of, find, make_loader, said_by_user
from prefetchpipe.cli.terminal import CliError, console, note, only_json_on_stdout, print_json, progress
from prefetchpipe.trace import Span, Trace, record_trace

__all__ = ["trace"]


def trace(
    loader: Annotated[str, typer.Argument(help="module:function or file.py:function; see docs/cli.md.")],
    step: Annotated[str | None, typer.Option(help="module:function called with each batch.")] = None,
    transform: Annotated[str | None, typer.Option(help="module:function run on the device.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="For the loader function.", min=1)] = None,
    workers: Annotated[int | None, typer.Option(help="For the loader function.", min=0)] = None,
    batches: Annotated[int, typer.Option(help="Batches recorded.", min=1)] = 12,
    depth: Annotated[int, typer.Option(help="Batches copied ahead.", min=1)] = 2,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; default: what is there.")] = None,
    out: Annotated[Path, typer.Option(help="Trace for https://ui.perfetto.dev or chrome://tracing.")] = Path(
        "trace.json"
    ),
    chart: Annotated[Path, typer.Option(help="Where the chart goes (PNG).")] = Path("trace.png"),
    no_chart: Annotated[bool, typer.Option("--no-chart", help="Draw none.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> None:
    """Record a few batches of a loader of yours: who waits for whom, as a Perfetto trace and as a chart."""
    target = None if no_chart else chart
    check_chart(target)
    results.check_out(out)
    where = torch_device(device)
    with only_json_on_stdout(active=as_json):
        factory = find("LOADER", loader)
        chosen = _chosen(loader, axes_of(loader, factory), batch_size, workers)
        work = None if step is None else find("--step", step)
        change = None if transform is None else find("--transform", transform)
        source = make_loader(loader, factory, **chosen)
        recorded = _record(loader, source, where, batches=batches, step=work, depth=depth, transform=change)
    assert recorded.stats is not None, "the recording has ended"
    spans = list(recorded.spans)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        recorded.save(out)
    except OSError as error:
        raise CliError(f"--out: cannot write {out}: {error.strerror}") from error
    note(f"trace: {out} (open it at https://ui.perfetto.dev)")
    options = {"loader": loader, "step": step, "transform": transform, "batches": batches, "depth": depth, **chosen}
    result = results.document(
        "trace",
        options,
        where,
        spans=[dataclasses.asdict(span) for span in spans],
        busy_shares=busy_shares(spans),
        hidden_share=hidden_share(spans),
    )
    if target is not None:
        from prefetchpipe.cli.charts.timeline import draw

        shown = window(spans)
        draw(shown, headline=headline(shown), where=_where(result, shown), path=target)
        note(f"chart: {target}")
    if as_json:
        print_json(result)
    else:
        render(console(), spans, recorded.stats.verdict)


def _chosen(spec: str, axes: set[str], batch_size: int | None, workers: int | None) -> dict[str, int]:
    chosen = {}
    for axis, option, value in (("batch_size", "--batch-size", batch_size), ("num_workers", "--workers", workers)):
        if value is None:
            continue
        if axis not in axes:
            raise CliError(f"{option}: {spec!r} has no parameter {axis!r}; leave the option out, or add the parameter")
        chosen[axis] = value
    return chosen


def _record(
    spec: str,
    source: Any,
    device: torch.device,
    *,
    batches: int,
    step: Callable[[Any], Any] | None,
    depth: int,
    transform: Callable[[Any], Any] | None,
) -> Trace:
    taken = 0
    with progress("recording", batches) as advance:

        def counted(batch: Any) -> None:
            nonlocal taken
            if step is not None:
                step(batch)
            taken += 1
            advance("")

        try:
            recorded = record_trace(source, device, batches=batches, step=counted, depth=depth, transform=transform)
        except (Exception, SystemExit) as error:
            raise CliError(f"{spec!r} or its step raised {said_by_user(error)}", exit_code=1) from error
    if not taken:
        raise CliError(f"{spec!r}: the loader gave no batch", exit_code=1)
    return recorded


def render(out: Console, spans: Sequence[Span], verdict: str) -> None:
    """Print what each lane did, for a person."""
    shares = busy_shares(spans)
    table = Table(title="Lanes", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("lane")
    for name in ("busy", "spans", "mean ms", "longest ms"):
        table.add_column(name, justify="right")
    for lane in lanes_of(spans):
        times = [span.seconds * 1e3 for span in spans if span.lane == lane]
        table.add_row(
            lane, f"{shares[lane]:.0%}", str(len(times)), f"{sum(times) / len(times):.3g}", f"{max(times):.3g}"
        )
    out.print(table)
    out.print(Text(f"\n{headline(spans)}."))
    out.print(Text(verdict))


def _where(result: dict[str, Any], shown: Sequence[Span]) -> str:
    machine, options = result["machine"], result["options"]
    numbers = sorted({span.batch for span in shown})
    return (
        f"{options['loader']}, step {options['step'] or 'none'}, depth {options['depth']}; batches {numbers[0]} to "
        f"{numbers[-1]}; {machine.get('gpu', 'no GPU')}, {machine['cores']} cores; torch {result['torch']}; "
        f"{result['date'][:10]}"
    )
