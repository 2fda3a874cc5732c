"""Right values in the right order: cases V1-V6 and V8-V10; contracts C1-C6, C8, C10, C11.

V7 needs two GPUs: tests/gpu/test_streams.py. V3 and V4 on CUDA: tests/gpu/test_streams.py and tests/gpu/test_race.py.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import itertools
import pickle
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from prefetchpipe import GPUPrefetcher
from tests.support import (
    Readings,
    Source,
    Thread,
    assert_same,
    collect,
    constants,
    is_cuda,
    is_simulated,
    kernel,
    leaves_of,
    new_stream,
    settle,
    to_plain,
    use_stream,
)

pytestmark = pytest.mark.timeout(90)


class Pair(NamedTuple):
    x: Any
    y: Any


# Case V1, a source that fills one buffer again and again

WORDS = np.array(["zero", "one", "two", "three", "four", "five", "six", "seven"])


class OneBuffer:
    """Yields the same object eight times, filled with 0, 1, ... 7."""

    def __init__(self, kind: str, device: Any) -> None:
        self.kind = kind
        self.tensor = torch.empty(1000)
        if kind == "pinned":
            self.tensor = pin(device, self.tensor)
        self.array = np.empty((10, 30), dtype=np.int64)
        self.words = WORDS[:3].copy()
        self.objects = np.empty(2, dtype=object)
        self.batch: Any = {
            "tensor": self.tensor,
            "pinned": self.tensor,
            "array": self.array,
            "array slice": self.array[::2, 1:7],
            "dict": {"x": self.tensor, "y": self.array},
            "nested": [{"x": (self.tensor, Pair(self.array, None))}, self.tensor[:10]],
            "other arrays": {"x": self.tensor, "words": self.words, "objects": self.objects},
        }[kind]

    def __iter__(self) -> Iterator[Any]:
        for index in range(8):
            self.tensor.fill_(index)
            self.array.fill(index)
            self.words[:] = WORDS[index]
            self.objects[:] = [str(index), (index,)]
            yield self.batch
        self.tensor.fill_(-1)
        self.array.fill(-1)
        self.words[:] = "gone"
        self.objects[:] = None


def pin(device: Any, tensor: torch.Tensor) -> torch.Tensor:
    if is_simulated(device):
        return device.pin_memory(tensor)
    return tensor.pin_memory() if is_cuda(device) else tensor


BUFFERS = ["tensor", "pinned", "array", "array slice", "dict", "nested", "other arrays"]


def check_buffers(batches: list[Any]) -> None:
    assert len(batches) == 8
    for index, batch in enumerate(batches):
        assert leaves_of(batch)
        for leaf in leaves_of(batch):
            assert bool((leaf == index).all()), (index, leaf)
        if isinstance(batch, dict) and "words" in batch:
            assert batch["words"].tolist() == [WORDS[index]] * 3
            assert batch["objects"].tolist() == [str(index), (index,)]


@pytest.mark.parametrize("kind", BUFFERS)
@pytest.mark.parametrize("depth", [1, 3])
def test_c5_v1_source_may_reuse_its_buffer(device: Any, fetch: str, kind: str, depth: int) -> None:
    prefetcher = GPUPrefetcher(OneBuffer(kind, device), device, depth=depth, fetch=fetch)
    kept = list(prefetcher)
    settle(device)
    check_buffers(kept)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor", "array", "dict"])
def test_c5_v1_source_may_reuse_its_buffer_before_a_slow_consumer(device: Any, fetch: str, kind: str) -> None:
    seen = []
    for batch in GPUPrefetcher(OneBuffer(kind, device), device, depth=3, fetch=fetch):
        time.sleep(0.02)
        settle(device)
        seen.append(to_plain(batch))
    check_buffers(seen)


@pytest.mark.parametrize("kind", BUFFERS)
def test_c5_v1_source_may_reuse_its_buffer_on_a_slow_link(kind: str, fetch: str) -> None:
    from prefetchpipe.testing import SimulatedDevice

    device = SimulatedDevice(bandwidth=1e5)
    kept = list(GPUPrefetcher(OneBuffer(kind, device), device, depth=3, fetch=fetch))
    settle(device)
    check_buffers(kept)


def test_c5_v1_source_may_shrink_and_free_its_buffer(device: Any, fetch: str) -> None:
    def rows() -> Iterator[torch.Tensor]:
        for index in range(8):
            batch = torch.full((4096,), float(index))
            yield batch
            batch.fill_(-1)
            batch.untyped_storage().resize_(0)

    kept = list(GPUPrefetcher(rows(), device, depth=3, fetch=fetch))
    settle(device)
    assert [(float(b.min()), float(b.max())) for b in kept] == constants(range(8))


# Case V2, batches that are kept


def distinct(index: int) -> dict[str, Any]:
    return {"x": torch.full((33, 7), float(index)), "more": [torch.full((5,), index), (torch.full((), index / 2),)]}


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_c2_v2_kept_batches_are_never_overwritten(device: Any, fetch: str, depth: int) -> None:
    count = 4 * depth + 1
    prefetcher = GPUPrefetcher(Source(distinct, count), device, depth=depth, fetch=fetch)
    kept = list(prefetcher)
    again = list(prefetcher)
    settle(device)
    for batches in (kept, again):
        assert_same([to_plain(b) for b in batches], [to_plain(distinct(i)) for i in range(count)])
    addresses = [leaf.data_ptr() for batch in kept + again for leaf in leaves_of(batch)]
    assert len(set(addresses)) == len(addresses)


@pytest.mark.parametrize("depth", [1, 4])
def test_c2_v2_one_kept_view_is_enough(device: Any, fetch: str, depth: int) -> None:
    count = 6 * depth
    kept = [batch["x"][3:5, ::2] for batch in GPUPrefetcher(Source(distinct, count), device, depth=depth, fetch=fetch)]
    settle(device)
    assert [(float(v.min()), float(v.max())) for v in kept] == constants(range(count))
    assert len({view.data_ptr() for view in kept}) == count


def test_c2_v2_every_third_batch_kept_the_others_dropped(device: Any, fetch: str) -> None:
    prefetcher = GPUPrefetcher(Source(distinct, 60), device, depth=3, fetch=fetch)
    kept = [batch for index, batch in enumerate(prefetcher) if index % 3 == 0]
    settle(device)
    assert_same([to_plain(b) for b in kept], [to_plain(distinct(i)) for i in range(0, 60, 3)])


def test_c2_v2_a_batch_may_be_written_by_the_consumer(device: Any, fetch: str) -> None:
    """The source's own memory, later batches and the other leaves do not see it."""
    batches = [distinct(index) for index in range(8)]
    kept = []
    for batch in GPUPrefetcher(batches, device, fetch=fetch):
        kernel(device, lambda x: x.fill_(-5), batch["x"])
        kept.append(batch)
    settle(device)
    for index, batch in enumerate(kept):
        assert bool((batch["x"] == -5).all())
        assert_same(to_plain(batch["more"]), to_plain(distinct(index)["more"]))
        assert_same(batches[index], distinct(index))


