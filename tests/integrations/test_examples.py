"""The examples run, and learn something."""

from __future__ import annotations

import re
import runpy
from typing import Any

import pytest

from tests.integrations import accelerate_loops
from tests.integrations.support import ROOT, lightning_warnings, quiet_framework

pytestmark = [
    pytest.mark.slow,
    *(pytest.mark.filterwarnings(text) for text in lightning_warnings),
]


@pytest.fixture(autouse=True)
def own_state() -> Any:
    accelerate_loops.new_accelerator()
    yield
    accelerate_loops.new_accelerator()


def run(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    quiet_framework("lightning.pytorch", "lightning.fabric", "transformers")
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    return capsys.readouterr().out


def test_lightning(capsys: pytest.CaptureFixture[str]) -> None:
    out = run("lightning_digits.py", capsys)
    assert float(re.findall(r"accuracy +([\d.]+)", out)[-1]) > 0.9
    assert re.search(r"^batches +115 in", out, re.MULTILINE)  # 5 epochs of 23


def test_accelerate(capsys: pytest.CaptureFixture[str]) -> None:
    out = run("accelerate_digits.py", capsys)
    accuracy, total = re.findall(r"accuracy +([\d.]+) of (\d+)", out)[-1]
    assert float(accuracy) > 0.9
    assert int(total) == 359
    assert re.search(r"^batches +225 in", out, re.MULTILINE)  # 5 epochs of 45


def test_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    before, after = map(float, re.findall(r"loss +([\d.]+) -> ([\d.]+)", run("transformers_topics.py", capsys))[-1])
    assert after < before - 1
