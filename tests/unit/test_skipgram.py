"""The example of tables: a table four times larger than what the device may hold of it."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "skipgram.py"


@pytest.mark.slow
def test_it_trains_within_a_quarter_of_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["skipgram.py", "--device", "cpu", "--steps", "800"])
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(state)
    printed = capsys.readouterr().out
    table, budget = (int(text.replace(",", "")) for text in re.findall(r"([\d,]+) bytes", printed))
    assert table == 4 * budget
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", printed)]
    assert losses[1] < losses[0] - 0.3
    assert len(re.findall(r"^\w+ +\w+(, \w+){4}$", printed, re.MULTILINE)) == 6