@pytest.mark.parametrize("depth", [1, 3])
def test_c2_v2_static_batches_stay_at_their_addresses_and_hold_until_the_next(device: Any, depth: int) -> None:
    prefetcher = GPUPrefetcher(Source(distinct, 12), device, depth=depth, static=True)
    addresses = set()
    readings = Readings(device, 24)
    for row in range(2):
        for index, batch in enumerate(prefetcher):
            addresses.add(tuple(leaf.data_ptr() for leaf in leaves_of(batch)))
            kernel(device, lambda *_: None, seconds=0.01)
            readings.queue(row * 12 + index, batch["x"], batch["more"][0])
    assert readings.values() == constants([*range(12), *range(12)])
    assert len(addresses) == 1


# Case V3, slots under a copy engine that lags behind


def sized(index: int, generator: random.Random) -> torch.Tensor:
    return torch.full((1 << generator.randrange(15),), float(index + 1))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("depth", [1, 3])
def test_c6_v3_slow_copies_of_many_sizes(fetch: str, seed: int, depth: int) -> None:
    from prefetchpipe.testing import SimulatedDevice

    device = SimulatedDevice(seed=seed, bandwidth=1e6)
    generator = random.Random(seed)
    batches = [sized(index, generator) for index in range(200)]
    prefetcher = GPUPrefetcher(batches, device, depth=depth, fetch=fetch)
    stop = generator.randrange(1, 100)
    readings = Readings(device, stop + 200)
    for row, batch in enumerate(itertools.chain(itertools.islice(prefetcher, stop), prefetcher)):
        assert batch.shape == batches[row if row < stop else row - stop].shape
        readings.queue(row, batch)
    del batch
    assert readings.values() == constants([*range(1, stop + 1), *range(1, 201)])


