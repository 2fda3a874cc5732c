"""``prefetchpipe doctor``: what this machine can do, what is wrong with it, and options to start from."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import torch
import typer
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from prefetchpipe.cli import results
from prefetchpipe.cli.measure.advice import Finding, Recommendation, findings, recommendations
from prefetchpipe.cli.measure.checkup import STEPS, Checkup, checkup
from prefetchpipe.cli.measure.timing import Spread
from prefetchpipe.cli.terminal import CliError, console, only_json_on_stdout, print_json, progress
from prefetchpipe.device import resolve

__all__ = ["doctor", "torch_device"]

_NARROW = 70  # columns below which a finding's name stands before its text
_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


def doctor(
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; default: what is there.")] = None,
    measure: Annotated[bool, typer.Option(help="Measure copies, which takes some seconds.")] = True,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if there is a problem.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> None:
    """Say what this machine can do, what is wrong with it, and which depth, workers and copy threads to start from."""
    where = torch_device(device)
    with only_json_on_stdout(active=as_json), progress("looking at", STEPS) as done:
        found = checkup(where, measure=measure, done=done)
    said, advice = findings(found), recommendations(found)
    if as_json:
        options = {"device": device, "measure": measure}
        content = {
            "checkup": dataclasses.asdict(found),
            "findings": [dataclasses.asdict(finding) for finding in said],
            "recommendations": [dataclasses.asdict(recommendation) for recommendation in advice],
        }
        print_json(results.document("doctor", options, where, **content))
    else:
        render(console(), found, said, advice)
    if strict and any(finding.severity == "problem" for finding in said):
        raise typer.Exit(1)


def torch_device(device: str | None) -> torch.device:
    """The device that an option names, index resolved.

    Raises:
        CliError: It is not there.
    """
    try:
        return resolve(device).torch_device
    except (TypeError, ValueError) as error:
        raise CliError(f"--device: {error}") from None


def render(out: Console, found: Checkup, said: list[Finding], advice: list[Recommendation]) -> None:
    """Print it for a person."""
    out.print(Text(_headline(found), style="bold"))
    out.print(_rates(found))
    is_narrow = out.width < _NARROW
    table = Table(title="Findings", title_justify="left", box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    if not is_narrow:
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in said:
        text = Text(f"{finding.name}: {finding.says}" if is_narrow else finding.says)
        if finding.do:
            text.append(f"\n-> {finding.do}", style="cyan")
        names = [] if is_narrow else [finding.name]
        table.add_row(Text(finding.severity, style=_STYLES[finding.severity]), *names, text)
    out.print(table)
    start = Table(title="Start with", title_justify="left", box=None, padding=(0, 2, 0, 0), show_header=False)
    start.add_column(no_wrap=True)
    start.add_column(overflow="fold")
    for recommendation in advice:
        start.add_row(f"[bold]{recommendation.option}={recommendation.value}[/bold]", escape(recommendation.why))
    out.print(Text())
    out.print(start)


def _headline(found: Checkup) -> str:
    cores = found.machine.usable_cores
    what = f"{found.machine.cpu}, {cores} usable core{'s' if cores > 1 else ''}"
    if found.gpu is None:
        return f"No GPU in use: batches stay on the CPU ({what})."
    return f"{found.gpu.name} ({found.gpu.device}), {found.gpu.memory_bytes / (1 << 30):.0f} GiB; {what}."


def _rates(found: Checkup) -> Any:
    table = Table(title="Measured, GB/s", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("what")
    table.add_column("median", justify="right")
    table.add_column("range", justify="right")
    if found.gpu is not None and found.gpu.link is not None:
        link = found.gpu.link
        size = f"{link.nbytes >> 20} MiB"
        _add(table, f"host to device, pinned, {size}", link.pinned_h2d)
        _add(table, f"host to device, pageable, {size}", link.pageable_h2d)
        _add(table, f"device to host, pinned, {size}", link.pinned_d2h)
        _add(table, f"device to host, pageable, {size}", link.pageable_d2h)
    for threads, rate in found.packing.items():
        _add(table, f"packing into host memory, {threads} thread{'s' if threads > 1 else ''}", rate)
    if not table.row_count:
        return Text("")
    return Group(Text(), table, Text())


def _add(table: Table, what: str, rate: Spread) -> None:
    table.add_row(what, f"{rate.median:.1f}", f"{rate.low:.1f} - {rate.high:.1f}")
