"""``prefetchpipe demo``: the quickstart, from wherever the package is installed."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from prefetchpipe.cli import results
from prefetchpipe.cli.doctor import torch_device
from prefetchpipe.cli.measure.quickstart import Outcome, train
from prefetchpipe.cli.terminal import console, only_json_on_stdout, print_json, progress

__all__ = ["demo"]


def demo(
    epochs: Annotated[int, typer.Option(help="Passes over the training data.", min=1)] = 20,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; default: what is there.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> None:
    """Train a small classifier on batches that arrive on the GPU (or, without one, on the CPU)."""
    where = torch_device(device)
    with only_json_on_stdout(active=as_json), progress("training", epochs) as advance:
        outcome = train(where, epochs=epochs, done=advance)
    if as_json:
        print_json(results.document("demo", {"epochs": epochs}, where, outcome=dataclasses.asdict(outcome)))
    else:
        render(outcome)


def render(outcome: Outcome) -> None:
    """Print it for a person."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_row("device", outcome.device)
    table.add_row("data", outcome.data)
    table.add_row("test accuracy", f"{outcome.test_accuracy:.3f}")
    table.add_row("training speed", f"{outcome.samples_per_second:,.0f} samples/s")
    table.add_row("stats", Text(outcome.stats))
    console().print(table)