def test_c6_v3_close_while_copies_are_in_flight(fetch: str) -> None:
    """Pinned memory that a copy still reads must not be freed, nor device memory that it still writes."""
    from prefetchpipe.testing import SimulatedDevice

    device = SimulatedDevice(bandwidth=1e5)
    for _ in range(10):
        prefetcher = GPUPrefetcher(Source(distinct, 20), device, depth=4, fetch=fetch)
        kept = list(itertools.islice(prefetcher, 3))
        prefetcher.close()
        del prefetcher
        fresh = list(GPUPrefetcher(Source(lambda index: torch.full((512,), 99.0), 4), device, fetch=fetch))
        settle(device)
        assert_same([to_plain(b) for b in kept], [to_plain(distinct(i)) for i in range(3)])
        assert all(bool((batch == 99).all()) for batch in fresh)


# Case V4, a slow device behind a fast host

NESTINGS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda t: t,
    "dict": lambda t: {"a": t, "b": t[:7].clone()},
    "nested dict": lambda t: {"a": {"b": {"c": t}}, "d": t.double()},
    "list": lambda t: [t, t.int()],
    "tuple": lambda t: (t, (t[:3].clone(),)),
    "namedtuple": lambda t: Pair(t, {"y": [t.half()]}),
}


@pytest.mark.parametrize("nesting", list(NESTINGS))
@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("transformed", [False, True], ids=["", "transform"])
def test_c4_v4_slow_device_never_sees_another_batch(fetch: str, nesting: str, depth: int, transformed: bool) -> None:
    from prefetchpipe.testing import SimulatedDevice

    device = SimulatedDevice()

    def transform(batch: Any) -> Any:
        for leaf in leaves_of(batch):
            kernel(device, lambda view: view.mul_(2), leaf, seconds=0.001)
        return batch

    source = Source(lambda index: NESTINGS[nesting](torch.full((1024,), float(index + 1))), 60)
    prefetcher = GPUPrefetcher(source, device, depth=depth, transform=transform if transformed else None, fetch=fetch)
    readings = Readings(device, 60)
    for index, batch in enumerate(prefetcher):
        kernel(device, lambda: None, seconds=0.05)
        readings.queue(index, *leaves_of(batch))
        del batch
    factor = 2 if transformed else 1
    assert readings.values() == constants(factor * (index + 1) for index in range(60))


@pytest.mark.parametrize("keep", ["view", "one leaf"])
def test_c4_v4_what_is_left_of_a_dropped_batch_is_read_late(fetch: str, keep: str) -> None:
    from prefetchpipe.testing import SimulatedDevice

    device = SimulatedDevice()
    source = Source(lambda index: {"a": torch.full((64, 9), float(index)), "b": torch.full((40,), -1.0)}, 60)
    readings = Readings(device, 60)
    for index, batch in enumerate(GPUPrefetcher(source, device, depth=3, fetch=fetch)):
        rest = batch["a"][5:7] if keep == "view" else batch["a"]
        del batch
        kernel(device, lambda: None, seconds=0.05)
        readings.queue(index, rest)
        del rest
    assert readings.values() == constants(range(60))


@pytest.mark.parametrize("leave", ["break", "close", "new pass"])
def test_c4_v4_undelivered_batches_are_freed_only_after_their_copy(fetch: str, leave: str) -> None:
    from prefetchpipe.testing import SimulatedDevice

    device = SimulatedDevice(bandwidth=1e5)
    source = Source(lambda index: torch.full((512,), float(index)), 30)
    readings = Readings(device, 30 * 4)
    rows = itertools.count()
    expected: list[int] = []
    for _ in range(10):
        prefetcher = GPUPrefetcher(source, device, depth=4, fetch=fetch)
        iterator = iter(prefetcher)
        for index in range(3):
            kernel(device, lambda: None, seconds=0.05)
            readings.queue(next(rows), next(iterator))
            expected.append(index)
        if leave == "close":
            prefetcher.close()
        elif leave == "new pass":
            iterator = iter(prefetcher)
            readings.queue(next(rows), next(iterator))
            expected.append(0)
        del iterator, prefetcher
    assert readings.values()[: len(expected)] == constants(expected)


# Case V5, streams


def test_c3_v5_loop_inside_a_stream(stream_device: Any, fetch: str) -> None:
    readings = Readings(stream_device, 40)
    settle(stream_device)
    with use_stream(stream_device, new_stream(stream_device)):
        prefetcher = GPUPrefetcher(Source(distinct, 40), stream_device, fetch=fetch)
        for index, batch in enumerate(prefetcher):
            kernel(stream_device, lambda *_: None, seconds=0.002)
            readings.queue(index, batch["x"], batch["more"][0])
    assert readings.values() == constants(range(40))


