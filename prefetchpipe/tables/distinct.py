"""The distinct ids of a batch, and where each position finds its row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from prefetchpipe.tables.index import Index

__all__ = ["Distinct", "Places", "distinct_on_host"]


@dataclass(slots=True, eq=False)  # not frozen: one is made for every batch, at twice the cost then
class Places:
    """The sorted positions of a batch, on the device.

    Attributes:
        order: The positions, in the order of their ids; those of one id in the order of the batch. int64.
        spans: For each of them where the positions of its id start, and, times 2**32, where they end. int64.
    """

    order: torch.Tensor
    spans: torch.Tensor


@dataclass(slots=True, eq=False)  # not frozen: one is made for every batch, at twice the cost then
class Distinct:
    """What a batch asks for.

    Attributes:
        index: The distinct ids, ascending. On the device as many as the batch has: each stands where its positions
            start in the order of ids, and PAD in the other places.
        inverse: For each position of the batch, its place among them. Flat, or of the shape of the batch.
        places: The other way round, where kernels use it.
    """

    index: Index
    inverse: torch.Tensor
    places: Places | None = None

    def device_tensors(self) -> tuple[torch.Tensor, ...]:
        """All that is on the device."""
        if not self.index.resident:
            return ()
        places = self.places
        more = () if places is None else (places.order, places.spans)
        return (self.index.ids, self.inverse, *more)


def distinct_on_host(index: Index) -> Distinct:
    """For ids in host memory; on the device kernels find them, without a wait of the host for their number."""
    found, inverse = torch.unique(index.ids, sorted=True, return_inverse=True)
    return Distinct(Index(found, tuple(found.shape), resident=False, is_distinct=True), inverse)
