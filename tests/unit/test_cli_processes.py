"""The command line as a process: entry point, missing extra, signals, and what reaches standard output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRINTING = """
import os
import torch
def noisy(num_workers):
    print("python")
    os.write(1, b"descriptor\\n")
    return torch.utils.data.DataLoader(Noisy(), batch_size=2, num_workers=num_workers)
class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, index):
        print("worker", flush=True)
        return torch.ones(2)
def waiting():
    os.write(2, b"ready\\n")
    import threading
    threading.Event().wait()
"""


def start(*arguments, folder, code=None, **options):
    command = [sys.executable, *(["-c", code] if code else ["-m", "prefetchpipe"]), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def finished(process):
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.mark.slow
def test_without_the_extra_one_line_says_what_to_install(tmp_path):
    code = "import sys; sys.modules['typer'] = None; from prefetchpipe.cli import main; sys.exit(main(['doctor']))"
    status, out, err = finished(start(folder=tmp_path, code=code))
    assert (status, out) == (2, "")
    assert err == "error: the command line needs typer; install it with: pip install 'prefetchpipe[cli]'\n"


@pytest.mark.slow
def test_the_package_does_not_import_the_command_line(tmp_path):
    code = "import sys, prefetchpipe; print({'typer', 'rich', 'matplotlib'} & set(sys.modules))"
    assert finished(start(folder=tmp_path, code=code))[:2] == (0, "set()\n")


@pytest.mark.slow
def test_bad_input_exits_with_2_and_one_line(tmp_path):
    status, out, err = finished(start("sweep", "nowhere:f", folder=tmp_path))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: LOADER: 'nowhere:f': cannot import nowhere")


@pytest.mark.slow
def test_json_is_alone_on_stdout_whatever_loader_and_workers_write(tmp_path):
    (tmp_path / "printing.py").write_text(PRINTING)
    chosen = ("--no-chart", "--depths", 1, "--workers", "0,1", "--batches", 3, "--warm", 0, "--repeats", 1)
    status, out, err = finished(start("sweep", "printing:noisy", "--json", *chosen, folder=tmp_path))
    assert status == 0, err
    assert [point["num_workers"] for point in json.loads(out)["points"]] == [0, 1]
    assert {"python", "descriptor", "worker"} <= set(err.split())


@pytest.mark.slow
def test_ctrl_c_exits_with_130_and_says_nothing(tmp_path):
    (tmp_path / "printing.py").write_text(PRINTING)
    process = start("sweep", "printing:waiting", "--no-chart", folder=tmp_path)
    assert process.stderr.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert finished(process) == (130, "", "")
