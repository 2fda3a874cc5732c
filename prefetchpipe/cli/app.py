"""The commands, and how each of them ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from prefetchpipe import __version__
from prefetchpipe.cli import bench, breakeven, demo, doctor, sweep, trace
from prefetchpipe.cli.terminal import CliError, note

__all__ = ["app"]

_INTERRUPTED = 130


class _Commands(TyperGroup):
    """Turns an error of ours into one line, and Ctrl-C into a quiet end."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().make_context(*args, **kwargs)
        except Exception as error:  # an option before the command
            _end_usage(error, ())
            raise

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CliError as error:
            note(f"error: {error}")
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            raise typer.Exit(_INTERRUPTED) from None
        except Exception as error:
            _end_usage(error, [name for name in (ctx.invoked_subcommand,) if name in self.commands])
            raise


def _end_usage(error: Exception, command: Sequence[str]) -> None:
    """End with one line, if ``error`` is a usage error of click, or of the copy of it in typer."""
    said = getattr(error, "format_message", None)
    if said is not None and said():
        note(f"error: {' '.join(said().split())} (see: {' '.join(('prefetchpipe', *command, '--help'))})")
        raise typer.Exit(2) from None


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"prefetchpipe {__version__}")
        raise typer.Exit


def _options(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Batches that are already on the GPU: see what this machine, your loader and your step do."""


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    callback=_options,
)
app.command("demo")(demo.demo)
app.command("bench", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(bench.bench)
app.command("doctor")(doctor.doctor)
app.command("breakeven")(breakeven.breakeven)
app.command("sweep")(sweep.sweep)
app.command("trace")(trace.trace)
