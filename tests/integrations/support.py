"""Helpers for the tests of integrations: two processes that talk through gloo, and frameworks that print less."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support import script_environment

ROOT = Path(__file__).resolve().parents[2]

# What Lightning says by itself, with and without us: advice to the user of a real run.
lightning_warnings = [
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning",
    "ignore:You requested to overfit:UserWarning",
    "ignore:Total length of:UserWarning",
    "ignore:Trying to infer the `batch_size`:UserWarning",
    "ignore:.*isinstance.treespec, LeafSpec:FutureWarning",
]


def quiet_framework(*modules: str) -> None:
    for name in modules:
        logging.getLogger(name).setLevel(logging.ERROR)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_two_ranks(script: Path, folder: Path, *arguments: str, timeout: float = 90.0) -> list[Any]:
    """Run a script as the two ranks of one gloo group; what each wrote as JSON to the path in ``RESULT``."""
    port = str(_free_port())
    processes = []
    for rank in range(2):
        environment = script_environment(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE="2",
            LOCAL_WORLD_SIZE="2",
            NODE_RANK="0",
            GROUP_RANK="0",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            OMP_NUM_THREADS="1",
            CUDA_VISIBLE_DEVICES="",
            RESULT=str(folder / f"rank{rank}.json"),
        )
        log = (folder / f"rank{rank}.log").open("w")
        processes.append(
            subprocess.Popen(
                [sys.executable, str(script), *arguments],
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        )
        log.close()
    try:
        codes = [process.wait(timeout) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:  # one rank failed, and the other waits for it
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    logs = "\n".join((folder / f"rank{rank}.log").read_text()[-4000:] for rank in range(2))
    assert codes == [0, 0], logs
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
