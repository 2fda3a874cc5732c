"""Loops with nothing but torch: ``.to``, pinned memory with ``non_blocking``, and indexing by hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from benchmarks.batches import map_leaves
from benchmarks.contenders.base import Contender, Prepared
from benchmarks.environment import Env
from benchmarks.sources import Source

__all__ = ["CONTENDERS"]


class _Moved:
    """``for batch in loader: batch = batch.to(device)``."""

    def __init__(self, loader: Iterable[Any], device: torch.device, *, non_blocking: bool) -> None:
        self._loader, self._device, self._non_blocking = loader, device, non_blocking

    def __iter__(self) -> Iterator[Any]:
        device, non_blocking = self._device, self._non_blocking
        for batch in self._loader:
            yield map_leaves(lambda leaf: leaf.to(device, non_blocking=non_blocking), batch)


class Plain(Contender):
    """The loop of every first tutorial."""

    name = "plain"
    rank = 0
    cpu = True

    def prepare(self, source: Source, env: Env, *, depth: int | None = None, transform: Any = None) -> Prepared:
        """See :class:`Contender`."""
        return Prepared(_Moved(source.loader(pin=False), env.device, non_blocking=False))


class Pinned(Contender):
    """Pinned in the loop with ``Tensor.pin_memory``, copied without blocking."""

    name = "pinned"
    rank = 1

    def unfit(self, source: Source, example: Any) -> str | None:
        """See :class:`Contender`."""
        if isinstance(source.loader(pin=False), torch.utils.data.DataLoader):
            return "the source is a DataLoader, which pins by itself: see pinned-loader"
        return None

    def prepare(self, source: Source, env: Env, *, depth: int | None = None, transform: Any = None) -> Prepared:
        """See :class:`Contender`."""
        return Prepared(_Moved(source.loader(pin=True), env.device, non_blocking=True))


class PinnedLoader(Contender):
    """``DataLoader(pin_memory=True)`` and ``.to(device, non_blocking=True)``, as torch's documentation has it."""

    name = "pinned-loader"
    rank = 2

    def prepare(self, source: Source, env: Env, *, depth: int | None = None, transform: Any = None) -> Prepared:
        """See :class:`Contender`."""
        return Prepared(_Moved(source.dataloader(pin=True), env.device, non_blocking=True))


class ByHandLoop(Contender):
    """No loader: a permutation, ``x[idx]``, then ``.to``."""

    rank = 3
    cpu = True

    def __init__(self, name: str, *, pin: bool) -> None:
        self.name = name
        self.cpu = not pin
        self._pin = pin

    def unfit(self, source: Source, example: Any) -> str | None:
        """See :class:`Contender`."""
        if source.by_hand(torch.device("cpu"), pin=False) is None:
            return "the source has no index to go by"
        return None

    def prepare(self, source: Source, env: Env, *, depth: int | None = None, transform: Any = None) -> Prepared:
        """See :class:`Contender`."""
        batches = source.by_hand(env.device, pin=self._pin)
        if batches is None:
            raise TypeError("this source cannot be indexed by hand")
        return Prepared(batches)


CONTENDERS = (
    Plain(),
    Pinned(),
    PinnedLoader(),
    ByHandLoop("by-hand", pin=False),
    ByHandLoop("by-hand-pinned", pin=True),
)
