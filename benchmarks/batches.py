"""Walking batches, written for the suite so that measuring does not go through the code that is measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["filled", "leaves", "map_leaves", "nbytes"]


def map_leaves(function: Callable[[torch.Tensor], Any], batch: Any) -> Any:
    """``batch`` with ``function`` applied to every tensor; tuples, lists and dicts are rebuilt."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {key: map_leaves(function, value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)([map_leaves(function, value) for value in batch])
    return batch


def leaves(batch: Any) -> list[torch.Tensor]:
    """All tensors of ``batch``, in order."""
    found: list[torch.Tensor] = []
    map_leaves(found.append, batch)
    return found


def nbytes(batch: Any) -> int:
    """Bytes of all tensors of ``batch``."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(batch))


def filled(batch: Any, value: int) -> Any:
    """A batch of the same shapes and dtypes with every element equal to ``value``."""
    return map_leaves(lambda leaf: torch.full_like(leaf, value), batch)
