"""What a contender is."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.environment import Env
from benchmarks.sources import Source

__all__ = ["Contender", "Prepared"]


@dataclass
class Prepared:
    """A contender over one source, iterated once per pass."""

    batches: Iterable[Any]
    close: Callable[[], None] | None = None
    stats: Callable[[], Any] | None = None


class Contender:
    """One way to bring batches to the device, as its own documentation recommends it.

    Attributes:
        name: As in the results.
        rank: Place in tables, ours last.
        needs: Module that must be importable, ``None``: nothing but torch.
        cpu: Works for the CPU as a device too.
        depths: Numbers of batches ahead that can be chosen; the first is the default.
        variant: A variant of ours made on the command line.
    """

    name = ""
    rank = 50
    needs: str | None = None
    cpu = False
    depths: tuple[int, ...] = ()
    variant = False

    def missing(self, env: Env) -> str | None:
        """Why this contender cannot take part in this run at all, ``None`` if it can."""
        if not self.cpu and not env.cuda:
            return "needs a CUDA device"
        if self.needs is not None:
            try:
                importlib.import_module(self.needs)
            except Exception as error:  # a broken installation is a reason, not an end
                return f"{self.needs} cannot be imported: {type(error).__name__}: {error}"
        return None

    def unfit(self, source: Source, example: Any) -> str | None:
        """Why it does not take this row's batches, ``None`` if it does."""
        return None

    def prepare(self, source: Source, env: Env, *, depth: int | None = None, transform: Any = None) -> Prepared:
        """Set up over ``source``; no batch is read yet.

        Args:
            source: This contender's own source.
            env: Where to.
            depth: Batches ahead, one of ``depths``; ``None``: the default.
            transform: On the device; only for contenders of ours.
        """
        raise NotImplementedError
