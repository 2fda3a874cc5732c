"""Map-style datasets over arrays in memory, read in random order without workers."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler, TensorDataset

from benchmarks.environment import Env
from benchmarks.rows.base import LoaderRow
from benchmarks.sources import LoaderSource, Source

__all__ = ["ROWS", "ArrayDataset", "ArraysRow", "TabularRow"]

_VALUES = 120


class ArrayDataset(Dataset[Any]):
    """Rows of NumPy arrays of equal length, with ``__getitems__`` as torch's fetcher asks for it."""

    def __init__(self, *arrays: np.ndarray) -> None:
        self.arrays = arrays

    def __len__(self) -> int:
        return len(self.arrays[0])

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return tuple(array[index] for array in self.arrays)

    def __getitems__(self, indices: list[int]) -> list[tuple[Any, ...]]:
        return [tuple(array[index] for array in self.arrays) for index in indices]


class ByHand:
    """A random permutation, rows indexed out of the tensors, then ``.to``: the loop without a loader.

    Args:
        tensors: Host tensors of equal length.
        batch: Rows a batch.
        device: Where batches go.
        pin: Pin each indexed tensor and copy without blocking.
        shuffle: Random order, else in order.
    """

    def __init__(
        self, tensors: list[torch.Tensor], batch: int, device: torch.device, *, pin: bool, shuffle: bool
    ) -> None:
        self._tensors, self._batch, self._device, self._pin, self._shuffle = tensors, batch, device, pin, shuffle

    def __iter__(self) -> Iterator[Any]:
        rows = len(self._tensors[0])
        epochs = itertools.count() if self._shuffle else range(1)  # shuffled, the timed window ends the loop
        for _ in epochs:
            order = torch.randperm(rows) if self._shuffle else torch.arange(rows)
            for index in order.split(self._batch):
                if self._pin:
                    yield [t[index].pin_memory().to(self._device, non_blocking=True) for t in self._tensors]
                else:
                    yield [t[index].to(self._device) for t in self._tensors]


class _IndexedRow(LoaderRow):
    """Common to both: data as tensors, a gathering floor, the two ways by hand."""

    drain = False
    _tensors: list[torch.Tensor]
    _batch: int

    def floor(self, env: Env) -> tuple[float, str]:
        """Rows gathered by ``torch.index_select`` straight into (pinned) memory that is used again."""
        self.source(env)
        rows = len(self._tensors[0])
        targets = [torch.empty((self._batch, *t.shape[1:]), dtype=t.dtype, pin_memory=env.cuda) for t in self._tensors]
        times = []
        for _ in range(8):
            index = torch.randint(rows, (self._batch,))
            start = time.perf_counter()
            for tensor, target in zip(self._tensors, targets, strict=True):
                torch.index_select(tensor, 0, index, out=target)
            times.append(time.perf_counter() - start)
        return statistics.median(times[2:]) * 1e3, "index_select into pinned memory"

    def release(self) -> None:
        """See :class:`LoaderRow`."""
        self._tensors = []

    def _by_hand(self, tensors: list[torch.Tensor], batch: int, *, shuffle: bool) -> Any:
        def hand(device: torch.device, pin: bool) -> Iterable[Any]:
            return ByHand(tensors, batch, device, pin=pin, shuffle=shuffle)

        return hand


class ArraysRow(_IndexedRow):
    """256 random images out of 4,096 in NumPy arrays."""

    name = "arrays"
    rank = 6
    title = "random rows of in-memory NumPy arrays, 256x3x224x224 uint8 + labels, __getitems__, default collate"
    least = 8
    warm = 6

    def __init__(self) -> None:
        self._tensors = []
        self._batch = 0

    def source(self, env: Env) -> Source:
        """See :class:`LoaderRow`."""
        if not self._tensors:
            self._batch = 32 if env.small else 256
            count, side = (512, 64) if env.small else (4096, 224)
            generator = torch.Generator().manual_seed(0)
            block = torch.randint(0, 256, (256, 3, side, side), dtype=torch.uint8, generator=generator)
            labels = torch.randint(0, 1000, (count,), generator=generator)
            self._tensors = [block.repeat(count // 256, 1, 1, 1), labels]
        return self._make(self._tensors, self._batch, shuffle=True)

    def race_source(self, env: Env, count: int) -> tuple[Source, list[int]]:
        """Small images in order: gathering must be quicker than the GPU for a race to show."""
        batch, side = 64, 64
        values = torch.arange(count) % _VALUES + 1
        images = values.to(torch.uint8).repeat_interleave(batch)[:, None, None, None].repeat(1, 3, side, side)
        tensors = [images, values.repeat_interleave(batch)]
        return self._make(tensors, batch, shuffle=False), values.tolist()

    def _make(self, tensors: list[torch.Tensor], batch: int, *, shuffle: bool) -> Source:
        dataset = ArrayDataset(*(tensor.numpy() for tensor in tensors))

        def make(pin: bool) -> DataLoader[Any]:
            # Drawn with replacement, so that a pass is as long as a window needs.
            sampler = RandomSampler(dataset, replacement=True) if shuffle else SequentialSampler(dataset)
            return DataLoader(dataset, batch_size=batch, sampler=sampler, pin_memory=pin)

        def resize(loader: DataLoader[Any], steps: int) -> None:
            if shuffle:
                loader.sampler._num_samples = steps * batch  # type: ignore[attr-defined]

        return LoaderSource(make, resize=resize, hand=self._by_hand(tensors, batch, shuffle=shuffle))


class TabularRow(_IndexedRow):
    """A shuffled ``TensorDataset`` with the default collate, as every tutorial has it."""

    name = "tabular"
    rank = 7
    title = "TensorDataset, 4 M x 100 float32 + label, shuffled, 65,536 rows a batch, default collate, 0 workers"
    least = 1
    most = 40
    warm = 4
    regimes = ("transfer", "balanced")
    allowed = ("plain", "pinned-loader", "by-hand", "by-hand-pinned", "prefetchpipe")
    allowed_why = "takes its batches from the same DataLoader, which alone takes nearly all of the time of plain"

    def __init__(self) -> None:
        self._tensors = []
        self._batch = 0

    def source(self, env: Env) -> Source:
        """See :class:`LoaderRow`."""
        if not self._tensors:
            self._batch = 2048 if env.small else 65_536
            rows = 100_000 if env.small else 4_000_000
            generator = torch.Generator().manual_seed(0)
            table = torch.rand(rows, 100, generator=generator)
            self._tensors = [table, torch.randint(0, 2, (rows,), generator=generator)]
        return self._make(self._tensors, self._batch, shuffle=True)

    def race_source(self, env: Env, count: int) -> tuple[Source, list[int]]:
        """2,048 rows a batch, in order."""
        batch = 2048
        values = torch.arange(count) % _VALUES + 1
        column = values.repeat_interleave(batch)
        return self._make([column.float()[:, None].repeat(1, 100), column], batch, shuffle=False), values.tolist()

    def _make(self, tensors: list[torch.Tensor], batch: int, *, shuffle: bool) -> Source:
        dataset = TensorDataset(*tensors)

        def make(pin: bool) -> DataLoader[Any]:
            return DataLoader(dataset, batch_size=batch, shuffle=shuffle, pin_memory=pin)

        return LoaderSource(make, hand=self._by_hand(tensors, batch, shuffle=shuffle))


ROWS = (ArraysRow(), TabularRow())
