"""Data sets in memory (contracts 1, 10, 16): rows brought straight to the slot, values and draws as torch's."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from prefetchpipe import GPUPrefetcher
from prefetchpipe.batch.rows import Gathered, Stacked, copy_all
from prefetchpipe.pipeline import datasets
from prefetchpipe.pipeline.staging import Packers
from prefetchpipe.testing import SimulatedDevice

ROWS = 1003


def table() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 40, 10, generator=generator)
    return TensorDataset(x, torch.arange(ROWS), x[:, 0].t().contiguous().t(), torch.arange(ROWS) % 2 == 0)


class Records(Dataset[Any]):
    """Any kind of sample; with ``many`` the data set has ``__getitems__``."""

    def __init__(self, make: Callable[[int], Any], rows: int = 61) -> None:
        self.make = make
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class ManyRecords(Records):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.make(index) for index in indices]


class Negative:
    """A sampler that counts from the end."""

    def __iter__(self) -> Any:
        return iter(range(-1, -41, -1))

    def __len__(self) -> int:
        return 40


Point = collections.namedtuple("Point", "x y")  # noqa: PYI024 - the plain kind, which has no annotations


def same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(theirs, torch.Tensor):
        assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        assert torch.equal(ours, theirs)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key, value in theirs.items():
            same(ours[key], value)
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            same(one, other)
    else:
        assert ours == theirs


def compare(make_loader: Callable[[], DataLoader], device: Any, passes: int = 2) -> None:
    """Two passes of each from the same seed; the global generator is in the same state afterwards."""
    torch.manual_seed(7)
    loader = make_loader()
    want = [list(loader) for _ in range(passes)]
    state = torch.get_rng_state()
    torch.manual_seed(7)
    prefetcher = GPUPrefetcher(make_loader(), device)
    got = [list(prefetcher) for _ in range(passes)]
    if isinstance(device, SimulatedDevice):
        device.synchronize()
    for ours, theirs in zip(got, want, strict=True):
        same(ours, theirs)
    assert torch.equal(state, torch.get_rng_state())
    prefetcher.close()


@pytest.fixture(params=["cpu", "sim"])
def device(request: pytest.FixtureRequest) -> Any:
    return "cpu" if request.param == "cpu" else SimulatedDevice()


LOADERS: dict[str, Callable[[], DataLoader]] = {
    "in order": lambda: DataLoader(table(), batch_size=100),
    "shuffled": lambda: DataLoader(table(), batch_size=100, shuffle=True),
    "shuffled, last dropped": lambda: DataLoader(table(), batch_size=100, shuffle=True, drop_last=True),
    "own generator": lambda: DataLoader(
        table(), batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "more than once around": lambda: DataLoader(
        table(), batch_size=64, sampler=RandomSampler(range(ROWS), num_samples=2500)
    ),
    "with replacement": lambda: DataLoader(
        table(), batch_size=64, sampler=RandomSampler(range(ROWS), replacement=True, num_samples=500)
    ),
    "weighted": lambda: DataLoader(table(), batch_size=64, sampler=WeightedRandomSampler([1.0] * ROWS, 500)),
    "batch sampler": lambda: DataLoader(
        table(), batch_sampler=BatchSampler(SequentialSampler(range(ROWS)), 37, drop_last=False)
    ),
    "negative": lambda: DataLoader(table(), batch_size=9, sampler=Negative()),
    "subset": lambda: DataLoader(Subset(table(), list(range(900, 100, -2))), batch_size=64, shuffle=True),
    "subset with negatives": lambda: DataLoader(Subset(table(), [-1, 5, -7] * 40), batch_size=64),
    "pinned": lambda: DataLoader(table(), batch_size=100, shuffle=True, pin_memory=True),
    "one row a batch": lambda: DataLoader(table(), batch_size=1, sampler=range(20)),
    "larger than the table": lambda: DataLoader(table(), batch_size=5000, shuffle=True),
}


@pytest.mark.parametrize("name", LOADERS)
def test_c1_c10_a_table_gives_torchs_batches(device: Any, name: str) -> None:
    compare(LOADERS[name], device)


SAMPLES: dict[str, Callable[[int], Any]] = {
    "tensor": lambda i: torch.full((3, 900), float(i)),
    "small tensor": lambda i: torch.tensor([i, i]),
    "array": lambda i: np.full((2, 1000), i, np.int16),
    "read-only array": lambda i: np.broadcast_to(np.float32(i), (2000,)),
    "tuple": lambda i: (torch.full((2000,), i), i, float(i), str(i)),
    "list": lambda i: [np.full(4000, i, np.uint8), torch.tensor(i)],
    "dict": lambda i: {"x": torch.full((2000,), i), "y": {"z": np.full(3000, i)}, "name": str(i)},
    "namedtuple": lambda i: Point(torch.full((2000,), i), i),
    "transposed": lambda i: torch.arange(2400).reshape(40, 60).t() + i,
    "expanded": lambda i: torch.tensor(i).expand(2000),
    "channels_last": lambda i: torch.full((2, 3, 20, 20), float(i)).to(memory_format=torch.channels_last),
    "bfloat16": lambda i: torch.full((2000,), i, dtype=torch.bfloat16),
    "empty": lambda _: torch.empty(0, 4),
}


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")  # torch's own collate says so
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("name", SAMPLES)
def test_c1_samples_are_collated_as_torch_does(device: Any, name: str, many: bool) -> None:
    kind = ManyRecords if many else Records
    compare(lambda: DataLoader(kind(SAMPLES[name]), batch_size=16, shuffle=True), device)


@pytest.mark.parametrize(
    "make",
    [
        lambda i: torch.zeros(2000 + i),
        lambda i: torch.zeros(2000, dtype=torch.int32 if i else torch.int64),
        lambda i: (torch.zeros(2000),) * (1 + i % 2),
        lambda i: torch.zeros(2000) if i else None,
        lambda i: {"a" if i else "b": torch.zeros(2000)},
        lambda i: object(),
    ],
)
def test_c7_what_cannot_be_collated_gives_torchs_outcome(make: Callable[[int], Any]) -> None:
    loader = DataLoader(Records(make), batch_size=16)
    try:
        want: Any = list(loader)
    except Exception as error:  # noqa: BLE001 - whatever torch raises
        with pytest.raises(type(error)):
            list(GPUPrefetcher(loader, "cpu"))
    else:
        same(list(GPUPrefetcher(loader, "cpu")), want)


def test_c16_rows_go_straight_to_the_slot() -> None:
    loader = DataLoader(table(), batch_size=100, shuffle=True)
    batch = next(iter(datasets.in_memory_source(loader, iter(loader))))
    assert [type(leaf) for leaf in batch] == [Gathered, torch.Tensor, torch.Tensor, torch.Tensor]
    records = DataLoader(Records(SAMPLES["dict"]), batch_size=16)
    assert type(next(iter(datasets.in_memory_source(records, iter(records))))["x"]) is Stacked


@pytest.mark.parametrize(
    "loader",
    [
        lambda: DataLoader(table(), batch_size=10, collate_fn=list),
        lambda: DataLoader(table(), batch_size=None),
        lambda: DataLoader(table(), batch_size=10, num_workers=1),
        lambda: [1, 2],
    ],
)
def test_other_loaders_are_left_alone(loader: Callable[[], Any]) -> None:
    it = iter(loader())
    assert datasets.in_memory_source(loader(), it) is it


def test_c10_a_pass_broken_off_draws_as_torchs_does() -> None:
    def third(loader: Any) -> torch.Tensor:
        torch.manual_seed(3)
        for _, batch in zip(range(3), loader, strict=False):
            last = batch
        return torch.cat([last[1].float(), torch.rand(3)])

    loader = DataLoader(table(), batch_size=50, shuffle=True)
    assert torch.equal(third(GPUPrefetcher(loader, "cpu")), third(loader))


def test_nothing_is_rebuilt_of_samplers_that_draw_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(self: Any) -> Any:
        return iter(torch.randperm(len(self.data_source), generator=self.generator).flip(0).tolist())

    datasets._draws_as_known.cache_clear()
    monkeypatch.setattr(RandomSampler, "__iter__", other)
    try:
        compare(lambda: DataLoader(table(), batch_size=100, shuffle=True), "cpu")
        assert not datasets._draws_as_known()
    finally:
        datasets._draws_as_known.cache_clear()


def test_rows_fill_what_they_stand_for() -> None:
    tensor = torch.arange(12).reshape(4, 3)
    rows = Gathered(tensor, torch.tensor([3, 0]))
    assert (rows.shape, rows.stride(), rows.numel()) == ((2, 3), (3, 1), 6)
    out = [torch.empty(2, 3, dtype=torch.int64), torch.empty(2)]
    copy_all(out, [rows, torch.tensor([1.0, 2.0])])
    assert out[0].tolist() == [[9, 10, 11], [0, 1, 2]]
    assert out[1].tolist() == [1.0, 2.0]
    assert rows.clone().tolist() == out[0].tolist()


class Stream(IterableDataset[Any]):
    """Inherits a ``__getitem__`` from ``Dataset`` which only raises."""

    def __iter__(self) -> Any:
        return iter(torch.arange(10.0))


@pytest.mark.parametrize("batch_size", [4, None])
def test_an_iterable_data_set_is_not_indexed(batch_size: int | None, fetch: str) -> None:
    loader = DataLoader(Stream(), batch_size=batch_size)
    got = [batch.tolist() for batch in GPUPrefetcher(loader, "cpu", fetch=fetch)]
    assert got == [batch.tolist() for batch in loader]


class Large(Dataset[Any]):
    """Samples of 32 KiB beside a label."""

    def __init__(self, count: int) -> None:
        self.rows = torch.arange(count * 8192.0).view(count, 8192)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return {"x": self.rows[index], "y": index}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("fetch", ["thread", "caller"])
@pytest.mark.parametrize("copy_threads", [1, 4, 8, 16])
def test_c5_large_stacks_are_packed_in_parts_by_several_threads(fetch: Any, copy_threads: int) -> None:
    dataset = Large(150)
    loader = DataLoader(dataset, batch_size=64)
    device = SimulatedDevice(bandwidth=1e9)
    prefetcher = GPUPrefetcher(loader, device, fetch=fetch, copy_threads=copy_threads)
    got = list(prefetcher)
    device.synchronize()
    assert torch.equal(torch.cat([batch["x"] for batch in got]), dataset.rows)
    assert torch.cat([batch["y"] for batch in got]).tolist() == list(range(150))
    packers = Packers(copy_threads // 2, "prefetchpipe-packing-test")
    view, stack = torch.empty(64, 8192), Stacked(list(dataset.rows[:64]))
    views, parts = packers.parts([view, view[:2]], [stack, dataset.rows[:2]])
    assert len(views) == len(parts) > copy_threads // 2
    assert sum(len(part) for part in views) == 64 + 2
