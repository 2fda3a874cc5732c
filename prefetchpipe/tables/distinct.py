"""The distinct ids of a batch, and where each position finds its row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from prefetchpipe.tables.index import PAD, Index

__all__ = ["Distinct", "distinct_ids"]


@dataclass(frozen=True, slots=True)
class Distinct:
    """What a batch asks for.

    Attributes:
        index: The distinct ids, ascending. On the device as many as the batch has, with PAD behind the last.
        inverse: For each position of the batch, its place among them.
    """

    index: Index
    inverse: torch.Tensor


def distinct_ids(index: Index) -> Distinct:
    """Find them where the ids are.

    In host memory by ``torch.unique``. On the device that would make the host wait for their number, so room for the
    most there can be is kept, and the rest is PAD.
    """
    ids = index.ids
    if not index.resident:
        found, inverse = torch.unique(ids, sorted=True, return_inverse=True)
        return Distinct(Index(found, tuple(found.shape), resident=False, is_distinct=True), inverse)
    count = ids.numel()
    ordered, order = torch.sort(ids)
    first = torch.ones(count, dtype=torch.bool, device=ids.device)
    torch.ne(ordered[1:], ordered[:-1], out=first[1:])
    place = torch.cumsum(first, 0) - 1
    inverse = torch.empty_like(ids)
    inverse[order] = place
    found = torch.full_like(ids, PAD)
    found[place] = ordered  # equal ids write the same value to the same place
    return Distinct(Index(found, (count,), resident=True, is_distinct=True), inverse)
