"""Lists of ready CPU batches: what is left is the way to the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.batches import filled, map_leaves
from benchmarks.environment import Env
from benchmarks.rows.base import LoaderRow
from benchmarks.sources import ListSource, Source

__all__ = ["ROWS", "ReadyRow", "dlrm_batch", "images_batch", "tokens_batch"]

_RACE_POOL = 8


def images_batch(seed: int, *, small: bool, rows: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    """Decoded images with labels: 256 x 3 x 224 x 224 uint8 and int64, 38.5 MB."""
    generator = torch.Generator().manual_seed(seed)
    rows, side = (32, 64) if small else (rows, 224)
    images = torch.randint(0, 256, (rows, 3, side, side), dtype=torch.uint8, generator=generator)
    return images, torch.randint(0, 1000, (rows,), generator=generator)


def dlrm_batch(seed: int, *, small: bool, rows: int = 8192) -> dict[str, torch.Tensor]:
    """A recommender's batch: dense features, label and 39 columns of mixed dtypes, 41 tensors, 5.1 MB."""
    generator = torch.Generator().manual_seed(seed)
    rows = 512 if small else rows
    batch = {
        "dense": torch.rand(rows, 18, generator=generator),
        "label": torch.randint(0, 2, (rows,), generator=generator).float(),
    }
    kinds = ((torch.int64, 1), (torch.int32, 2), (torch.int64, 3), (torch.float32, 4))
    for column in range(39):
        dtype, width = kinds[column % len(kinds)]
        batch[f"c{column}"] = torch.randint(0, 100_000, (rows, width), generator=generator).to(dtype)
    return batch


def tiny_batch(seed: int, *, small: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Two [200, 100] float32 tensors, 160 kB."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(200, 100, generator=generator), torch.rand(200, 100, generator=generator)


def tokens_batch(seed: int, *, small: bool, rows: int = 64) -> dict[str, torch.Tensor]:
    """Three int64 [64, length] tensors, the length drawn from 128..2048."""
    generator = torch.Generator().manual_seed(seed)
    length = int(torch.randint(128, 513 if small else 2049, (), generator=generator))
    ids = torch.randint(0, 50_000, (rows, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def big_batch(seed: int, *, small: bool) -> torch.Tensor:
    """One float32 tensor of 256 MB."""
    values = torch.empty((4 << 20) if small else (256 << 20) // 4, dtype=torch.float32)
    return values.fill_(float(seed))


class ReadyRow(LoaderRow):
    """A pool of distinct batches, gone through in a circle.

    Args:
        make: Makes a batch from a seed.
        pool: Number of distinct batches.
        pinned: They are pinned from the start.
        attributes: Other attributes of :class:`LoaderRow`.
    """

    def __init__(
        self,
        name: str,
        make: Callable[..., Any],
        title: str,
        *,
        pool: int,
        rank: int,
        basis: str = "link",
        pinned: bool = False,
        **attributes: Any,
    ) -> None:
        self.name = name
        self.title = title
        self.rank = rank
        self.basis = basis
        for key, value in attributes.items():
            setattr(self, key, value)
        self._make = make
        self._count = pool
        self._pinned = pinned
        self._pool: list[Any] = []

    def source(self, env: Env) -> Source:
        """See :class:`LoaderRow`."""
        if not self._pool:
            batches = (self._make(seed, small=env.small) for seed in range(1, self._count + 1))
            pin = self._pinned and env.cuda
            self._pool = [map_leaves(torch.Tensor.pin_memory, batch) if pin else batch for batch in batches]
        return ListSource(self._pool, pinned=self._pinned)

    def race_source(self, env: Env, count: int) -> tuple[Source, list[int]]:
        """Full-size batches, a circle of eight values: longer than anybody's look-ahead."""
        shapes = [self._make(seed, small=env.small) for seed in range(1, min(_RACE_POOL, 4) + 1)]
        size = _RACE_POOL if self._count >= _RACE_POOL else 5
        pool = [filled(shapes[index % len(shapes)], index + 1) for index in range(size)]
        if self._pinned and env.cuda:
            pool = [map_leaves(torch.Tensor.pin_memory, batch) for batch in pool]
        return ListSource(pool, count, pinned=self._pinned), [index % size + 1 for index in range(count)]

    def release(self) -> None:
        """See :class:`LoaderRow`."""
        self._pool = []


ROWS = (
    ReadyRow("images", images_batch, "256x3x224x224 uint8 + labels, list of ready batches", pool=8, rank=1),
    ReadyRow("dlrm", dlrm_batch, "dict of 41 tensors, list of ready batches", pool=16, rank=2, basis="loop"),
    ReadyRow("tiny", tiny_batch, "2 x [200, 100] float32, list of ready batches", pool=64, rank=3, basis="loop"),
    ReadyRow("tokens", tokens_batch, "3 x int64 [64, 128..2048], list of ready batches", pool=48, rank=4, basis="loop"),
    ReadyRow("big", big_batch, "256 MB float32, list of ready batches", pool=4, rank=5, least=10, warm=4),
    ReadyRow(
        "images-pinned",
        images_batch,
        "images, list of batches that are pinned already",
        pool=8,
        rank=8,
        pinned=True,
        regimes=("transfer", "balanced"),
        allowed=("plain", "pinned", "side-stream", "prefetchpipe"),
        allowed_why="the same copies as pinned or side-stream here",
    ),
)
