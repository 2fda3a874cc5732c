"""Memory is bounded and given back: cases M1-M6; contracts C8 (how much is ahead), C9, C14 (bounded), C15 (degrade).

The same rows on CUDA: tests/gpu/test_gpu_memory.py.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch

from prefetchpipe import GPUPrefetcher
from prefetchpipe.errors import PrefetchWarning
from prefetchpipe.testing import SimulatedDevice
from tests.support import (
    Readings,
    Source,
    collect,
    constants,
    is_cuda,
    is_simulated,
    kernel,
    settle,
)

pytestmark = pytest.mark.timeout(90)

KIB = 1 << 10
MIB = 1 << 20


def filled(nbytes: int, index: int) -> torch.Tensor:
    return torch.full((nbytes // 4,), float(index))


def warned(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(entry.message) for entry in caught if issubclass(entry.category, PrefetchWarning)]


# Case M1, exact sizes


@pytest.mark.parametrize("depth", [1, 3])
def test_c14_m1_batches_of_random_length(sim: Any, fetch: str, depth: int) -> None:
    lengths = [random.Random(depth).randrange(1, 40_000) for _ in range(500)]
    bound = (depth + 2) * max(lengths) * 4 * 1.1
    prefetcher = GPUPrefetcher(
        (torch.full((n,), float(i)) for i, n in enumerate(lengths)), sim, depth=depth, fetch=fetch
    )
    readings = Readings(sim, 500)
    for index, batch in enumerate(prefetcher):
        assert batch.shape == (lengths[index],)
        readings.queue(index, batch)
        assert sim.pinned_bytes <= bound
        assert prefetcher.stats().pinned_bytes <= bound
    assert readings.values() == constants(range(500))


@pytest.mark.parametrize("exponent", [16, 20])
@pytest.mark.parametrize("depth", [1, 2])
def test_c14_m1_nothing_is_rounded_up_to_a_power_of_two(
    stream_device: Any, fetch: str, depth: int, exponent: int
) -> None:
    nbytes = (1 << exponent) + 1
    source = Source(lambda index: torch.full((nbytes,), index, dtype=torch.uint8), 8)
    prefetcher = GPUPrefetcher(source, stream_device, depth=depth, fetch=fetch)
    bound = (depth + 2) * nbytes * 1.1
    for index, batch in enumerate(prefetcher):
        held = prefetcher.stats().pinned_bytes
        assert held <= bound
        assert held >= nbytes or exponent == 16  # the smaller one may be worth no slot
        settle(stream_device)
        assert int(batch.min()) == int(batch.max()) == index
        if is_simulated(stream_device):
            assert stream_device.pinned_bytes <= bound


def test_c14_m1_one_large_batch_among_small_ones(sim: Any, fetch: str) -> None:
    source = Source(lambda index: filled(4 * MIB if index == 30 else 4 * KIB, index), 60)
    prefetcher = GPUPrefetcher(source, sim, depth=2, fetch=fetch)
    readings = Readings(sim, 60)
    for index, batch in enumerate(prefetcher):
        readings.queue(index, batch)
        assert sim.pinned_bytes <= 4 * 4 * MIB * 1.1
    assert readings.values() == constants(range(60))


@pytest.mark.filterwarnings("ignore::prefetchpipe.errors.PrefetchWarning")
@pytest.mark.parametrize("limit", [1000, 100 * KIB, 250 * KIB])
def test_c15_m1_max_pinned_bytes_is_an_upper_bound(stream_device: Any, fetch: str, limit: int) -> None:
    source = Source(lambda index: filled(100 * KIB, index), 20)
    prefetcher = GPUPrefetcher(source, stream_device, depth=4, max_pinned_bytes=limit, fetch=fetch)
    readings = Readings(stream_device, 20)
    for index, batch in enumerate(prefetcher):
        readings.queue(index, batch)
        assert prefetcher.stats().pinned_bytes <= limit
        if is_simulated(stream_device):
            assert stream_device.pinned_bytes <= limit
    assert readings.values() == constants(range(20))


# Case M2, many passes, many prefetchers


def test_c14_m2_forty_passes_allocate_nothing_after_the_third(sim: Any, fetch: str) -> None:
    prefetcher = GPUPrefetcher(Source(lambda index: filled(10 * KIB, index), 6), sim, depth=2, fetch=fetch)
    for number in range(40):
        total = 0.0
        for batch in prefetcher:
            settle(sim)
            total += float(batch[0])
        del batch
        assert total == 15
        settle(sim)
        now = (
            sim.pinned_allocations,
            sim.pinned_bytes,
            sim.allocated_bytes,
            prefetcher.stats().pinned_allocations,
            prefetcher.stats().pinned_bytes,
        )
        if number == 2:
            steady = now
        elif number > 2:
            assert now == steady
    assert sim.allocated_bytes == 0
    assert prefetcher.stats().batches == 240


def test_c14_m2_broken_off_passes_allocate_nothing_after_the_third(sim: Any, fetch: str) -> None:
    prefetcher = GPUPrefetcher(Source(lambda index: filled(10 * KIB, index), 12), sim, depth=3, fetch=fetch)
    for number in range(40):
        # At first as far as it gets, so that every slot has been in use.
        batches = collect(sim, itertools.islice(prefetcher, 12 if number < 3 else number % 7))
        assert [int(batch[0]) for batch in batches] == list(range(len(batches)))
        settle(sim)
        if number == 2:
            steady = sim.pinned_allocations
    assert sim.pinned_allocations == steady


def test_c9_m2_forty_prefetchers_leave_nothing_behind(sim: Any, fetch: str) -> None:
    for _ in range(40):
        prefetcher = GPUPrefetcher(Source(lambda index: filled(10 * KIB, index), 6), sim, fetch=fetch)
        assert [int(batch[0]) for batch in collect(sim, prefetcher)] == [0, 1, 2, 3, 4, 5]
        prefetcher.close()
        settle(sim)
        assert sim.pinned_bytes == 0
        assert sim.allocated_bytes == 0


# Case M3, page-locked memory is refused

LIMITS = {
    "at the first slot": 0,
    "less than one batch": MIB - 1,
    "after one slot": MIB * 3 // 2,
    "after two slots": MIB * 5 // 2,
}


@pytest.mark.parametrize("name", list(LIMITS))
@pytest.mark.parametrize("depth", [1, 3])
def test_c15_m3_refused_page_locked_memory_costs_speed_only(fetch: str, name: str, depth: int) -> None:
    device = SimulatedDevice(pinned_limit=LIMITS[name])
    prefetcher = GPUPrefetcher(Source(lambda i: filled(MIB, i), 20), device, depth=depth, fetch=fetch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            readings = Readings(device, 20)
            for index, batch in enumerate(prefetcher):
                readings.queue(index, batch)
                assert device.pinned_bytes <= LIMITS[name]
            assert readings.values() == constants(range(20))
    messages = warned(caught)
    if LIMITS[name] < MIB or (name == "after one slot" and depth == 3 and fetch == "thread"):
        assert len(messages) == 1
    assert len(messages) <= 1
    assert all(any(character.isdigit() for character in message) for message in messages)


def test_c15_m3_refused_while_growing(fetch: str) -> None:
    device = SimulatedDevice(pinned_limit=MIB // 2)
    source = Source(lambda index: filled(4 * KIB if index < 10 else MIB, index), 20)
    prefetcher = GPUPrefetcher(source, device, depth=2, fetch=fetch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            readings = Readings(device, 20)
            for index, batch in enumerate(prefetcher):
                readings.queue(index, batch)
            assert readings.values() == constants(range(20))
    assert len(warned(caught)) == 1


def test_c15_m3_the_warning_may_be_an_error(fetch: str) -> None:
    """Warnings turned into errors neither hang the pass nor break the next one."""
    device = SimulatedDevice(pinned_limit=0)
    prefetcher = GPUPrefetcher(Source(lambda index: filled(MIB, index), 5), device, fetch=fetch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with contextlib.suppress(PrefetchWarning):
            list(prefetcher)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert [int(batch[0]) for batch in collect(device, prefetcher)] == [0, 1, 2, 3, 4]


# Case M4, device memory is short


@pytest.mark.slow
@pytest.mark.parametrize("transformed", [False, True], ids=["", "transform"])
def test_c15_m4_device_memory_for_two_batches_at_depth_four(fetch: str, transformed: bool) -> None:
    """One beside the one in use."""
    device = SimulatedDevice(memory_limit=int(2.5 * 100 * KIB))
    source = Source(lambda index: filled(100 * KIB, index), 30)
    prefetcher = GPUPrefetcher(
        source, device, depth=4, fetch=fetch, transform=(lambda batch: {"x": batch}) if transformed else None
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(2):
            readings = Readings(device, 30)
            for index, batch in enumerate(prefetcher):
                if fetch == "thread" and index == 0:
                    # Leave the producer time to run into the limit; nothing tells from outside that it has.
                    assert source.wait_pulled(30 * number + 3)
                    source.wait_pulled(1000, timeout=0.2)
                kernel(device, lambda: None, seconds=0.01)
                readings.queue(index, batch["x"] if transformed else batch)
            del batch
            assert readings.values() == constants(range(30))
    # The caller's thread never looks ahead, so it may well get by.
    assert len(warned(caught)) == 1 or (fetch == "caller" and not warned(caught))


def test_c15_m4_device_memory_for_one_batch_which_the_consumer_drops_first(fetch: str) -> None:
    device = SimulatedDevice(memory_limit=int(1.5 * 100 * KIB))
    prefetcher = GPUPrefetcher(Source(lambda i: filled(100 * KIB, i), 20), device, depth=4, fetch=fetch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        readings = Readings(device, 20)
        iterator = iter(prefetcher)
        for index in range(20):
            batch = next(iterator)
            readings.queue(index, batch)
            del batch
        with pytest.raises(StopIteration):
            next(iterator)
        assert readings.values() == constants(range(20))
    assert len(warned(caught)) <= 1


@pytest.mark.filterwarnings("ignore::prefetchpipe.errors.PrefetchWarning")
def test_c15_m4_a_consumer_that_keeps_everything_gets_the_error(fetch: str) -> None:
    """Nobody will free memory while the consumer itself waits: an error, never a hang."""
    device = SimulatedDevice(memory_limit=int(3.5 * 100 * KIB))
    prefetcher = GPUPrefetcher(Source(lambda i: filled(100 * KIB, i), 20), device, depth=2, fetch=fetch)
    kept = []
    with pytest.raises(torch.OutOfMemoryError):
        for batch in prefetcher:
            kept.append(batch)  # noqa: PERF402  what came before the error counts
    settle(device)
    assert [int(b[0]) for b in kept] == list(range(len(kept)))
    assert len(kept) >= 1
    kept.clear()
    del batch
    readings = Readings(device, 20)
    for index, again in enumerate(prefetcher):
        readings.queue(index, again)
    assert readings.values() == constants(range(20))


@pytest.mark.filterwarnings("ignore::prefetchpipe.errors.PrefetchWarning")
def test_c15_m4_memory_that_comes_back_is_used_again(fetch: str) -> None:
    device = SimulatedDevice(memory_limit=int(6.5 * 100 * KIB))
    hog = list(GPUPrefetcher([filled(400 * KIB, 7)], device))
    prefetcher = GPUPrefetcher(Source(lambda i: filled(100 * KIB, i), 20), device, depth=4, fetch=fetch)
    readings = Readings(device, 40)
    for index, batch in enumerate(prefetcher):
        readings.queue(index, batch)
    settle(device)
    assert int(hog.pop()[5]) == 7
    for index, batch in enumerate(prefetcher):
        readings.queue(20 + index, batch)
    assert readings.values() == constants([*range(20), *range(20)])


# Case M5, how many batches are alive


class Counted:
    """A source whose host batches are counted while they live."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(self.count):
            yield self.make(index)

    def make(self, index: int) -> torch.Tensor:
        batch = filled(4 * KIB, index)
        self.alive.add(batch)
        return batch


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_c8_m5_device_batches_alive_at_every_step(device: Any, fetch: str, depth: int) -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def transform(batch: torch.Tensor) -> torch.Tensor:
        nonlocal most
        alive.add(batch)
        most = max(most, len(alive))
        return batch

    prefetcher = GPUPrefetcher(
        Source(lambda index: filled(4 * KIB, index), 60), device, depth=depth, transform=transform, fetch=fetch
    )
    for index, batch in enumerate(prefetcher):
        assert len(alive) <= depth + 1 + 1
        settle(device)
        assert int(batch[0]) == index
        if is_simulated(device):
            assert device.allocated_bytes <= (depth + 2) * 4 * KIB * 1.1
    # In the middle of `next` the last batch is still the consumer's.
    assert most <= depth + 1 + 1
    del batch
    assert len(alive) == 0


