"""Loaders over data in memory, whose rows can be brought straight to where a batch is packed.

A ``DataLoader`` without workers and with torch's own collate function would fetch each sample, stack the samples into a
new tensor, and leave that to be packed. Here the samples are stacked where the batch is packed; those of a
``TensorDataset`` are not even fetched, but gathered by index. Values, order and random draws are torch's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cache
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)
from torch.utils.data import default_collate as torch_collate

from prefetchpipe.batch.layout import is_plain
from prefetchpipe.batch.move import array_to_tensor
from prefetchpipe.batch.rows import Gathered, Stacked

__all__ = ["in_memory_source"]

_WORTH_BYTES = 64 << 10
"""Smaller leaves are stacked by torch itself."""

_SMALL_SAMPLE_BYTES = 4 << 10

_PLAIN_DIMENSIONS = 3
"""Samples of more dimensions may be stacked in a memory format of their own (channels last)."""


def in_memory_source(loader: Any, iterator: Any) -> Any:
    """``iterator``, or one that yields the same batches with rows in place of the large tensors.

    Args:
        loader: The loader.
        iterator: ``iter(loader)``, made in the caller's thread; its sampler is used, where it is.
    """
    if (
        type(loader) is not DataLoader
        or loader.num_workers
        or loader.batch_sampler is None
        or loader.collate_fn is not torch_collate
        or not hasattr(iterator, "_next_index")
        or isinstance(loader.dataset, IterableDataset)  # has a __getitem__ too, inherited, which only raises
        or not hasattr(loader.dataset, "__getitem__")
    ):
        return iterator
    tensors = _tensors_of(loader.dataset)
    if tensors is None:
        return _Stacking(loader, iterator)
    return _Gathering(loader, iterator, *tensors)


class _Stacking:
    """Samples are fetched as torch does, and stacked where the batch is packed."""

    def __init__(self, loader: Any, iterator: Any) -> None:
        self._iterator = iterator
        self._dataset = loader.dataset

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        index = self._iterator._next_index()  # noqa: SLF001 - the sampler, where torch's own fetch would ask it
        return collate(self._fetch(index))

    def _fetch(self, index: Any) -> Any:
        """As ``torch.utils.data._utils.fetch._MapDatasetFetcher``."""
        fetch_many = getattr(self._dataset, "__getitems__", None)
        return fetch_many(index) if fetch_many else [self._dataset[i] for i in index]


class _Gathering(_Stacking):
    """Rows of a ``TensorDataset``, by index."""

    def __init__(
        self, loader: Any, iterator: Any, tensors: Sequence[torch.Tensor], subset: torch.Tensor | None
    ) -> None:
        super().__init__(loader, iterator)
        self._tensors = tensors
        self._subset = subset
        self._chunks = _chunks_of(loader.batch_sampler)

    def __next__(self) -> Any:
        if self._chunks is not None:
            rows = next(self._chunks)
        else:
            index = self._iterator._next_index()  # noqa: SLF001 - the sampler, where torch's own fetch would ask it
            checked = _checked_index(index, len(self._dataset))
            if checked is None:
                return collate(self._fetch(index))
            rows = checked
        if self._subset is not None:
            rows = self._subset[rows]
        return [self._leaf(tensor, rows) for tensor in self._tensors]

    def _leaf(self, tensor: torch.Tensor, rows: torch.Tensor) -> Any:
        nbytes = len(rows) * (tensor.numel() // max(len(tensor), 1)) * tensor.dtype.itemsize
        return Gathered(tensor, rows) if nbytes >= _WORTH_BYTES else torch.index_select(tensor, 0, rows)


def _tensors_of(dataset: Any) -> tuple[Sequence[torch.Tensor], torch.Tensor | None] | None:
    """The tensors behind ``dataset`` and the rows of them it means; None for another kind of data set."""
    subset = None
    if type(dataset) is Subset:
        subset = _checked_index(dataset.indices, len(dataset.dataset))  # type: ignore[arg-type]
        dataset = dataset.dataset
        if subset is None:
            return None
    if type(dataset) is not TensorDataset:
        return None
    plain = all(
        type(t) is torch.Tensor and t.is_cpu and t.layout is torch.strided and not t.requires_grad and t.dim() > 0
        for t in dataset.tensors
    )
    return (dataset.tensors, subset) if plain else None


def _checked_index(index: Any, rows: int) -> torch.Tensor | None:
    """``index`` as a tensor, if it is whole numbers from 0 to ``rows - 1``; torch decides about anything else."""
    if isinstance(index, torch.Tensor):
        if index.dtype is not torch.int64 or index.dim() != 1:
            return None
        tensor = index
    elif isinstance(index, (list, range)) and set(map(type, index)) == {int}:
        tensor = torch.from_numpy(np.fromiter(index, np.int64, len(index)))
    else:
        return None
    if not len(tensor):
        return None
    low, high = (int(value) for value in tensor.aminmax())
    return tensor if low >= 0 and high < rows else None


# Torch's own samplers, without a Python number per row


def _chunks_of(batch_sampler: Any) -> Iterator[torch.Tensor] | None:
    """The batches of torch's own samplers as tensors; None for another sampler.

    Nothing is drawn before the first batch is asked for, as with the sampler itself.
    """
    if type(batch_sampler) is not BatchSampler or not _draws_as_known():
        return None
    sampler = batch_sampler.sampler
    if type(sampler) is SequentialSampler:
        order = _sequential(sampler)
    elif type(sampler) is RandomSampler and not sampler.replacement:
        order = _permuted(sampler)
    else:
        return None
    return _batched(order, batch_sampler.batch_size, drop_last=batch_sampler.drop_last)


def _sequential(sampler: Any) -> Iterator[torch.Tensor]:
    yield torch.arange(len(sampler.data_source))


def _permuted(sampler: Any) -> Iterator[torch.Tensor]:
    """As ``RandomSampler.__iter__`` without replacement."""
    rows = len(sampler.data_source)
    generator = sampler.generator
    if generator is None:
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        generator = torch.Generator()
        generator.manual_seed(seed)
    for _ in range(sampler.num_samples // rows):
        yield torch.randperm(rows, generator=generator)
    yield torch.randperm(rows, generator=generator)[: sampler.num_samples % rows]


def _batched(order: Iterator[torch.Tensor], size: int, *, drop_last: bool) -> Iterator[torch.Tensor]:
    """As ``BatchSampler.__iter__``."""
    left = torch.empty(0, dtype=torch.int64)
    for part in order:
        rows = torch.cat((left, part)) if len(left) else part
        whole = len(rows) // size * size
        yield from rows[:whole].split(size) if whole else ()
        left = rows[whole:]
    if len(left) and not drop_last:
        yield left


@cache
def _draws_as_known() -> bool:
    """Whether this torch's samplers give what is rebuilt here, and leave their generator in the same state."""
    data = range(7)
    for size, drop_last in itertools.product((2, 3, 7), (False, True)):
        theirs, ours = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
        sampler = RandomSampler(data, num_samples=10, generator=theirs)
        want = list(BatchSampler(sampler, size, drop_last))
        got = _batched(_permuted(RandomSampler(data, num_samples=10, generator=ours)), size, drop_last=drop_last)
        if [rows.tolist() for rows in got] != want or not torch.equal(theirs.get_state(), ours.get_state()):
            return False
    return True


