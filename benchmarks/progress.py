"""Progress on standard error: coloured with rich where it is installed, plain otherwise."""

from __future__ import annotations

import sys
import time

__all__ = ["Progress"]


class Progress:
    """Says what is being measured, with the seconds since the start."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._start = time.perf_counter()
        self._console = None
        try:
            from rich.console import Console
        except ImportError:
            return
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)

    def say(self, text: str, *, style: str = "") -> None:
        """Print one line."""
        if self._quiet:
            return
        line = f"{time.perf_counter() - self._start:7.1f} s  {text}"
        if self._console is None:
            print(line, file=sys.stderr, flush=True)
        else:
            self._console.print(line, style=style, markup=False)
