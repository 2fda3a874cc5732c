"""DataLoader with worker processes; samples are decoded already, so what is left is collate and the way to the GPU."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from benchmarks.batches import leaves, map_leaves
from benchmarks.environment import Env
from benchmarks.rows.base import Context, LoaderRow
from benchmarks.rows.ready import dlrm_batch, images_batch, tokens_batch
from benchmarks.schema import RowResult
from benchmarks.sources import LoaderSource, Source, only

__all__ = ["ROWS", "Samples", "WholeBatches", "WorkersRow"]

_VALUES = 120
_ENDLESS = 1 << 24


class Samples(Dataset[Any]):
    """Samples sliced out of tensors in memory, as many as asked for.

    Args:
        pool: Tuple or dict of tensors of equal length.
        batch: Rows a batch.
        batches: Length of the dataset in batches.
        lengths: Second dimension of batch after batch, in a circle; empty: uncut.
        values: Every batch is filled with one value (race).
    """

    def __init__(
        self, pool: Any, batch: int, batches: int, *, lengths: tuple[int, ...] = (), values: bool = False
    ) -> None:
        self.pool, self.batch, self.batches, self.lengths, self.values = pool, batch, batches, lengths, values
        self.size = len(leaves(pool)[0])

    def __len__(self) -> int:
        return self.batch * self.batches

    def __getitem__(self, index: int) -> Any:
        number, row = index // self.batch, index % self.size
        end = self.lengths[number % len(self.lengths)] if self.lengths else None

        def one(tensor: torch.Tensor) -> torch.Tensor:
            sample = tensor[row] if end is None else tensor[row, :end]
            return torch.full_like(sample, number % _VALUES + 1) if self.values else sample

        return map_leaves(one, self.pool)


class WholeBatches(Dataset[Any]):
    """Items that are batches, copied out of tensors in memory, as from a column store; arguments as above."""

    def __init__(self, pool: Any, batch: int, batches: int, *, values: bool = False) -> None:
        self.pool, self.batch, self.batches, self.values = pool, batch, batches, values
        self.size = len(leaves(pool)[0])

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, number: int) -> Any:
        row = number * self.batch % self.size

        def one(tensor: torch.Tensor) -> torch.Tensor:
            rows = tensor[row : row + self.batch]
            return torch.full_like(rows, number % _VALUES + 1) if self.values else rows.clone()

        return map_leaves(one, self.pool)


class WorkersRow(LoaderRow):
    """``Env.workers`` forked workers, persistent, two batches prefetched by each.

    Args:
        make: Makes the pool.
        batch: Rows a batch.
        pool: Rows in the pool.
        whole: The dataset gives whole batches.
        lengths: See :class:`Samples`.
        workers: Their number, in the place of ``Env.workers``.
    """

    group = "workers"
    least = 48

    def __init__(
        self,
        name: str,
        make: Callable[..., Any],
        title: str,
        *,
        batch: int,
        pool: int,
        rank: int,
        basis: str,
        whole: bool = False,
        lengths: tuple[int, ...] = (),
        workers: int | None = None,
    ) -> None:
        self._workers = workers
        if workers is not None:
            self.group = "scaling"
        self.name, self.title, self.rank, self.basis = name, title, rank, basis
        self._make, self._batch, self._rows, self._whole, self._lengths = make, batch, pool, whole, lengths
        self._pool: Any = None

    def run(self, context: Context) -> RowResult:
        """See :class:`LoaderRow`; the number of workers stands beside the other parts."""
        result = super().run(context)
        result.parts["workers"] = self._count(context.env)
        return result

    def _count(self, env: Env) -> int:
        return self._workers or env.workers

    def source(self, env: Env) -> Source:
        """See :class:`LoaderRow`."""
        return self._loader(env, self._dataset(env))

    def window(self, env: Env) -> tuple[int, int]:
        """More than the two batches that each worker has under way, at either end."""
        return 3 * self._count(env), 2 * self._count(env) + 4

    def race_source(self, env: Env, count: int) -> tuple[Source, list[int]]:
        """Small batches: workers must be quicker than the GPU for a race to show."""
        batch = 32
        pool = map_leaves(lambda leaf: leaf[:64].clone(), self._data(env))
        if not self._whole and not self._lengths:
            pool = map_leaves(lambda leaf: leaf[..., :64, :64].clone() if leaf.ndim == 4 else leaf, pool)
        dataset: Dataset[Any] = (
            WholeBatches(pool, batch, count, values=True)
            if self._whole
            else Samples(pool, batch, count, lengths=self._lengths, values=True)
        )
        return self._loader(env, dataset), [index % _VALUES + 1 for index in range(count)]

    def floor(self, env: Env) -> tuple[float, str]:
        """What the workers need for collating alone: each stacks batches into memory of its own that is used again."""
        dataset = self._dataset(env)
        context = multiprocessing.get_context("fork")
        workers = self._count(env)
        counts = context.Array("q", workers)
        processes = [
            context.Process(target=_collate_for, args=(dataset, 0.8, counts, place), daemon=True)
            for place in range(workers)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(30)
        done = sum(counts[:])
        return (800.0 / done if done else 0.0), f"{workers} workers collating, nothing else"

    def release(self) -> None:
        """See :class:`LoaderRow`."""
        self._pool = None

    def _data(self, env: Env) -> Any:
        if self._pool is None:
            if self._lengths:
                generator = torch.Generator().manual_seed(1)
                ids = torch.randint(0, 50_000, (self._rows, max(self._lengths)), generator=generator)
                self._pool = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
            else:
                self._pool = self._make(1, small=env.small, rows=self._rows)
        return self._pool

    def _dataset(self, env: Env) -> Samples | WholeBatches:
        pool = self._data(env)
        batch = min(self._batch, len(leaves(pool)[0]) // 2)
        if self._whole:
            return WholeBatches(pool, batch, _ENDLESS)
        return Samples(pool, batch, _ENDLESS, lengths=self._lengths)

    def _loader(self, env: Env, dataset: Any) -> Source:
        workers: dict[str, Any] = {
            "num_workers": self._count(env),
            "persistent_workers": True,
            "prefetch_factor": 2,
            "multiprocessing_context": "fork",
        }

        def make(pin: bool) -> DataLoader[Any]:
            if self._whole:
                # batch_size=1 and not None, because Accelerate gives up batch_size=None.
                return DataLoader(dataset, batch_size=1, collate_fn=only, pin_memory=pin, **workers)
            return DataLoader(dataset, batch_size=dataset.batch, pin_memory=pin, **workers)

        def resize(loader: DataLoader[Any], steps: int) -> None:
            loader.dataset.batches = steps  # type: ignore[attr-defined]

        return LoaderSource(make, resize=None if dataset.values else resize)


def _collate_for(dataset: Samples | WholeBatches, seconds: float, counts: Any, place: int) -> None:
    torch.set_num_threads(1)
    buffers: dict[Any, torch.Tensor] = {}
    count, number, start = -1, place, 0.0
    while count < 0 or time.perf_counter() - start < seconds:
        if isinstance(dataset, WholeBatches):
            columns = [[leaf] for leaf in leaves(dataset[number])]
        else:
            first = number * dataset.batch
            samples = [leaves(dataset[index]) for index in range(first, first + dataset.batch)]
            columns = [list(column) for column in zip(*samples, strict=True)]
        number += 1
        for column in columns:
            key = len(column), column[0].shape, column[0].dtype
            if key not in buffers:
                buffers[key] = default_collate(column)
            torch.stack(column, out=buffers[key])
        count += 1
        if count == 0:  # the first batch touched the memory
            start = time.perf_counter()
    counts[place] = count


_IMAGES = "256x3x224x224 uint8 + labels, DataLoader with {} workers, samples decoded"

ROWS = (
    WorkersRow(
        "workers-images", images_batch, "256x3x224x224 uint8 + labels, DataLoader with workers, samples decoded",
        batch=256, pool=1024, rank=1, basis="link",
    ),
    WorkersRow(
        "workers-dlrm", dlrm_batch, "dict of 41 tensors, dataset of whole batches, DataLoader with workers",
        batch=8192, pool=65_536, rank=2, basis="loop", whole=True,
    ),
    WorkersRow(
        "workers-tokens", tokens_batch, "3 x int64 [64, 128..2048], DataLoader with workers",
        batch=64, pool=1024, rank=3, basis="loop", lengths=(512, 128, 2048, 1024, 256, 1536, 768, 1792),
    ),
    *(
        WorkersRow(
            f"images-{count}-workers", images_batch, _IMAGES.format(count),
            batch=256, pool=1024, rank=count, basis="link", workers=count,
        )
        for count in (1, 2, 4, 8, 12)
    ),
)  # fmt: skip
