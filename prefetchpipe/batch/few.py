"""The layout of a batch of few contiguous leaves: cheap to make, for batches whose shapes change every time."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch

from prefetchpipe.batch.layout import ALIGNMENT, OWN_BLOCK_BYTES, Alloc, Empty, is_packable
from prefetchpipe.batch.rows import Rows

__all__ = ["FewLeaves"]

_Leaf = tuple[torch.Size, tuple[int, ...], torch.dtype, int]
"""Shape, stride, dtype and bytes of a contiguous leaf."""

_FEW = 4
_SPLIT_BYTES = 512 << 10
"""From here on a leaf is packed as bytes: torch splits a copy between threads by the number of its elements."""

_LARGE_BYTES = 32 << 20
"""Beyond this the full layout costs nothing that shows; what is packed in pieces needs it."""


class FewLeaves:
    """Leaves in one slab on the device, or, if one of them is large, each in memory of its own.

    Making a full :class:`~prefetchpipe.batch.layout.Layout` may take longer than a batch of a few token tensors takes
    on the wire.

    Args:
        leaves: Leaves for which :meth:`suits` holds.

    Attributes:
        nbytes: Bytes of the slot that holds the batch.
        count: Number of leaves.
    """

    __slots__ = ("_dtype", "_leaves", "_starts", "count", "nbytes")

    slab = -1

    def __init__(self, leaves: Sequence[Any]) -> None:
        self._leaves = [(leaf.shape, leaf.stride(), leaf.dtype, leaf.nbytes) for leaf in leaves]
        self.count = len(leaves)
        self._starts: list[int] = []
        position = 0
        for *_, nbytes in self._leaves:
            start = -(-position // ALIGNMENT) * ALIGNMENT
            self._starts.append(start)
            position = start + nbytes
        self.nbytes = position
        self._dtype = _slab_dtype(self._leaves)

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

    def allocate(
        self,
        empty: Empty,
        alloc: Alloc,  # noqa: ARG002
        *,
        in_slab: bool = True,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """See :meth:`prefetchpipe.batch.layout.Layout.allocate`."""
        if in_slab and self._dtype is not None:
            whole = -(-self.nbytes // ALIGNMENT) * ALIGNMENT  # which can be seen as elements of any dtype
            slab = empty(torch.Size((whole // self._dtype.itemsize,)), (1,), self._dtype)
            return _cut(slab, self._leaves, self._starts), [slab]
        out = [empty(shape, stride, dtype) for shape, stride, dtype, _ in self._leaves]
        return out, out

    def targets(self, arrived: list[torch.Tensor], memory: list[torch.Tensor]) -> list[torch.Tensor]:  # noqa: ARG002
        """See :meth:`prefetchpipe.batch.layout.Layout.targets`."""
        return self.sources(arrived)

    def slot_views(self, slot: torch.Tensor) -> list[torch.Tensor]:
        """See :meth:`prefetchpipe.batch.layout.Layout.slot_views`."""
        return [
            piece if nbytes >= _SPLIT_BYTES else piece.view(dtype)
            for piece, (_, _, dtype, nbytes) in zip(self._apart(slot), self._leaves, strict=True)
        ]

    def pieces(self, slot: torch.Tensor, *, in_slab: bool = True) -> list[torch.Tensor]:
        """See :meth:`prefetchpipe.batch.layout.Layout.pieces`."""
        return [slot[: self.nbytes]] if in_slab and self._dtype is not None else self._apart(slot)

    def _apart(self, slot: torch.Tensor) -> list[torch.Tensor]:
        return [slot[start : start + leaf[3]] for start, leaf in zip(self._starts, self._leaves, strict=True)]

    def addresses(self, leaves: Sequence[torch.Tensor]) -> tuple[list[int], array[int], array[int]]:
        """See :meth:`prefetchpipe.batch.layout.Layout.addresses`."""
        sizes = array("Q", [nbytes for *_, nbytes in self._leaves])
        return [leaf.data_ptr() for leaf in leaves], array("Q", self._starts), sizes

    def source(self, number: int, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """See :meth:`prefetchpipe.batch.layout.Layout.source`."""
        return leaves[number]

    def sources(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See :meth:`prefetchpipe.batch.layout.Layout.sources`."""
        return [leaf.view(-1).view(torch.uint8) if leaf.nbytes >= _SPLIT_BYTES else leaf.view(-1) for leaf in leaves]


def _slab_dtype(leaves: Sequence[_Leaf]) -> torch.dtype | None:
    """Of one slab for all of them: theirs, or bytes. None: each has memory of its own.

    So has each where one is large: a label that is kept keeps no images alive (as in a full layout).
    """
    if len(leaves) < 2 or any(nbytes >= OWN_BLOCK_BYTES for *_, nbytes in leaves):  # noqa: PLR2004 - one needs no slab
        return None
    dtype = leaves[0][2]
    return dtype if all(other is dtype for _, _, other, _ in leaves) else torch.uint8


def _cut(slab: torch.Tensor, leaves: Sequence[_Leaf], starts: Sequence[int]) -> list[torch.Tensor]:
    """Leaves in ``slab``. No autograd views: a change of one must not count as a change of its neighbours."""
    own = slab.dtype
    out = []
    with torch._C._AutoDispatchBelowADInplaceOrView():  # noqa: SLF001 - as torch's own C++ does
        for (shape, stride, dtype, _), start in zip(leaves, starts, strict=True):
            whole = slab if dtype is own else slab.view(dtype)
            out.append(whole.as_strided(shape, stride, start // dtype.itemsize))
    return out
