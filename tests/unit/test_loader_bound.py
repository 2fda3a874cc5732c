"""The example of docs/loader-bound.md runs, and trains the same model at each step."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import script_environment

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_each_run_of_the_example_trains_the_same() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "loader_bound.py"), "--samples", "64", "--epochs", "2"],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
        env=script_environment(),
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^=== (\d)", done.stdout, re.MULTILINE) == ["1", "2", "3", "4"]
    losses = re.findall(r"loss ([\d.]+)", done.stdout)
    assert len(losses) == 4
    assert len(set(losses)) == 1
    assert done.stdout.count("Too few batches to tell: ") == 4
