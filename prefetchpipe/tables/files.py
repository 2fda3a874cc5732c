"""Tables in files: ``.npy`` and ``.safetensors``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from prefetchpipe.tables.memory import numpy_dtype

__all__ = ["read_rows", "save_rows"]

_KEY = "rows"


def save_rows(path: Path, rows: torch.Tensor) -> None:
    """Write ``rows``; a dtype that NumPy lacks goes into ``.npy`` as unsigned integers of its width."""
    if path.suffix == ".npy":
        wanted = numpy_dtype(rows.dtype)
        flat = rows.view(getattr(torch, str(wanted))) if wanted.kind == "u" else rows
        np.save(path, flat.numpy())
    elif path.suffix == ".safetensors":
        _safetensors().save_file({_KEY: rows}, path)
    else:
        raise _unknown(path)


def read_rows(path: Path, dtype: torch.dtype | None) -> torch.Tensor:
    """The rows in ``path``, mapped where the format allows."""
    if path.suffix == ".npy":
        array = np.load(path, mmap_mode="c")  # copy-on-write: torch wants writable memory, the file stays as it is
        rows = torch.from_numpy(np.asarray(array))
        rows = rows if dtype is None else rows.view(dtype)
    elif path.suffix == ".safetensors":
        tensors = _safetensors().load_file(path)
        if len(tensors) != 1:
            raise ValueError(f"{path} holds {len(tensors)} tensors; one is wanted")
        (rows,) = tensors.values()
        if dtype is not None and rows.dtype is not dtype:
            raise ValueError(f"{path} holds {rows.dtype}, not {dtype}")
    else:
        raise _unknown(path)
    if rows.dim() != 2:  # noqa: PLR2004 - rows and columns
        raise ValueError(f"{path} holds a tensor of shape {tuple(rows.shape)}; a matrix is wanted")
    return rows


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("for .safetensors files install prefetchpipe[tables] (or safetensors)") from error
    return safetensors.torch


def _unknown(path: Path) -> ValueError:
    return ValueError(f"path must end in .npy or .safetensors, not {path.suffix!r} ({path})")