def test_c3_v5_constructed_outside_and_run_inside_a_stream(stream_device: Any, fetch: str) -> None:
    readings = Readings(stream_device, 40)
    prefetcher = GPUPrefetcher(Source(distinct, 40), stream_device, fetch=fetch)
    iterator = iter(prefetcher)
    settle(stream_device)
    with use_stream(stream_device, new_stream(stream_device)):
        for index, batch in enumerate(iterator):
            readings.queue(index, batch["x"], batch["more"][0], seconds=0.002)
    assert readings.values() == constants(range(40))


@pytest.mark.parametrize("depth", [1, 3])
def test_c3_v5_another_stream_at_every_step(stream_device: Any, fetch: str, depth: int) -> None:
    streams = [new_stream(stream_device) for _ in range(3)]
    readings = Readings(stream_device, 60)
    settle(stream_device)
    iterator = iter(GPUPrefetcher(Source(distinct, 60), stream_device, depth=depth, fetch=fetch))
    for index in range(60):
        stream = (None, *streams)[index % 4]
        with use_stream(stream_device, stream) if stream is not None else contextlib.nullcontext():
            batch = next(iterator)
            kernel(stream_device, lambda *_: None, seconds=0.003 * (index % 3))
            readings.queue(index, batch["x"], batch["more"][0])
            del batch
    assert readings.values() == constants(range(60))


def test_c3_v5_next_from_another_thread(stream_device: Any, fetch: str) -> None:
    """Each thread has a current stream of its own; the batch is ordered for the one that calls next."""
    readings = Readings(stream_device, 40)
    streams = [new_stream(stream_device), new_stream(stream_device)]
    settle(stream_device)
    iterator = iter(GPUPrefetcher(Source(distinct, 40), stream_device, fetch=fetch))

    def steps(stream: Any, index: int) -> None:
        with use_stream(stream_device, stream):
            batch = next(iterator)
            kernel(stream_device, lambda *_: None, seconds=0.002)
            readings.queue(index, batch["x"], batch["more"][0])

    for index in range(40):
        if index % 2:
            Thread(lambda index=index: steps(streams[1], index)).result()
        else:
            steps(streams[0], index)
    assert readings.values() == constants(range(40))


# Case V6, exactly what the plain loop gives


class Unlike:
    """Equal to nothing and false."""

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        raise TypeError("not to be compared")

    __hash__ = None


@pytest.mark.parametrize("depth", [1, 2, 8])
def test_c1_v6_falsy_and_odd_batches(device: Any, fetch: str, depth: int) -> None:
    odd = [
        1,
        None,
        0,
        [],
        {},
        3,
        (),
        "",
        b"",
        False,
        0.0,
        ...,
        NotImplemented,
        StopIteration,
        StopIteration(),
        int,
        None,
    ]
    got = list(GPUPrefetcher(odd, device, depth=depth, fetch=fetch))
    assert [type(batch) for batch in got] == [type(batch) for batch in odd]
    assert [b for b in got if not isinstance(b, StopIteration)] == [b for b in odd if not isinstance(b, StopIteration)]


def test_c1_v6_batches_that_cannot_be_compared(device: Any, fetch: str) -> None:
    odd = [Unlike(), ValueError("a batch"), Unlike()]
    got = list(GPUPrefetcher(odd, device, fetch=fetch))
    assert [id(batch) for batch in got] == [id(batch) for batch in odd]


@pytest.mark.parametrize("depth", range(1, 9))
def test_c1_v6_every_count_at_every_depth(device: Any, fetch: str, depth: int) -> None:
    for count in range(8):
        prefetcher = GPUPrefetcher(Source(lambda index: torch.tensor([index]), count), device, depth=depth, fetch=fetch)
        for _ in range(2):
            assert [batch.tolist() for batch in collect(device, prefetcher)] == [[index] for index in range(count)]


def test_c1_v6_loader_empty_on_the_second_pass_only(device: Any, fetch: str) -> None:
    class Loader:
        passes = 0

        def __iter__(self) -> Iterator[int]:
            self.passes += 1
            return iter([] if self.passes == 2 else [1, 2])

    prefetcher = GPUPrefetcher(Loader(), device, fetch=fetch)
    assert [list(prefetcher) for _ in range(4)] == [[1, 2], [], [1, 2], [1, 2]]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("count", [0, 1, 5, 9])
def test_c1_v6_short_and_uneven_dataloaders(device: Any, count: int, workers: int) -> None:
    rows = [(torch.full((3,), float(i)), i) for i in range(count)]
    loader = DataLoader(rows, batch_size=4, num_workers=workers)
    prefetcher = GPUPrefetcher(loader, device)
    assert len(prefetcher) == len(loader)
    for _ in range(2):
        assert_same(collect(device, prefetcher), [to_plain(batch) for batch in loader])


