"""Tables in files: ``.npy`` and ``.safetensors``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from prefetchpipe.batch.move import array_to_tensor
from prefetchpipe.tables.memory import beside, numpy_dtype

__all__ = ["read_rows", "save_rows"]

_KEY = "rows"


def save_rows(path: Path, rows: torch.Tensor) -> None:
    """Write ``rows``; a dtype that NumPy lacks goes into ``.npy`` as unsigned integers of its width.

    Beside ``path``, whose place it takes at the end: a table may map the file that is there, and truncating it would
    turn that table into zeros.
    """
    path = path.resolve()
    if path.suffix not in (".npy", ".safetensors"):
        raise _unknown(path)
    part = beside(path)
    try:
        if path.suffix == ".npy":
            wanted = numpy_dtype(rows.dtype)
            flat = rows.view(getattr(torch, str(wanted))) if wanted.kind == "u" else rows
            with part.open("wb") as file:
                np.save(file, flat.numpy())
        else:
            _safetensors().save_file({_KEY: rows}, part)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def read_rows(path: Path, dtype: torch.dtype | None) -> torch.Tensor:
    """The rows in ``path``, mapped where the format allows."""
    if path.suffix == ".npy":
        array = np.load(path, mmap_mode="c")  # copy-on-write: torch wants writable memory, the file stays as it is
        found = array_to_tensor(np.asarray(array))
        if found is None:
            raise ValueError(f"{path} holds {array.dtype}; numbers that torch has are wanted")
        rows = found
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
