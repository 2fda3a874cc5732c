"""Import time of the package in fresh interpreters, torch and NumPy imported before."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.rows.base import Context
from benchmarks.schema import RowResult, Value

__all__ = ["ROWS"]

_TARGET_MS = 50.0
_PROGRAM = """
import time, numpy, torch
start = time.perf_counter()
import prefetchpipe
print((time.perf_counter() - start) * 1e3)
"""


class ImportTime:
    """The first interpreter warms the file cache and does not count."""

    name = "import"
    group = "measure"
    rank = 2
    title = "import time of the package without torch's own"

    def run(self, context: Context) -> RowResult:
        """See :class:`benchmarks.rows.base.Row`."""
        raw = []
        for _ in range(context.options.repeats + 1):
            done = subprocess.run(
                [sys.executable, "-c", _PROGRAM],
                capture_output=True,
                text=True,
                check=False,
                timeout=120,
                cwd=Path(__file__).resolve().parents[2],
            )
            if done.returncode:
                raise RuntimeError(f"the interpreter ended with {done.returncode}: {done.stderr.strip()[-300:]}")
            raw.append(float(done.stdout))
        median = statistics.median(raw[1:])
        value = Value("import prefetchpipe", median, "ms", f"<= {_TARGET_MS:.0f}", median <= _TARGET_MS, raw[1:])
        return RowResult(self.name, self.title, values=[value])


ROWS = (ImportTime(),)
