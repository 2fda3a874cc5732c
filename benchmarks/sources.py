"""Where batches come from: one host-side loader, given to every contender the way that contender's docs ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.batches import map_leaves

__all__ = ["CyclingBatches", "ListSource", "LoaderSource", "Pinning", "Source", "only"]


class Source(Protocol):
    """A loader for one contender. Every contender has a source of its own over shared data."""

    def set_steps(self, steps: int) -> None:
        """Later passes have (at least) ``steps`` batches."""

    def loader(self, *, pin: bool) -> Iterable[Any]:
        """The host-side loader; ``pin``: with pinned batches, in the cheapest way that this source allows."""

    def dataloader(self, *, pin: bool) -> DataLoader[Any]:
        """The same as a ``DataLoader``, for contenders that take nothing else."""

    def by_hand(self, device: torch.device, *, pin: bool) -> Iterable[Any] | None:
        """A loop over device batches without any loader, where a user would write one."""


class CyclingBatches(Dataset[Any]):
    """``steps`` batches that are ready in memory, from a pool of distinct ones."""

    def __init__(self, pool: Sequence[Any], steps: int) -> None:
        self.pool = list(pool)
        self.steps = steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.steps:
            raise IndexError(index)
        return self.pool[index % len(self.pool)]

    def __iter__(self) -> Iterator[Any]:
        pool, size = self.pool, len(self.pool)
        for index in range(self.steps):
            yield pool[index % size]


class Pinning:
    """A loop that pins every tensor of a batch with ``Tensor.pin_memory`` before handing it on."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield map_leaves(torch.Tensor.pin_memory, batch)


class ListSource:
    """Batches that are ready in (pageable or pinned) memory."""

    def __init__(self, pool: Sequence[Any], steps: int = 1, *, pinned: bool = False) -> None:
        self._batches = CyclingBatches(pool, steps)
        self._pinned = pinned

    def set_steps(self, steps: int) -> None:
        """See :class:`Source`."""
        self._batches.steps = steps

    def loader(self, *, pin: bool) -> Iterable[Any]:
        """See :class:`Source`."""
        return Pinning(self._batches) if pin and not self._pinned else self._batches

    def dataloader(self, *, pin: bool) -> DataLoader[Any]:
        """One ready batch an item; ``batch_size=1`` because Accelerate gives up ``batch_size=None``."""
        pin = pin and not self._pinned
        return DataLoader(self._batches, batch_size=1, shuffle=False, collate_fn=only, pin_memory=pin)

    def by_hand(self, device: torch.device, *, pin: bool) -> Iterable[Any] | None:
        """No index to go by."""
        return None


class LoaderSource:
    """A ``DataLoader``, made once for each way of pinning.

    Args:
        make: Called with ``pin_memory`` and the number of steps.
        resize: Told when the number of steps changes, with the loader; ``None``: the loader is long enough.
        hand: Makes the loop without a loader, called with ``device`` and ``pin``.
    """

    def __init__(
        self,
        make: Callable[[bool], DataLoader[Any]],
        *,
        resize: Callable[[DataLoader[Any], int], None] | None = None,
        hand: Callable[[torch.device, bool], Iterable[Any]] | None = None,
    ) -> None:
        self._make = make
        self._resize = resize
        self._hand = hand
        self._made: dict[bool, DataLoader[Any]] = {}
        self._steps = 1

    def set_steps(self, steps: int) -> None:
        """See :class:`Source`."""
        self._steps = steps
        for loader in self._made.values():
            if self._resize is not None:
                self._resize(loader, steps)

    def loader(self, *, pin: bool) -> DataLoader[Any]:
        """See :class:`Source`."""
        if pin not in self._made:
            self._made[pin] = self._make(pin)
            self.set_steps(self._steps)
        return self._made[pin]

    def dataloader(self, *, pin: bool) -> DataLoader[Any]:
        """See :class:`Source`."""
        return self.loader(pin=pin)

    def by_hand(self, device: torch.device, *, pin: bool) -> Iterable[Any] | None:
        """See :class:`Source`."""
        return self._hand(device, pin) if self._hand is not None else None


def only(items: Sequence[Any]) -> Any:
    """Collate for loaders whose items are batches already."""
    return items[0]
