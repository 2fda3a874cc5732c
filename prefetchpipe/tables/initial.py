"""What the rows of a table start with, and values that users give as arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from prefetchpipe.batch.move import array_to_tensor

__all__ = ["Init", "as_values", "fill_rows"]

Init = str | Callable[[torch.Tensor], Any] | torch.Tensor | np.ndarray | None


def as_values(values: Any) -> torch.Tensor:
    """A tensor, or an array or sequence as one.

    Raises:
        ValueError: No numbers.
    """
    if isinstance(values, torch.Tensor):
        return values.detach().resolve_conj().resolve_neg()  # their bytes are moved
    tensor = array_to_tensor(np.asarray(values))
    if tensor is None:
        raise ValueError(f"values must be numbers, not {values!r}")
    return tensor


def fill_rows(rows: torch.Tensor, init: Init) -> None:
    """Fill ``rows`` as ``init`` says.

    Raises:
        TypeError: ``init`` is nothing that is known.
        ValueError: It has another shape.
    """
    if init is None or isinstance(init, str):
        rows.zero_()
    elif isinstance(init, (torch.Tensor, np.ndarray)):
        source = as_values(init)
        if tuple(source.shape) != tuple(rows.shape):
            raise ValueError(f"init must have shape {tuple(rows.shape)}, not {tuple(source.shape)}")
        rows.copy_(source)
    elif callable(init):
        init(rows)
    else:
        raise TypeError(f"init must be None, 'zeros', a callable, a tensor or an array, not {init!r}")
