"""Whether torch, the driver and CuPy fit together."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass

import torch

from prefetchpipe import native
from prefetchpipe.device.cuda import cupy_status

__all__ = ["Software", "read_software"]

_CUPY_WHEELS = ("cupy-cuda12x", "cupy-cuda13x", "cupy-cuda11x", "cupy")


@dataclass(frozen=True, slots=True)
class Software:
    """Versions, and what CuPy says."""

    torch: str
    torch_cuda: str | None
    """CUDA version that torch was built for; None: a build without CUDA."""
    cuda_available: bool
    cupy_wheels: tuple[str, ...]
    """Installed CuPy distributions with their versions."""
    cupy_wanted: str | None
    """The wheel that fits torch; None without CUDA."""
    cupy: str
    """Version where it works; empty otherwise."""
    cupy_problem: str
    """Why it does not; empty also where nobody asked, without a GPU."""
    without_native: str
    """Why batches are not packed by native copies; empty: they are."""


def read_software() -> Software:
    """Read it now; CuPy is imported only where torch sees a GPU."""
    cuda = torch.version.cuda
    available = torch.cuda.is_available()
    status = cupy_status() if available else ""
    works = re.fullmatch(r"CuPy (\d\S*)", status)
    return Software(
        torch=torch.__version__,
        torch_cuda=cuda,
        cuda_available=available,
        cupy_wheels=tuple(f"{name} {version}" for name in _CUPY_WHEELS if (version := _installed(name))),
        cupy_wanted=f"cupy-cuda{cuda.partition('.')[0]}x" if cuda else None,
        cupy=works[1] if works else "",
        cupy_problem="" if works else status,
        without_native=native.why_not(),
    )


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