class Shards(IterableDataset):
    """Uneven workers: the second one ends at once."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        return (torch.tensor([i]) for i in range(7 if info is None or info.id == 0 else 0))


@pytest.mark.slow
def test_c1_v6_iterable_dataset_whose_workers_end_apart(device: Any) -> None:
    loader = DataLoader(Shards(), batch_size=2, num_workers=2)
    assert_same(collect(device, GPUPrefetcher(loader, device)), [to_plain(batch) for batch in loader])


@pytest.mark.parametrize("loader", [range(5), {"a": 1, "b": 2}, "abc", collections.deque([1, 2]), (1, (2,))])
def test_c1_v6_any_iterable_is_a_loader(device: Any, loader: Any) -> None:
    assert list(GPUPrefetcher(loader, device)) == list(loader)


def test_c1_v6_sequence_without_iter_is_a_loader(fetch: str) -> None:
    class Old:
        def __getitem__(self, index: int) -> int:
            if index == 4:
                raise IndexError
            return index

    assert list(GPUPrefetcher(Old(), "cpu", fetch=fetch)) == [0, 1, 2, 3]


def test_c1_v6_shapes_and_structures_that_change_from_batch_to_batch(device: Any, fetch: str) -> None:
    batches = [
        torch.arange(5),
        {"a": torch.ones(2, 3)},
        {"a": torch.ones(2, 3), "b": [torch.zeros(1)]},
        {"a": torch.ones(2, 3), "b": torch.zeros(1)},
        {"b": torch.zeros(1), "a": torch.ones(2, 3)},
        {"a": torch.ones(2, 3, dtype=torch.float64)},
        {"a": torch.ones(0, 3)},
        {"a": "no tensor"},
        {"a": 7},
        [torch.arange(5.0), torch.arange(6.0).view(2, 3).t()],
        [torch.arange(6.0).view(2, 3), torch.arange(5.0)],
        torch.arange(5).int(),
    ]
    prefetcher = GPUPrefetcher(batches * 2, device, depth=3, fetch=fetch)
    kept = list(prefetcher)
    settle(device)
    assert [str(to_plain(batch)) for batch in kept] == [str(batch) for batch in batches * 2]


def test_c1_v6_a_list_that_hides_a_tensor_in_some_batches_only(device: Any, fetch: str) -> None:
    """Length and types of the list's head are the same in all of them."""

    def make(index: int) -> dict[str, Any]:
        notes: list[Any] = [1.5, 2, "a", *range(100)]
        if index % 3 == 1:
            notes[80] = torch.full((4,), float(index))
        return {"x": torch.full((2,), float(index)), "notes": notes}

    kept = list(GPUPrefetcher(Source(make, 9), device, depth=2, fetch=fetch))
    settle(device)
    for index, batch in enumerate(kept):
        assert_same(to_plain(batch), to_plain(make(index)))
        if is_cuda(device) and index % 3 == 1:
            assert batch["notes"][80].is_cuda


# Case V8, one seed, one run


class Augmented(Dataset):
    """Rows with random noise, each made in an unforeseeable time."""

    def __init__(self, draw: Callable[[], float], *, from_row: int = 0) -> None:
        self.draw = draw
        self.from_row = from_row
        self.made = 0
        self.clock = random.SystemRandom()

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        self.made += 1
        time.sleep(self.clock.random() * 5e-4)
        noise = self.draw() if self.made > self.from_row else 0.0
        return torch.tensor([float(index), noise], dtype=torch.float64)


def draw_torch() -> float:
    return float(torch.rand(()))


def draw_numpy() -> float:
    return float(np.random.rand())  # noqa: NPY002  the global generator is the point


DRAWS = {"torch": draw_torch, "numpy": draw_numpy, "random": random.random}


def one_run(make_loader: Callable[[], Any], wrap: Callable[[Any], Any], draw: Callable[[], float]) -> list[Any]:
    torch.manual_seed(7)
    np.random.seed(7)  # noqa: NPY002
    random.seed(7)
    clock = random.SystemRandom()
    seen = []
    for batch in wrap(make_loader()):
        seen.append((batch.tolist(), draw()))
        time.sleep(clock.random() * 5e-4)
    return seen


def rows_of(run: list[Any]) -> list[list[float]]:
    return [[row[0] for row in rows] for rows, _ in run]


