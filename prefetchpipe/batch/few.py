"""The layout of a batch of few contiguous leaves: cheap to make, for batches whose shapes change every time."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch

from prefetchpipe.batch.layout import ALIGNMENT, Alloc, Empty, is_packable
from prefetchpipe.batch.rows import Rows

__all__ = ["FewLeaves"]

_FEW = 4
_SPLIT_BYTES = 512 << 10
"""From here on a leaf is packed as bytes: torch splits a copy between threads by the number of its elements."""

_LARGE_BYTES = 32 << 20
"""Beyond this the full layout costs nothing that shows; what is packed in pieces needs it."""


class FewLeaves:
    """Each leaf has device memory of its own.

    Making a full :class:`~prefetchpipe.batch.layout.Layout` may take longer than a batch of a few token tensors takes
    on the wire.

    Args:
        leaves: Leaves for which :meth:`suits` holds.

    Attributes:
        nbytes: Bytes of the slot that holds the batch.
        count: Number of leaves.
    """

    __slots__ = ("_leaves", "_spans", "count", "nbytes")

    slab = -1

    def __init__(self, leaves: Sequence[Any]) -> None:
        self._leaves = [(leaf.shape, leaf.stride(), leaf.dtype) for leaf in leaves]
        self._spans: list[tuple[int, int]] = []
        self.count = len(leaves)
        position = 0
        for leaf in leaves:
            start = -(-position // ALIGNMENT) * ALIGNMENT
            position = start + leaf.nbytes
            self._spans.append((start, position))
        self.nbytes = position

    @staticmethod
    def suits(leaves: Sequence[Any], storages: Sequence[int]) -> bool:
        """Whether these leaves are few, contiguous, not empty, not large, and share nothing."""
        return (
            len(leaves) <= _FEW
            and len(set(storages)) == len(leaves)
            and all(
                not isinstance(leaf, Rows)
                and is_packable(leaf)
                and leaf.is_contiguous()
                and leaf.dim()
                and leaf.numel()
                for leaf in leaves
            )
            and sum(leaf.nbytes for leaf in leaves) < _LARGE_BYTES
        )

    def allocate(self, empty: Empty, alloc: Alloc) -> tuple[list[torch.Tensor], list[torch.Tensor]]:  # noqa: ARG002
        """See :meth:`prefetchpipe.batch.layout.Layout.allocate`."""
        out = [empty(shape, stride, dtype) for shape, stride, dtype in self._leaves]
        return out, out

    def targets(self, arrived: list[torch.Tensor], memory: list[torch.Tensor]) -> list[torch.Tensor]:  # noqa: ARG002
        """See :meth:`prefetchpipe.batch.layout.Layout.targets`."""
        return self.sources(arrived)

    def slot_views(self, slot: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """See :meth:`prefetchpipe.batch.layout.Layout.slot_views`."""
        pieces = [slot[start:end] for start, end in self._spans]
        views = [
            piece if len(piece) >= _SPLIT_BYTES else piece.view(dtype)
            for piece, (_, _, dtype) in zip(pieces, self._leaves, strict=True)
        ]
        return views, pieces

    def addresses(self, leaves: Sequence[torch.Tensor]) -> tuple[list[int], array[int], array[int]]:
        """See :meth:`prefetchpipe.batch.layout.Layout.addresses`."""
        offsets = array("Q", [start for start, _ in self._spans])
        return [leaf.data_ptr() for leaf in leaves], offsets, array("Q", [end - start for start, end in self._spans])

    def source(self, number: int, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """See :meth:`prefetchpipe.batch.layout.Layout.source`."""
        return leaves[number]

    def sources(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See :meth:`prefetchpipe.batch.layout.Layout.sources`."""
        return [leaf.view(-1).view(torch.uint8) if leaf.nbytes >= _SPLIT_BYTES else leaf.view(-1) for leaf in leaves]
