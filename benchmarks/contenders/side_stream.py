"""The prefetcher that many training scripts carry around, known from NVIDIA's Apex examples.

One batch ahead on a side stream, ``record_stream`` on every tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from benchmarks.batches import leaves, map_leaves
from benchmarks.contenders.base import Contender, Prepared
from benchmarks.environment import Env
from benchmarks.sources import Source

__all__ = ["CONTENDERS"]


class _OneAhead:
    def __init__(self, loader: Iterable[Any], device: torch.device) -> None:
        self._loader, self._device = loader, device
        self._stream = torch.cuda.Stream(device)

    def __iter__(self) -> Iterator[Any]:
        source = iter(self._loader)
        end = object()
        ahead = self._fetch(source, end)
        while ahead is not end:
            consumer = torch.cuda.current_stream(self._device)
            consumer.wait_stream(self._stream)
            for leaf in leaves(ahead):
                leaf.record_stream(consumer)
            current = ahead
            ahead = self._fetch(source, end)
            yield current
            del current

    def _fetch(self, source: Iterator[Any], end: object) -> Any:
        batch = next(source, end)
        if batch is end:
            return end
        with torch.cuda.stream(self._stream):
            return map_leaves(lambda leaf: leaf.to(self._device, non_blocking=True), batch)


class SideStream(Contender):
    """Over a loader with pinned batches."""

    name = "side-stream"
    rank = 10

    def prepare(self, source: Source, env: Env, *, depth: int | None = None, transform: Any = None) -> Prepared:
        """See :class:`Contender`."""
        return Prepared(_OneAhead(source.loader(pin=True), env.device))


CONTENDERS = (SideStream(),)
