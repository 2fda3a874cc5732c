"""What a row is, and the rows that put loaders in front of contenders."""

from __future__ import annotations

import faulthandler
import sys
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks.environment import Env
from benchmarks.progress import Progress
from benchmarks.schema import RowResult
from benchmarks.sources import Source

__all__ = ["Context", "LoaderRow", "Options", "Row"]

_HANG_SECONDS = 240


@dataclass(frozen=True)
class Options:
    """What the command line chose.

    Attributes:
        seconds: Aimed-for seconds of each timed window.
        contenders: Names (or beginnings of names) to take; empty: all.
        variants: Further prefetchpipe contenders, each as its options.
        race: Check every contender of a loader row for wrong batches before it is timed.
    """

    repeats: int = 5
    seconds: float = 0.15
    regimes: tuple[str, ...] = ("transfer", "balanced", "compute")
    contenders: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    race: bool = True


@dataclass
class Context:
    """Everything a row gets to run."""

    env: Env
    options: Options
    progress: Progress
    missing: dict[str, str] = field(default_factory=dict)

    def watch(self) -> None:
        """A measurement starts: if it hangs, say where and end the process; the runner calls it off at the end."""
        if sys.__stderr__ is not None:
            faulthandler.dump_traceback_later(_HANG_SECONDS, exit=True, file=sys.__stderr__)


class Row(Protocol):
    """A row runs itself and says what it found."""

    name: str
    group: str
    rank: int
    title: str

    def run(self, context: Context) -> RowResult:
        """Measure."""


class LoaderRow:
    """A batch and a source; all contenders bring its batches to the device under each regime.

    Subclasses set the attributes and give data.

    Attributes:
        basis: What the compute of the balanced and compute-bound regimes goes by. ``link``: the bytes over the link
            or the source, whichever takes longer; ``loop``: what the best tuned plain loop takes, for batches whose
            cost is not in their bytes.
        warm: Steps before the window.
        least: Fewest steps in a window.
        most: Most steps in a window.
        regimes: Regimes that make sense here.
        tail: Steps after the window.
        drain: Passes run to their end.
        allowed: Contenders that take part, ``None``: all; with ``allowed_why`` for the others.
    """

    name = ""
    group = "loader"
    rank = 0
    title = ""
    basis = "link"
    warm = 8
    least = 20
    most = 20_000
    tail = 4
    drain = True
    regimes: tuple[str, ...] = ("transfer", "balanced", "compute")
    allowed: tuple[str, ...] | None = None
    allowed_why = ""

    def source(self, env: Env) -> Source:
        """A new source over the data of this row, which is made on first use."""
        raise NotImplementedError

    def race_source(self, env: Env, count: int) -> tuple[Source, list[int]]:
        """``count`` batches, each filled with one value, and those values in order; small where the source is slow."""
        raise NotImplementedError

    def example(self, env: Env) -> Any:
        """One host batch."""
        return next(iter(self.source(env).loader(pin=False)))

    def window(self, env: Env) -> tuple[int, int]:
        """Steps before and after the window."""
        return self.warm, self.tail

    def floor(self, env: Env) -> tuple[float, str]:
        """Milliseconds per batch that this source takes at best, whoever asks, and what that is."""
        return 0.0, "batches are ready"

    def release(self) -> None:
        """Drop the data."""

    def run(self, context: Context) -> RowResult:
        """See :class:`Row`."""
        from benchmarks.runner import run_loader_row

        return run_loader_row(self, context)
