"""Memory on CUDA: cases M1-M6; contracts C8, C9, C13 (the user's pools), C14, C15.

The same rows on the simulated device: tests/cases/test_memory.py.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import itertools
import random
import warnings
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from prefetchpipe import GPUPrefetcher
from prefetchpipe.errors import PrefetchWarning
from tests.support import Readings, Source, constants, settle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

needs_cupy = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="needs CuPy, an optional dependency")

MIB = 1 << 20


def filled(nbytes: int, index: int) -> torch.Tensor:
    return torch.full((nbytes // 4,), float(index))


def used_on_device() -> int:
    """As the driver sees it, whichever allocator took it."""
    settle("cuda")
    free, total = torch.cuda.mem_get_info()
    return total - free


def warned(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(entry.message) for entry in caught if issubclass(entry.category, PrefetchWarning)]


def test_c14_m1_batches_of_random_length(fetch: str) -> None:
    lengths = [random.Random(1).randrange(1, 300_000) for _ in range(500)]
    depth = 2
    prefetcher = GPUPrefetcher(
        Source(lambda index: torch.full((lengths[index],), float(index)), 500), "cuda", depth=depth, fetch=fetch
    )
    readings = Readings("cuda", 500)
    for index, batch in enumerate(prefetcher):
        readings.queue(index, batch)
        assert prefetcher.stats().pinned_bytes <= (depth + 2) * max(lengths) * 4 * 1.1
    assert readings.values() == constants(range(500))


def test_c14_m1_one_byte_more_than_a_power_of_two(fetch: str) -> None:
    nbytes = 64 * MIB + 1
    source = Source(lambda index: torch.full((nbytes,), index, dtype=torch.uint8), 6)
    prefetcher = GPUPrefetcher(source, "cuda", depth=2, fetch=fetch)
    assert [int(b.max()) + int(b.min()) for b in GPUPrefetcher([torch.ones(9, dtype=torch.uint8)], "cuda")] == [2]
    process = psutil.Process()
    before = process.memory_info().rss
    for index, batch in enumerate(prefetcher):
        assert int(batch.max()) == int(batch.min()) == index
        assert prefetcher.stats().pinned_bytes <= 4 * nbytes * 1.1
        # Host batches, of which depth + 1 may wait, and slots; rounding up would double the latter.
        assert process.memory_info().rss - before <= (4 + 4) * nbytes * 1.1


def test_c14_m2_forty_passes_reserve_nothing_after_the_third(fetch: str) -> None:
    source = Source(lambda index: {"x": filled(8 * MIB, index), "y": filled(4096, index)}, 8)
    prefetcher = GPUPrefetcher(source, "cuda", depth=2, fetch=fetch)
    readings = Readings("cuda", 8)
    for number in range(40):
        for index, batch in enumerate(prefetcher):
            readings.queue(index, batch["x"], batch["y"])
        del batch
        assert readings.values() == constants(range(8))
        stats = prefetcher.stats()
        now = (torch.cuda.memory_reserved(), stats.pinned_allocations, stats.pinned_bytes)
        if number == 2:
            steady, used = now, used_on_device()
        elif number > 2:
            assert now == steady
    assert used_on_device() <= used + 2 * MIB
    assert stats.batches == 320


def test_c14_m2_forty_prefetchers_reserve_nothing_after_the_third(fetch: str) -> None:
    readings = Readings("cuda", 8)
    for number in range(40):
        prefetcher = GPUPrefetcher(Source(lambda index: filled(8 * MIB, index), 8), "cuda", depth=2, fetch=fetch)
        for index, batch in enumerate(prefetcher):
            readings.queue(index, batch)
        del batch
        assert readings.values() == constants(range(8))
        prefetcher.close()
        assert prefetcher.stats().pinned_bytes == 0
        now = torch.cuda.memory_reserved()
        if number == 2:
            steady, used = now, used_on_device()
        elif number > 2:
            assert now == steady
    assert used_on_device() <= used + 2 * MIB


def test_c14_m2_broken_off_passes_reserve_nothing(fetch: str) -> None:
    prefetcher = GPUPrefetcher(Source(lambda index: filled(8 * MIB, index), 12), "cuda", depth=3, fetch=fetch)
    for number in range(40):
        batches = list(itertools.islice(prefetcher, 12 if number < 3 else number % 7))
        settle("cuda")
        assert [int(batch[-1]) for batch in batches] == list(range(len(batches)))
        del batches
        if number == 2:
            steady = torch.cuda.memory_reserved()
            allocations = prefetcher.stats().pinned_allocations
    assert torch.cuda.memory_reserved() <= steady
    assert prefetcher.stats().pinned_allocations == allocations


class Images(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 64, 64), index, dtype=torch.uint8), index


@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
def test_c14_m2_passes_over_workers_reserve_nothing_after_the_third(persistent: bool) -> None:
    loader = DataLoader(Images(), batch_size=8, num_workers=2, persistent_workers=persistent)
    with GPUPrefetcher(loader, "cuda") as prefetcher:
        for number in range(10):
            seen = []
            for images, labels in prefetcher:
                assert torch.equal(images[:, 0, 0, 0].long(), labels)
                assert bool((images == images[:, :1, :1, :1]).all())
                seen += labels.tolist()
            del images, labels
            assert seen == list(range(64))
            if number == 3:
                steady = torch.cuda.memory_reserved()
                pinned = prefetcher.stats().pinned_bytes
    if persistent:
        assert prefetcher.stats().pinned_bytes <= pinned
    assert torch.cuda.memory_reserved() <= steady


@pytest.mark.filterwarnings("ignore::prefetchpipe.errors.PrefetchWarning")
@pytest.mark.parametrize("kind", ["1 PiB", "1 PiB in a dict"])
def test_c15_m3_a_pebibyte_is_an_error_that_leaves_cuda_clean(fetch: str, kind: str) -> None:
    huge = torch.zeros(1, dtype=torch.uint8).expand(1 << 50)
    bad = huge if kind == "1 PiB" else {"a": torch.ones(3), "b": huge}
    with pytest.raises((RuntimeError, MemoryError)):
        torch.ones(1, dtype=torch.uint8).expand(1 << 50).to("cuda")
    clean = []

    def transform(batch: Any) -> Any:
        clean.append(torch.ones(4, device="cuda") * 2)
        return batch

    batches = [torch.full((100,), 7.0), bad]
    prefetcher = GPUPrefetcher(batches, "cuda", transform=transform, fetch=fetch)
    iterator = iter(prefetcher)
    assert float(next(iterator)[3]) == 7
    with pytest.raises((RuntimeError, MemoryError)):
        next(iterator)
    assert (torch.ones(5, device="cuda") * 3).tolist() == [3.0] * 5
    torch.cuda.synchronize()
    batches.pop()
    assert [float(batch[3]) for batch in prefetcher] == [7]
    assert [x.tolist() for x in clean] == [[2.0] * 4] * len(clean)


@pytest.mark.filterwarnings("ignore::prefetchpipe.errors.PrefetchWarning")
def test_c15_m3_no_pinned_memory_allowed_still_gives_right_values(fetch: str) -> None:
    prefetcher = GPUPrefetcher(Source(lambda i: filled(MIB, i), 20), "cuda", max_pinned_bytes=1000, fetch=fetch)
    readings = Readings("cuda", 20)
    for index, batch in enumerate(prefetcher):
        readings.queue(index, batch)
        assert prefetcher.stats().pinned_bytes <= 1000
    assert readings.values() == constants(range(20))


@contextlib.contextmanager
def nearly_full(left: int) -> Iterator[None]:
    """All device memory taken but `left` bytes, whichever allocator asks for them."""
    gc.collect()
    settle("cuda")
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(free - left, dtype=torch.uint8, device="cuda")
    try:
        yield
    finally:
        del hog
        settle("cuda")
        torch.cuda.empty_cache()


@pytest.mark.parametrize("limit", ["driver", "fraction"])
def test_c15_m4_device_memory_for_two_batches_at_depth_four(fetch: str, limit: str) -> None:
    size = 256 * MIB
    source = Source(lambda index: filled(size, index), 8)
    prefetcher = GPUPrefetcher(source, "cuda", depth=4, fetch=fetch)
    readings = Readings("cuda", 16)
    readings.values()
    torch.cuda.empty_cache()
    stack = contextlib.ExitStack()
    with stack, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if limit == "driver":
            stack.enter_context(nearly_full(int(2.5 * size)))
        else:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2.5 * size) / total)
            stack.callback(torch.cuda.set_per_process_memory_fraction, 1.0)
        row = 0
        for _ in range(2):
            for batch in prefetcher:
                readings.queue(row, batch)
                row += 1
            del batch
        values = readings.values()
    assert values == constants([*range(8), *range(8)])
    assert len(warned(caught)) <= 1  # none where the consumer is quick enough to need no depth


@pytest.mark.filterwarnings("ignore::prefetchpipe.errors.PrefetchWarning")
def test_c15_m4_a_consumer_that_keeps_everything_gets_the_error(fetch: str) -> None:
    size = 256 * MIB
    prefetcher = GPUPrefetcher(Source(lambda index: filled(size, index), 12), "cuda", depth=2, fetch=fetch)
    kept = []
    with nearly_full(int(3.5 * size)):
        with pytest.raises(torch.OutOfMemoryError):
            for batch in prefetcher:
                kept.append(batch)  # noqa: PERF402  what came before the error counts
        settle("cuda")
        assert 1 <= len(kept) <= 3
        assert [int(b[-1]) for b in kept] == list(range(len(kept)))
        kept.clear()
        del batch
        gc.collect()
    assert [int(b[-1]) for b in itertools.islice(prefetcher, 3)] == [0, 1, 2]


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_c8_m5_device_memory_at_every_step(fetch: str, depth: int) -> None:
    size = 16 * MIB
    settle("cuda")
    torch.cuda.empty_cache()
    prefetcher = GPUPrefetcher(Source(lambda index: filled(size, index), 30), "cuda", depth=depth, fetch=fetch)
    base, used = torch.cuda.memory_allocated(), used_on_device()
    torch.cuda.reset_peak_memory_stats()
    for index, batch in enumerate(prefetcher):
        assert int(batch[-1]) == index
        assert torch.cuda.memory_allocated() - base <= (depth + 2) * size * 1.05
    assert torch.cuda.max_memory_allocated() - base <= (depth + 2) * size * 1.05
    assert used_on_device() - used <= (depth + 2) * size * 1.05 + 24 * MIB


@pytest.mark.parametrize("how", ["close", "del"])
def test_c9_m6_host_and_device_memory_come_back(fetch: str, how: str) -> None:
    size = 64 * MIB
    next(iter(GPUPrefetcher([torch.ones(1 << 20)], "cuda", fetch=fetch)))
    gc.collect()
    settle("cuda")
    torch.cuda.empty_cache()
    process = psutil.Process()
    before = (process.memory_info().rss, torch.cuda.memory_allocated(), used_on_device())
    prefetcher = GPUPrefetcher(Source(lambda index: filled(size, index), 8), "cuda", depth=2, fetch=fetch)
    iterator = iter(prefetcher)
    batch = next(iterator)
    batch = next(iterator)
    assert int(batch[-1]) == 1
    if how == "close":
        prefetcher.close()
        assert prefetcher.stats().pinned_bytes == 0
        assert int(batch[-1]) == 1
    else:
        del prefetcher
    del iterator, batch
    gc.collect()
    settle("cuda")
    torch.cuda.empty_cache()
    assert process.memory_info().rss - before[0] < size
    assert torch.cuda.memory_allocated() == before[1]
    assert used_on_device() - before[2] < size // 2


@needs_cupy
@pytest.mark.parametrize("size", [4096, 8 * MIB])
def test_c13_m6_the_users_cupy_and_torch_pools_stay_as_they_are(fetch: str, size: int) -> None:
    import cupy

    def state() -> tuple[Any, ...]:
        pool, pinned = cupy.get_default_memory_pool(), cupy.get_default_pinned_memory_pool()
        return (
            pool.total_bytes(),
            pool.used_bytes(),
            pool.get_limit(),
            pinned.n_free_blocks(),
            cupy.cuda.get_allocator(),
            cupy.cuda.get_current_stream().ptr,
            cupy.cuda.runtime.getDevice(),
            torch.cuda.get_allocator_backend(),
        )

    kept = cupy.arange(1000)
    float(kept.sum())
    before = state()
    prefetcher = GPUPrefetcher(Source(lambda index: filled(size, index), 12), "cuda", depth=3, fetch=fetch)
    batches = []
    for batch in prefetcher:
        assert state() == before
        batches.append(batch)
    assert [int(b[-1]) for b in batches] == list(range(12))
    prefetcher.close()
    assert state() == before
    assert int(kept.sum()) == 499500


def test_c16_tiny_batches_hold_little_pinned_memory(fetch: str) -> None:
    prefetcher = GPUPrefetcher(Source(lambda index: torch.full((10,), float(index)), 50), "cuda", fetch=fetch)
    readings = Readings("cuda", 50)
    for index, batch in enumerate(prefetcher):
        readings.queue(index, batch)
        assert prefetcher.stats().pinned_bytes <= 1 << 20
    assert readings.values() == constants(range(50))
