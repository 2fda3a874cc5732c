"""torchrun, DistributedDataParallel and DistributedSampler: as the plain loop; contracts C1, C10, C13, C18.

Two CPU processes over gloo here; tests/gpu/test_gpu_types.py has the same on two GPUs over NCCL.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import script_environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[2]


def torchrun(script: Path, processes: int = 2, **environment: str) -> str:
    """What the ranks print; any warning in a rank is an error there."""
    # gloo ends a process this way now and then after all is done, also one that never heard of us (2 of 30 such runs).
    for _ in range(4):
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={processes}",
                str(script),
            ],
            check=False,
            capture_output=True,
            text=True,
            timeout=150,
            env=script_environment(**{"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::UserWarning"} | environment),
            stdin=subprocess.DEVNULL,
        )
        if "terminate called without an active exception" not in done.stderr:
            break
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_two_ranks_train_as_without_us() -> None:
    said = torchrun(ROOT / "tests" / "integrations" / "ddp_rank.py", CUDA_VISIBLE_DEVICES="")
    assert sorted(said.splitlines()) == ["RIGHT rank 0 of 2 on cpu", "RIGHT rank 1 of 2 on cpu"]


def test_the_example() -> None:
    said = torchrun(ROOT / "examples" / "ddp.py", CUDA_VISIBLE_DEVICES="")
    lines = {line[:16].strip(): line[16:] for line in said.splitlines()}
    assert lines["processes"] == "2, on cpu"
    assert lines["test images"] == "297"
    assert float(lines["test accuracy"]) > 0.85