@pytest.mark.parametrize("depth", [1, 4])
def test_c8_m5_host_batches_alive_at_every_step(device: Any, fetch: str, depth: int) -> None:
    source = Counted(60)
    for index, batch in enumerate(GPUPrefetcher(source, device, depth=depth, fetch=fetch)):
        assert len(source.alive) <= depth + 1 + 1
        settle(device)
        assert int(batch[0]) == index
    assert len(source.alive) == 0


def test_c8_m5_a_dropped_batch_is_not_held_by_the_iterator(device: Any, fetch: str) -> None:
    iterator = iter(GPUPrefetcher(Source(lambda index: {"x": filled(4 * KIB, index)}, 10), device, fetch=fetch))
    batch = next(iterator)
    leaf = weakref.ref(batch["x"])
    del batch
    next(iterator)
    next(iterator)
    settle(device)
    assert leaf() is None


def test_c8_m5_a_pass_that_is_not_advanced_holds_at_most_depth_and_one(sim: Any, fetch: str) -> None:
    source = Source(lambda index: filled(4 * KIB, index), 50)
    iterators = [iter(GPUPrefetcher(source, sim, depth=2, fetch=fetch)) for _ in range(3)]
    batches = [next(iterator) for iterator in iterators]
    source.wait_pulled(3 * (1 + 2 + 1) + 1, timeout=0.2)
    settle(sim)
    assert source.pulled <= 3 * (1 + 2 + 1)
    assert sim.allocated_bytes <= 3 * (1 + 2 + 1) * 4 * KIB * 1.1
    assert [int(batch[0]) for batch in batches] == [0, 0, 0]