def eight_runs(make_loader: Callable[[], Any], draw: Callable[[], float] = draw_torch, **options: Any) -> list[Any]:
    """Half of them at depth 2, half at depth 4; returns the one result."""
    depths = [2, 4] * 4
    runs = [
        one_run(make_loader, lambda loader, d=d: GPUPrefetcher(loader, "cpu", depth=d, **options), draw) for d in depths
    ]
    assert all(run == runs[0] for run in runs)
    return runs[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", list(DRAWS))
@pytest.mark.parametrize("from_row", [0, 1, 13], ids=["every row", "not the first row", "later rows"])
def test_c10_v8_one_seed_gives_one_run(name: str, from_row: int) -> None:
    def make_loader() -> DataLoader:
        return DataLoader(Augmented(DRAWS[name], from_row=from_row), batch_size=4, shuffle=True)

    run = eight_runs(make_loader, DRAWS[name])
    assert rows_of(run) == rows_of(one_run(make_loader, lambda loader: loader, DRAWS[name]))


@pytest.mark.slow
def test_c10_v8_one_seed_gives_one_run_of_a_generator_that_draws() -> None:
    class Loader:
        def __iter__(self) -> Iterator[torch.Tensor]:
            for index in range(10):
                yield torch.stack([torch.tensor(float(index)), torch.rand(())]).unsqueeze(0)

    eight_runs(Loader)


@pytest.mark.slow
def test_c10_v8_workers_give_what_the_plain_loop_gives() -> None:
    def make_loader() -> DataLoader:
        return DataLoader(Augmented(draw_torch), batch_size=4, shuffle=True, num_workers=2)

    expected = one_run(make_loader, lambda loader: loader, draw_torch)
    for depth in (2, 4):
        assert (
            one_run(make_loader, lambda loader, d=depth: GPUPrefetcher(loader, "cpu", depth=d), draw_torch) == expected
        )


def quiet_loader() -> DataLoader:
    """Draws nothing but its sampler's seed."""
    return DataLoader(Augmented(lambda: 0.0), batch_size=4, shuffle=True)


@pytest.mark.slow
def test_c10_v8_shuffled_without_augmentation_gives_what_the_plain_loop_gives() -> None:
    assert eight_runs(quiet_loader) == one_run(quiet_loader, lambda loader: loader, draw_torch)


@pytest.mark.slow
def test_c10_v8_shuffled_with_a_generator_of_its_own() -> None:
    def make_loader() -> DataLoader:
        return DataLoader(
            Augmented(lambda: 0.0), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)
        )

    assert eight_runs(make_loader) == one_run(make_loader, lambda loader: loader, draw_torch)


