"""What of a batch is copied byte for byte, as addresses; and packing by the calling thread alone."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from prefetchpipe import native
from prefetchpipe.batch.rows import Stacked, copy_all

if TYPE_CHECKING:
    from prefetchpipe.batch.few import FewLeaves
    from prefetchpipe.batch.layout import Layout
    from prefetchpipe.memory.ring import Slot

__all__ = ["Job", "pack_alone"]

_is_contiguous = torch.Tensor.is_contiguous
_is_neg = torch.Tensor.is_neg
_address = torch.Tensor.data_ptr


class Job:
    """The copies that pack ``leaves`` as ``layout`` says.

    Args:
        layout: Of a whole batch.
        leaves: What it packs; they have to live until the copies have ended.
        numbers: Of these spans alone; None: of all.
        begin: Which byte of the batch is the slot's first.

    Attributes:
        sources: Addresses. All three arrays are of type ``"Q"``.
        offsets: Where each goes, in bytes from the slot's first.
        nbytes: How much each has.
        rest: Numbers of the spans that are no such copies: gathered rows, and leaves whose order changes.
    """

    __slots__ = ("nbytes", "offsets", "rest", "sources")

    def __init__(
        self, layout: Layout | FewLeaves, leaves: Sequence[Any], numbers: Sequence[int] | None = None, begin: int = 0
    ) -> None:
        addresses, starts, sizes = layout.addresses(leaves)
        self.rest: list[int] = []
        if numbers is None and all(addresses):
            self.sources, self.offsets, self.nbytes = array("Q", addresses), starts, sizes
            return
        self.sources, self.offsets, self.nbytes = array("Q"), array("Q"), array("Q")
        for number in range(len(addresses)) if numbers is None else numbers:
            start = starts[number] - begin
            if addresses[number]:
                self.sources.append(addresses[number])
                self.offsets.append(start)
                self.nbytes.append(sizes[number])
            elif samples := _addresses_of(layout.source(number, leaves)):
                own = sizes[number] // len(samples)
                self.sources.extend(samples)
                self.offsets.extend(range(start, start + own * len(samples), own))
                self.nbytes.extend([own] * len(samples))
            elif sizes[number]:
                self.rest.append(number)

    def pack_rest(self, layout: Layout | FewLeaves, leaves: Sequence[Any], view: Callable[[int], torch.Tensor]) -> None:
        """What is no copy of bytes, by torch; ``view`` gives where a span of the layout is packed."""
        if self.rest:
            copy_all([view(number) for number in self.rest], [layout.source(number, leaves) for number in self.rest])


def _addresses_of(source: Any) -> Sequence[int]:
    """Of the samples of a stack that are bytes in the order of the stack; else nothing."""
    if type(source) is not Stacked or source.dtype.is_complex:  # a complex sample may be conjugated
        return ()
    samples: Sequence[torch.Tensor] = source.samples
    if not samples[0].nbytes:
        return ()
    # `Stacked` has seen that they are strided, of one shape and dtype, and on the CPU.
    if not all(map(_is_contiguous, samples)) or any(map(_is_neg, samples)):
        return ()
    addresses = list(map(_address, samples))
    return addresses if all(addresses) else ()  # zeros without memory, of forward-mode differentiation


def pack_alone(slot: Slot, layout: Layout | FewLeaves, leaves: Sequence[Any]) -> None:
    """Pack ``leaves`` into ``slot`` by the calling thread, as a worker process does."""
    if native.is_available():
        job = Job(layout, leaves)
        native.copy_alone(slot.tensor.data_ptr(), job.sources, job.offsets, job.nbytes)
        job.pack_rest(layout, leaves, lambda number: slot.views(layout)[number])
    else:
        copy_all(slot.views(layout), layout.sources(leaves))
