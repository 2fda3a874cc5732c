"""What all commands share: one-line errors, output on the right stream, progress, lists in options."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["CliError", "choices", "console", "note", "only_json_on_stdout", "print_json", "progress", "whole_numbers"]

_PLAIN_WIDTH = 120  # columns where the output is no terminal


class CliError(Exception):
    """Ends the command with one line on standard error.

    Args:
        message: What is wrong and what is allowed.
        exit_code: 2 for bad input, 1 for work that failed.
    """

    def __init__(self, message: str, *, exit_code: int = 2) -> None:
        super().__init__(" ".join(message.split()))
        self.exit_code = exit_code


def console() -> Console:
    """Standard output."""
    return _console(stderr=False)


def note(text: str) -> None:
    """One line on standard error."""
    _console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)


def print_json(document: dict[str, Any]) -> None:
    """The one document of ``--json``."""
    sys.stdout.write(json.dumps(document, indent=1, allow_nan=False) + "\n")
    sys.stdout.flush()


@contextmanager
def only_json_on_stdout(*, active: bool) -> Iterator[None]:
    """Send to standard error whatever anybody prints, the user's loader and its worker processes included.

    Args:
        active: False does nothing.
    """
    if not active:
        yield
        return
    saved = None
    with suppress(OSError, ValueError):  # no file behind the stream
        sys.stdout.flush()
        saved = os.dup(1)
        os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if saved is not None:
            os.dup2(saved, 1)
            os.close(saved)


@contextmanager
def progress(description: str, total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on standard error, where that is a terminal.

    Args:
        description: What is going on.
        total: Steps in all.

    Yields:
        A function to call after each step, with what comes next.
    """
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    out = _console(stderr=True)
    bar = Progress(*columns, console=out, transient=True, disable=not out.is_terminal)
    with bar:
        task = bar.add_task(description, total=total)

        def advance(what: str = "") -> None:
            bar.update(task, advance=1, description=f"{description} {what}".rstrip())

        yield advance


def choices(option: str, text: str, allowed: Sequence[str]) -> list[str]:
    """A comma-separated list of known names, each once.

    Raises:
        CliError: An unknown name, or none at all.
    """
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in allowed]
    if unknown or not names:
        said = ", ".join(map(repr, unknown)) or repr(text)
        raise CliError(f"{option}: unknown {said}; allowed: {', '.join(allowed)}")
    return names


def whole_numbers(option: str, text: str, *, minimum: int) -> list[int]:
    """A comma-separated list of whole numbers, sorted, each once.

    Raises:
        CliError: Something else, a number below ``minimum``, or none at all.
    """
    allowed = f"allowed: whole numbers of at least {minimum}, separated by commas"
    try:
        numbers = sorted({int(part) for part in text.split(",") if part.strip()})
    except ValueError:
        raise CliError(f"{option}: {text!r}; {allowed}") from None
    if not numbers or numbers[0] < minimum:
        raise CliError(f"{option}: {text!r}; {allowed}")
    return numbers


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else _PLAIN_WIDTH
    return Console(stderr=stderr, width=width, highlight=False)
