"""Where a run takes place: device, scale, and what goes into the results file about the machine."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

__all__ = ["Env", "describe_machine", "git_commit", "now", "versions"]

_DISTRIBUTIONS = (
    "torch", "numpy", "optree", "anyio", "cupy-cuda13x", "cupy-cuda12x", "accelerate", "lightning", "lightning-fabric",
    "timm", "torchtnt", "spdl", "spdl-io", "spdl-core", "prefetchpipe",
)  # fmt: skip


@dataclass(frozen=True)
class Env:
    """What rows and contenders need to know.

    Attributes:
        device: Where batches go, index resolved.
        small: Scaled-down batches, for machines where only the working of the suite is of interest.
        workers: Worker processes of the ``workers-*`` rows.
        limits: Filled by :func:`benchmarks.limits.measure`, rates in GB/s.
    """

    device: torch.device
    small: bool = False
    workers: int = 8
    limits: dict[str, Any] = field(default_factory=dict, compare=False)

    @classmethod
    def detect(cls, *, device: str | None = None, small: bool = False, workers: int = 8) -> Env:
        """The given device, else the current CUDA device, else the CPU."""
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if chosen.type == "cuda":
            index = getattr(chosen, "index", None)
            chosen = torch.device("cuda", torch.cuda.current_device() if index is None else index)
            torch.cuda.set_device(chosen)
        return cls(chosen, small=small, workers=workers)

    @property
    def cuda(self) -> bool:
        """Whether batches go to a GPU."""
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait for the consumer's stream only, so that copies in flight for later batches are not waited for."""
        if self.cuda:
            torch.cuda.current_stream(self.device).synchronize()

    def link_ms(self, nbytes: int) -> float:
        """Milliseconds that the link alone needs for ``nbytes``, at the rate measured in this run."""
        rate = self.limits.get("h2d_gb_per_s")
        return nbytes / rate / 1e6 if rate else 0.0


def describe_machine(env: Env) -> dict[str, Any]:
    """Hardware and system, as far as it can be asked for."""
    cores = len(os.sched_getaffinity(0))
    machine: dict[str, Any] = {
        "cores": cores,
        "cpu": _cpu_name(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch_threads": torch.get_num_threads(),
        "device": str(env.device),
        "quick": env.small,
    }
    if env.cuda:
        properties = torch.cuda.get_device_properties(env.device)
        machine |= {
            "gpu": properties.name,
            "gpu_memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "name": f"one {properties.name.removeprefix('NVIDIA ')}, {cores} cores{_link(env.device)}",
        }
    else:
        machine["name"] = f"no GPU, {cores} cores"
    return machine


def versions() -> dict[str, str]:
    """Installed versions of everything that takes part."""
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_commit() -> str:
    """The commit of the working tree, ``+`` appended when it has changes, or ``unknown``."""
    folder = Path(__file__).resolve().parent
    try:
        commit = _git(folder, "rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def now() -> str:
    """UTC, to the second."""
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _link(device: torch.device) -> str:
    """``, PCIe 5 x16``, or nothing where ``nvidia-smi`` does not say."""
    query = ["nvidia-smi", f"--id={device.index}", "--query-gpu=pcie.link.gen.max,pcie.link.width.max"]
    try:
        done = subprocess.run([*query, "--format=csv,noheader"], capture_output=True, text=True, check=True, timeout=20)
        generation, width = done.stdout.strip().split(", ")
    except (OSError, subprocess.SubprocessError, ValueError):
        return ""
    return f", PCIe {generation} x{width}"


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
