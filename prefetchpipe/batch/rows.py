"""Leaves that are not there yet: rows that are written straight to where the batch is packed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["Gathered", "Rows", "Stacked", "copy_all"]


class Rows:
    """Stands for a contiguous CPU tensor of ``shape`` and ``dtype`` that :meth:`fill` writes."""

    __slots__ = ("dtype", "shape")

    is_cpu = True

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype

    def fill(self, out: torch.Tensor) -> None:
        """Write the values into ``out``, a contiguous CPU tensor of this shape and dtype."""
        raise NotImplementedError

    def numel(self) -> int:
        """As a tensor's."""
        return self.shape.numel()

    def stride(self) -> tuple[int, ...]:
        """As a contiguous tensor's."""
        return tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.shape)))

    def clone(self) -> torch.Tensor:
        """The tensor itself."""
        out = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.fill(out)
        return out


class Gathered(Rows):
    """``tensor[index]``.

    Args:
        tensor: At least one dimension.
        index: One-dimensional ``int64``, every value within the first dimension.
    """

    __slots__ = ("_index", "_tensor")

    def __init__(self, tensor: torch.Tensor, index: torch.Tensor) -> None:
        super().__init__(torch.Size((len(index), *tensor.shape[1:])), tensor.dtype)
        self._tensor = tensor
        self._index = index

    def fill(self, out: torch.Tensor) -> None:
        """See :class:`Rows`."""
        torch.index_select(self._tensor, 0, self._index, out=out)


class Stacked(Rows):
    """``torch.stack(samples)``.

    Args:
        samples: CPU tensors of one shape and dtype.
    """

    __slots__ = ("samples",)

    def __init__(self, samples: Sequence[torch.Tensor]) -> None:
        super().__init__(torch.Size((len(samples), *samples[0].shape)), samples[0].dtype)
        self.samples = samples

    def fill(self, out: torch.Tensor) -> None:
        """See :class:`Rows`."""
        torch.stack(tuple(self.samples), out=out)

    def split(self, out: torch.Tensor, count: int) -> tuple[list[torch.Tensor], list[Stacked]]:
        """Parts of ``out``, at most ``count``, and what fills each."""
        size = -(-len(self.samples) // count)
        samples = [self.samples[start : start + size] for start in range(0, len(self.samples), size)]
        return list(out.split(size)), [Stacked(part) for part in samples]


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[Any]) -> None:
    """``target.copy_(source)`` for all, and ``source.fill(target)`` for rows."""
    if not any(isinstance(source, Rows) for source in sources):
        torch._foreach_copy_(list(targets), list(sources))
        return
    for target, source in zip(targets, sources, strict=True):
        if isinstance(source, Rows):
            source.fill(target)
        else:
            target.copy_(source)