# Torch's collate function, with large stacks left to be filled in


def collate(samples: Any, *, worth: int = _WORTH_BYTES) -> Any:  # noqa: PLR0911 - a list of kinds, one line each
    """``torch.utils.data.default_collate``, with rows in place of large tensors.

    Source: torch/utils/data/_utils/collate.py. Only the plain types are taken apart here; the rest is torch's.

    Args:
        samples: What a data set gave for one batch.
        worth: Bytes from which a stack is left to be filled in.
    """
    if type(samples) not in (list, tuple) or not samples:
        return torch_collate(samples)
    kind = type(samples[0])
    if set(map(type, samples)) != {kind}:
        return torch_collate(samples)
    if kind is torch.Tensor:
        return _rows(samples, samples, worth)
    if kind is np.ndarray and samples[0].ndim and samples[0].dtype.kind in "biufc":
        tensors = [array_to_tensor(sample) for sample in samples]
        if all(tensor is not None for tensor in tensors):
            return _rows(tensors, samples, worth)
        return torch_collate(samples)
    if kind in (tuple, list) and len({len(sample) for sample in samples}) == 1:
        return [collate(column, worth=worth) for column in zip(*samples, strict=True)]
    if kind is dict:
        return {key: collate([sample[key] for sample in samples], worth=worth) for key in samples[0]}
    return torch_collate(samples)


def _rows(tensors: Sequence[Any], samples: Any, worth: int) -> Any:
    first = tensors[0]
    if first.dim() > _PLAIN_DIMENSIONS and not first.is_contiguous():
        return torch_collate(samples)  # it keeps such a format in this process, and does not in a worker
    return _stacked(tensors, samples, worth)


def _stacked(tensors: Sequence[Any], samples: Any, worth: int) -> Any:
    first = tensors[0]
    nbytes = first.numel() * first.dtype.itemsize
    if nbytes * len(tensors) < worth:
        return torch_collate(samples)
    if nbytes < _SMALL_SAMPLE_BYTES:  # looking at each costs more than stacking them and copying the stack
        return _stacked_now(tensors, samples)
    try:
        kinds = set(map(_kind_of, tensors))
    except RuntimeError:  # a nested tensor has no shape
        return torch_collate(samples)
    if len(kinds) > 1 or kinds.pop()[2:] != (torch.strided, True, False) or not is_plain(first):
        return torch_collate(samples)
    return Stacked(tensors)


_kind_of = attrgetter("shape", "dtype", "layout", "is_cpu", "requires_grad")
"""In C: one look at each of hundreds of samples."""


def _stacked_now(tensors: Sequence[Any], samples: Any) -> Any:
    """Without the shared memory of its own that torch's function takes for every tensor in a worker process."""
    try:
        stacked = torch.stack(tuple(tensors))
    except Exception:  # noqa: BLE001 - torch's function says it its own way
        return torch_collate(samples)
    is_plain = stacked.layout is torch.strided and not (stacked.requires_grad or stacked.is_quantized)
    return stacked if is_plain and stacked.dtype == tensors[0].dtype else torch_collate(samples)