@pytest.mark.slow
def test_c10_v8_two_shuffled_loaders_side_by_side() -> None:
    """Both draw their seeds from the global generator, in the order of the plain loop."""

    def run(wrap: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(11)
        one, other = wrap(quiet_loader()), wrap(quiet_loader())
        return [(a.tolist(), b.tolist(), float(torch.rand(()))) for a, b in zip(one, other, strict=True)]

    expected = run(lambda loader: loader)
    for depth in (2, 4, 2, 4):
        assert run(lambda loader, depth=depth: GPUPrefetcher(loader, "cpu", depth=depth)) == expected


@pytest.mark.slow
def test_c10_v8_several_epochs_and_an_early_break() -> None:
    def run(wrap: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(11)
        loader = wrap(quiet_loader())
        seen = [batch.tolist() for batch in itertools.islice(loader, 2)]
        for _ in range(2):
            seen += [(batch.tolist(), float(torch.rand(()))) for batch in loader]
        return seen

    expected = run(lambda loader: loader)
    for depth in (2, 4, 2, 4):
        assert run(lambda loader, depth=depth: GPUPrefetcher(loader, "cpu", depth=depth)) == expected


def test_c10_v8_the_reason_for_fetching_in_the_callers_thread_is_told() -> None:
    prefetcher = GPUPrefetcher(DataLoader(Augmented(draw_torch), batch_size=4), "cpu")
    assert len(list(prefetcher)) == 6
    stats = prefetcher.stats()
    assert "caller" in f"{stats.path} {stats.path_reason}"
    assert "num_workers" in stats.path_reason or "fetch" in stats.path_reason


def test_c10_v8_fetch_caller_pulls_in_the_thread_of_next_one_batch_each(device: Any) -> None:
    pulled_by = []

    def make(index: int) -> torch.Tensor:
        pulled_by.append(threading.get_ident())
        return torch.tensor([index])

    source = Source(make, 5)
    iterator = iter(GPUPrefetcher(source, device, depth=3, fetch="caller"))
    for index in range(5):
        batch = next(iterator)
        assert source.pulled == index + 1
        settle(device)
        assert int(batch) == index
    assert set(pulled_by) == {threading.get_ident()}


def test_c10_v8_fetch_thread_pulls_in_one_thread_that_is_not_the_callers(device: Any) -> None:
    pulled_by = []

    def make(index: int) -> torch.Tensor:
        pulled_by.append(threading.current_thread().name)
        return torch.tensor([index])

    assert len(list(GPUPrefetcher(Source(make, 9), device, fetch="thread"))) == 9
    assert len(set(pulled_by)) == 1
    assert pulled_by[0].startswith("prefetchpipe-")


# Case V9, laziness


def test_c8_v9_set_epoch_between_construction_and_iteration() -> None:
    sampler = DistributedSampler(range(40), num_replicas=2, rank=0, shuffle=True, seed=5)
    loader = DataLoader(range(40), batch_size=4, sampler=sampler)

    def epoch(number: int) -> list[int]:
        sampler.set_epoch(number)
        return [index for batch in loader for index in batch.tolist()]

    expected = {number: epoch(number) for number in (0, 3, 4)}
    assert len({tuple(order) for order in expected.values()}) == 3
    sampler.set_epoch(0)
    prefetcher = GPUPrefetcher(loader, "cpu", depth=4)
    for number in (3, 4, 0, 3):
        prefetcher.sampler.set_epoch(number)
        assert [index for batch in prefetcher for index in batch.tolist()] == expected[number]


class Everything:
    """A loader with all that people ask a loader for, which counts its own use."""

    def __init__(self) -> None:
        self.dataset = list(range(10))
        self.sampler = object()
        self.batch_size = 5
        self.epoch = 0
        self.iters = 0
        self.nexts = 0
        self.position = 0

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[Any]:
        self.iters += 1
        return self

    def __next__(self) -> Any:
        self.nexts += 1
        if self.position == 2:
            self.position = 0
            raise StopIteration
        self.position += 1
        return self.position

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_c8_v9_looking_at_a_prefetcher_pulls_nothing(device: Any, fetch: str) -> None:
    loader = Everything()
    prefetcher = GPUPrefetcher(loader, device, fetch=fetch)
    assert len(prefetcher) == 2
    assert isinstance(repr(prefetcher), str)
    assert isinstance(str(prefetcher), str)
    assert prefetcher.dataset is loader.dataset
    assert prefetcher.sampler is loader.sampler
    assert prefetcher.batch_size == 5
    assert prefetcher.state_dict() == {"position": 0}
    assert hasattr(prefetcher, "load_state_dict")
    assert not hasattr(prefetcher, "no_such_attribute")
    with pytest.raises(AttributeError, match="no_such_attribute"):
        _ = prefetcher.no_such_attribute
    prefetcher.set_epoch(3)
    assert loader.epoch == 3
    assert prefetcher.stats().batches == 0
    dir(prefetcher)
    prefetcher.close()
    assert (loader.iters, loader.nexts) == (0, 0)
    assert list(prefetcher) == [1, 2]
    assert (loader.iters, loader.nexts) == (1, 3)


def test_c8_v9_nothing_is_pulled_across_the_end(device: Any, fetch: str) -> None:
    loader = Everything()
    iterator = iter(GPUPrefetcher(loader, device, depth=8, fetch=fetch))
    assert list(iterator) == [1, 2]
    for _ in range(3):
        assert list(iterator) == []
    assert (loader.iters, loader.nexts) == (1, 3)


def test_c8_v9_length_and_state_only_where_the_loader_has_them() -> None:
    prefetcher = GPUPrefetcher((index for index in range(3)), "cpu")
    with pytest.raises(TypeError):
        len(prefetcher)
    for name in ("state_dict", "load_state_dict", "dataset", "set_epoch"):
        assert not hasattr(prefetcher, name)
    loader = DataLoader(range(4))
    assert hasattr(GPUPrefetcher(loader, "cpu"), "state_dict") == hasattr(loader, "state_dict")
    assert hasattr(GPUPrefetcher(StatefulDataLoader(range(4)), "cpu"), "state_dict")
    assert list(prefetcher) == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_c8_v9_the_producer_runs_depth_ahead_and_no_further(device: Any, depth: int) -> None:
    source = Source(distinct, 40)
    iterator = iter(GPUPrefetcher(source, device, depth=depth, fetch="thread"))
    for taken in (1, 2, 3):
        next(iterator)
        assert source.wait_pulled(taken + depth)
        assert not source.wait_pulled(taken + depth + 2, timeout=0.1)


def test_c8_v9_never_more_than_depth_and_one_ahead(device: Any, fetch: str) -> None:
    delivered = 0
    ahead = []

    def make(index: int) -> torch.Tensor:
        ahead.append(index + 1 - delivered)
        return torch.tensor([index])

    for _ in GPUPrefetcher(Source(make, 200), device, depth=2, fetch=fetch):
        delivered += 1
    # A batch counts as delivered here only once the body runs, one later than for the producer.
    assert max(ahead) <= 2 + 1 + 1


# Case V10, resume


def stateful(workers: int = 0, *, shuffle: bool = False) -> StatefulDataLoader:
    return StatefulDataLoader(list(range(20)), batch_size=2, num_workers=workers, shuffle=shuffle)


def saved_state(loader: Any, moment: Any) -> Any:
    """The state at a moment: before iter, or after a number of batches, or after the end."""
    if moment == "before iter":
        return loader.state_dict()
    iterator = iter(loader)
    if moment == "after the end":
        assert len(list(iterator)) == 10
    else:
        for _ in range(moment):
            next(iterator)
    return pickle.loads(pickle.dumps(loader.state_dict()))


def resumed(loader: Any, state: Any, passes: int = 2) -> list[list[list[int]]]:
    loader.load_state_dict(state)
    return [[batch.tolist() for batch in loader] for _ in range(passes)]


MOMENTS = ["before iter", 0, 1, 3, 9, 10, "after the end"]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_c11_v10_resume_after_the_last_yielded_batch(fetch: str, depth: int, moment: Any) -> None:
    expected = resumed(stateful(), saved_state(stateful(), moment))
    state = saved_state(GPUPrefetcher(stateful(), "cpu", depth=depth, fetch=fetch), moment)
    got = resumed(GPUPrefetcher(stateful(), "cpu", depth=depth, fetch=fetch), state)
    assert got == expected
    if moment == 3:
        assert got[0][0] == [6, 7]


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before iter", 0, 3, 10, "after the end"])
def test_c11_v10_resume_with_workers(moment: Any) -> None:
    expected = resumed(stateful(2), saved_state(stateful(2), moment), passes=1)
    state = saved_state(GPUPrefetcher(stateful(2), "cpu", depth=3), moment)
    assert resumed(GPUPrefetcher(stateful(2), "cpu", depth=3), state, passes=1) == expected


def test_c11_v10_resume_a_shuffled_epoch(fetch: str) -> None:
    torch.manual_seed(3)
    whole = [batch.tolist() for batch in stateful(shuffle=True)]
    torch.manual_seed(3)
    prefetcher = GPUPrefetcher(stateful(shuffle=True), "cpu", depth=3, fetch=fetch)
    head = [batch.tolist() for batch in itertools.islice(prefetcher, 4)]
    state = copy.deepcopy(prefetcher.state_dict())
    assert head == whole[:4]
    twin = GPUPrefetcher(stateful(shuffle=True), "cpu", depth=3, fetch=fetch)
    assert resumed(twin, state, passes=1) == [whole[4:]]


class LiveState:
    """Its `state_dict` is one dict that it goes on writing to."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"position": 0, "history": []}

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.state["position"] < 10:
            self.state["position"] += 1
            self.state["history"].append(self.state["position"])
            yield torch.tensor([self.state["position"] - 1])
        self.state["position"] = 0

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = copy.deepcopy(state)


@pytest.mark.parametrize("depth", [1, 4])
def test_c11_v10_prefetched_batches_do_not_count(device: Any, fetch: str, depth: int) -> None:
    loader = LiveState()
    prefetcher = GPUPrefetcher(loader, device, depth=depth, fetch=fetch)
    iterator = iter(prefetcher)
    states = []
    for index in range(10):
        next(iterator)
        states.append(copy.deepcopy(prefetcher.state_dict()))
        assert states[-1] == {"position": index + 1, "history": list(range(1, index + 2))}
    twin = GPUPrefetcher(LiveState(), device, depth=depth, fetch=fetch)
    twin.load_state_dict(states[2])
    assert twin.state_dict() == states[2]
    assert [int(batch) for batch in collect(device, twin)] == list(range(3, 10))
    assert [int(batch) for batch in collect(device, twin)] == list(range(10))


@pytest.mark.parametrize("depth", [2, 4])
def test_c11_v10_state_after_an_interrupted_pass(fetch: str, depth: int) -> None:
    """A break leaves the state of the last batch that the body saw, not of the last one that was fetched."""
    prefetcher = GPUPrefetcher(stateful(), "cpu", depth=depth, fetch=fetch)
    for index, _ in enumerate(prefetcher):
        if index == 2:
            break
    state = prefetcher.state_dict()
    assert resumed(GPUPrefetcher(stateful(), "cpu", fetch=fetch), state, 1)[0][0] == [6, 7]