# Case M6, memory comes back


@pytest.mark.parametrize("how", ["close", "del", "with"])
@pytest.mark.parametrize("when", ["middle", "end"])
def test_c9_m6_pinned_and_device_memory_come_back(sim: Any, fetch: str, how: str, when: str) -> None:
    prefetcher = GPUPrefetcher(Source(lambda index: filled(MIB, index), 12), sim, depth=3, fetch=fetch)
    iterator = iter(prefetcher)
    kept = list(itertools.islice(iterator, 4 if when == "middle" else 12))
    assert sim.pinned_bytes > 0
    if how == "close":
        prefetcher.close()
    elif how == "with":
        with prefetcher:
            pass
    else:
        del prefetcher, iterator
        gc.collect()
    settle(sim)
    assert sim.pinned_bytes == 0
    assert len(kept) * MIB <= sim.allocated_bytes <= len(kept) * MIB * 1.1
    assert [int(batch[0]) for batch in kept] == list(range(len(kept)))
    kept.clear()
    settle(sim)
    assert sim.allocated_bytes == 0
    if how != "del":
        assert prefetcher.stats().pinned_bytes == 0
        assert [int(batch[0]) for batch in collect(sim, prefetcher)] == list(range(12))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["close", "del"])
def test_c9_m6_resident_memory_comes_back(device: Any, fetch: str, how: str) -> None:
    if is_simulated(device):
        device = "cpu"  # what a simulated device keeps for itself would be device memory
    if is_cuda(device):
        next(iter(GPUPrefetcher([torch.ones(3)], device)))  # the context stays
    process = psutil.Process()
    size = 40 * MIB  # above any threshold of malloc, so that freeing gives it back to the system
    source = Source(lambda index: filled(size, index), 6)
    gc.collect()
    before = process.memory_info().rss
    prefetcher = GPUPrefetcher(source, device, depth=2, fetch=fetch)
    iterator = iter(prefetcher)
    batch = next(iterator)
    settle(device)
    assert int(batch[-1]) == 0
    if fetch == "thread":
        assert source.wait_pulled(3)
    if how == "close":
        prefetcher.close()
    else:
        del prefetcher
    del iterator, batch
    gc.collect()
    settle(device)
    assert process.memory_info().rss - before < size
