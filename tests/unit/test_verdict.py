"""Each verdict, from a pipeline that has that bottleneck; times are those of a clock that the test moves."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from prefetchpipe import GPUPrefetcher, PrefetchWarning, native
from prefetchpipe.pipeline import gil, shared, staging, transfer
from prefetchpipe.pipeline.producer import Producer
from prefetchpipe.stats import Steady, measure_limits
from prefetchpipe.testing import SimulatedDevice
from tests.clock import Clock, ThreadsClock, stalling, timed
from tests.support import TIMEOUT

BATCHES = 20
MS = 1e-3


def batches(count: int = BATCHES, numbers: int = 2500) -> list[torch.Tensor]:
    """10 kB each."""
    return [torch.full((numbers,), float(i)) for i in range(count)]


def run(prefetcher: GPUPrefetcher, body: Any = None, passes: int = 1) -> Any:
    for _ in range(passes):
        for batch in prefetcher:
            if body is not None:
                body(batch)
    prefetcher.close()
    stats = prefetcher.stats()
    assert stats.verdict.endswith(".")
    assert "\n" not in stats.verdict
    return stats


class Squares(Dataset[torch.Tensor]):
    def __init__(self, count: int = BATCHES, work: Any = None) -> None:
        self.count = count
        self.work = work

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.work is not None:
            self.work(index)
        return torch.full((2500,), float(index) ** 2)


class SlowSampler(Sampler[int]):
    """Runs in the main process, inside `next(loader)`."""

    def __init__(self, clock: Clock, count: int, seconds: float, start_seconds: float = 0.0) -> None:
        self.clock = clock
        self.count = count
        self.seconds = seconds
        self.start_seconds = start_seconds

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        self.clock.advance(self.start_seconds)
        for index in range(self.count):
            self.clock.advance(self.seconds)
            yield index


# Nothing to say


@pytest.mark.parametrize("count", [0, 1, 3, 10])
def test_too_few_batches(count: int) -> None:
    stats = run(GPUPrefetcher(batches(count), "cpu"))
    assert stats.bottleneck == "unknown"
    assert f"{max(count - 3, 0)} of at least 8" in stats.verdict


def test_the_first_batch_of_every_pass_is_warm_up() -> None:
    assert run(GPUPrefetcher(batches(4), "cpu"), passes=3).steady.taken_batches == 1 + 3 + 3


# The loop


@pytest.mark.parametrize("fetch", ["thread", "caller"])
def test_a_loop_that_works_longer_than_it_waits(fetch: str) -> None:
    clock = Clock()
    stats = run(timed(batches(), clock, fetch=fetch), lambda batch: clock.advance(10 * MS))
    assert stats.bottleneck == "none"
    assert "works for 10 ms a batch and waits for 0 us (0%)" in stats.verdict


@pytest.mark.parametrize("fetch", ["thread", "caller"])
def test_a_device_that_computes_all_the_time(fetch: str) -> None:
    device = SimulatedDevice()
    stats = run(
        timed(batches(numbers=100_000), lambda: device.now, device, fetch=fetch),
        lambda batch: device.launch(lambda x: None, batch, seconds=10 * MS),
    )
    assert stats.bottleneck == "device"
    assert "only a faster step" in stats.verdict
    assert 9 * MS < stats.steady.device_wait_seconds / stats.steady.sent_batches < 11 * MS


# The loader


def test_a_slow_loader_behind_a_thread() -> None:
    clock = Clock()
    stats = run(timed(stalling(clock, 8 * MS, batches()), clock, fetch="thread"))
    assert stats.bottleneck == "loader"
    assert "next(loader) takes 8 ms a batch (the loop waits 8 ms of each 8 ms step, 100%)" in stats.verdict
    assert "DataLoader with num_workers=" in stats.verdict


def test_a_slow_loader_in_the_callers_thread() -> None:
    clock = Clock()

    def loader() -> Iterator[torch.Tensor]:
        for batch in batches():
            clock.advance(8 * MS)
            yield batch

    stats = run(timed(loader(), clock, fetch="caller"), lambda batch: clock.advance(2 * MS))
    assert stats.bottleneck == "loader"
    assert "next(loader) takes 8 ms a batch (the loop waits 8 ms of each 10 ms step, 80%)" in stats.verdict
    assert "DataLoader with num_workers=" in stats.verdict


def test_a_loader_that_is_late_now_and_then() -> None:
    count, late = 30, range(0, 30, 8)
    clock = ThreadsClock()
    asked = [threading.Event() for _ in range(count + 2)]
    # Reads by the consumer when it waits for a late batch: two a batch before, two more for each that was late.
    stalls = {number: 2 + 2 * number + 2 * len(range(0, number, 8)) + 2 for number in late}

    def loader() -> Iterator[torch.Tensor]:
        for number, batch in enumerate(batches(count)):
            asked[number].set()
            if number in late:
                clock.wait_for_reads(stalls[number])
                clock.advance(20 * MS)
            yield batch
        for event in asked:
            event.set()

    clock.before_read = lambda reads: clock.advance(20 * MS) if reads in stalls.values() else None
    numbers = iter(range(count))

    def body(batch: torch.Tensor) -> None:
        number = next(numbers)
        assert number + 1 in late or asked[number + 2].wait(TIMEOUT)
        clock.advance(10 * MS)

    stats = run(timed(loader(), clock, fetch="thread"), body)
    assert stats.bottleneck == "uneven"
    assert "loading and packing take 2.22 ms a batch on average" in stats.verdict
    assert "some batches come late (the loop waits 2.22 ms of each 12.2 ms step, 18%)" in stats.verdict
    assert "a larger depth (now 2)" in stats.verdict


def test_a_loop_without_work_has_nothing_to_hide_a_loader_behind() -> None:
    """Its thread is busy for half of the time only, and the loop waits for all of it."""
    steady = Steady(
        sent_batches=100,
        taken_batches=100,
        fetch_seconds=0.05,
        send_seconds=0.01,
        next_seconds=0.12,
        loop_seconds=0.001,
    )
    clock = Clock()
    stats = run(timed(batches(), clock, fetch="thread"))
    stats = dataclasses.replace(stats, steady=steady, path="thread", largest_batch_bytes=1 << 20, copied_bytes=1 << 30)
    assert stats.bottleneck == "loader"


def test_a_slow_data_set_without_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "usable_cores", lambda: 6)
    clock = Clock()
    data = Squares(work=lambda index: (clock.wait_until_stalled(index), clock.advance(8 * MS)))
    stats = run(timed(DataLoader(data, batch_size=None), clock, fetch="thread"))
    assert stats.bottleneck == "loader"
    assert "num_workers=6 (now 0) loads in other processes" in stats.verdict


@pytest.mark.slow
def test_too_few_workers_and_workers_that_use_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "usable_cores", lambda: 4)
    clock = Clock()
    sampler = SlowSampler(clock, BATCHES, 8 * MS)
    loader = DataLoader(Squares(), batch_size=None, sampler=sampler, num_workers=1)
    prefetcher = timed(loader, clock, fetch="caller")
    stats = run(prefetcher)
    assert stats.bottleneck == "loader"
    assert stats.workers == "shared"
    assert "raise num_workers from 1: this process may use 4 cores" in stats.verdict
    monkeypatch.setattr(shared, "usable_cores", lambda: 1)
    assert "its 1 worker has 1 core already: do less for each sample" in prefetcher.stats().verdict


def test_a_loader_that_draws_random_numbers_says_why_nothing_is_loaded_ahead() -> None:
    clock = Clock()
    data = Squares(work=lambda index: (torch.rand(()), clock.advance(8 * MS)))
    stats = run(timed(DataLoader(data, batch_size=None), clock))
    assert stats.bottleneck == "loader"
    assert stats.path == "caller"
    assert "nothing is loaded ahead, because the loader or the transform draws" in stats.verdict
    assert "num_workers=1" in stats.verdict


def test_a_loader_whose_python_keeps_the_loop_from_running() -> None:
    clock = Clock()
    held = [threading.Event() for _ in range(BATCHES + 1)]

    def loader() -> Iterator[torch.Tensor]:
        """5 ms of Python at the start of each batch: the loop's thread, just woken, does not get to run before."""
        for number, batch in enumerate(batches()):
            clock.advance(5 * MS)
            held[number].set()
            clock.wait_until_stalled(number)
            yield batch
        clock.advance(5 * MS)
        held[BATCHES].set()

    def before_read(reads: int) -> None:
        batch, which = divmod(reads - 2, 4)
        if which == 2 and 0 <= batch < BATCHES:
            assert held[batch + 1].wait(TIMEOUT)

    clock.before_read = before_read
    stats = run(timed(loader(), clock, fetch="thread"))
    assert stats.bottleneck == "gil"
    assert "lies ready for 5 ms of each 5 ms step" in stats.verdict
    assert "holds the GIL" in stats.verdict
    # The same times behind worker processes say something else: their Python has a GIL of its own.
    assert dataclasses.replace(stats, num_workers=2).bottleneck == "loader"


@pytest.mark.skipif(not gil.can_probe, reason="needs Linux")
@pytest.mark.parametrize(
    ("seconds", "is_kept"), [(5 * MS, True), (0.1 * MS, True), (5 * MS, False)], ids=["kept", "soon", "no core"]
)
def test_a_loop_that_does_not_get_the_gil_back(monkeypatch: pytest.MonkeyPatch, seconds: float, is_kept: bool) -> None:
    """It never waits for a batch: what it waits for is inside its own calls."""
    clock = Clock()
    switches = itertools.count(step=2 if is_kept else 1)
    monkeypatch.setattr(gil, "sleep", lambda _: clock.advance(seconds))
    monkeypatch.setattr(gil, "_voluntary_switches", lambda: next(switches))
    asked = [threading.Event() for _ in range(60 + 2)]

    def loader() -> Iterator[torch.Tensor]:
        for number, batch in enumerate(batches(60)):
            clock.advance(10 * MS)
            asked[number].set()
            yield batch
        for event in asked:
            event.set()

    numbers = iter(range(60))
    prefetcher = timed(loader(), clock, fetch="thread")
    stats = run(prefetcher, lambda batch: asked[next(numbers) + 2].wait(TIMEOUT))
    assert stats.gil_probes == 35, "32, and every eighth from then on"
    if is_kept and seconds > MS:
        assert stats.bottleneck == "gil"
        assert (
            "whenever it lets go of the GIL the loader's Python keeps it for 5 ms; a torch DataLoader" in stats.verdict
        )
    else:
        assert stats.bottleneck != "gil"


@pytest.mark.slow
def test_passes_that_take_longer_to_start_than_to_run() -> None:
    clock = Clock()
    sampler = SlowSampler(clock, 8, 1 * MS, start_seconds=0.5)
    options = {"batch_size": None, "sampler": sampler, "num_workers": 1}
    stats = run(timed(DataLoader(Squares(), **options), clock, fetch="caller"), passes=3)
    assert stats.bottleneck == "start"
    assert "beginning 3 passes took 1.5" in stats.verdict
    assert "persistent_workers=True" in stats.verdict
    stats = run(timed(DataLoader(Squares(), persistent_workers=True, **options), clock, fetch="caller"), passes=3)
    assert stats.bottleneck == "loader"


# Packing and the transform


def slow_packing(monkeypatch: pytest.MonkeyPatch, module: Any, advance: Any, seconds: float) -> None:
    copy_all = module.copy_all

    def slow(views: Any, sources: Any) -> None:
        advance(seconds)
        copy_all(views, sources)

    monkeypatch.setattr(module, "copy_all", slow)


def test_slow_packing_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "usable_cores", lambda: 8)
    clock = Clock()
    slow_packing(monkeypatch, transfer, clock.advance, 10 * MS)
    stats = run(timed(batches(numbers=100_000), clock, fetch="caller", copy_threads=1))
    assert stats.bottleneck == "packing"
    assert "packing and launching 400 kB takes 10 ms a batch, 0.04 GB/s" in stats.verdict
    assert "copy_threads=8 (now 1)" in stats.verdict


@pytest.mark.slow
def test_workers_that_leave_no_core_for_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "usable_cores", lambda: 2)
    clock = Clock()
    slow_packing(monkeypatch, transfer, clock.advance, 10 * MS)
    loader = DataLoader(batches(numbers=100_000), batch_size=None, num_workers=2)
    stats = run(timed(loader, clock, fetch="caller", workers="plain"))
    assert stats.bottleneck == "packing"
    assert "2 workers and the packing threads want the same 2 cores: num_workers=1 leaves one" in stats.verdict


def test_slow_packing_with_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimulatedDevice()
    monkeypatch.setattr(native, "_library", None)
    slow_packing(monkeypatch, staging, device.pass_time, 10 * MS)
    stats = run(timed(batches(numbers=100_000), lambda: device.now, device, fetch="caller"))
    assert stats.bottleneck == "packing"
    assert "already: send fewer bytes (uint8" in stats.verdict
    measure_limits(device)
    assert "GB/s measured" in run(timed(batches(numbers=100_000), lambda: device.now, device, fetch="caller")).verdict


def test_a_transform_that_keeps_the_host_busy() -> None:
    clock = Clock()

    def transform(batch: Any) -> Any:
        clock.advance(10 * MS)
        return batch

    stats = run(timed(batches(), clock, fetch="caller", transform=transform))
    assert stats.bottleneck == "transform"
    assert "takes the host 10 ms a batch" in stats.verdict


def test_tiny_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    slow_packing(monkeypatch, transfer, clock.advance, 50e-6)
    stats = run(timed(batches(), clock), lambda batch: clock.advance(10e-6))
    assert stats.bottleneck == "tiny"
    assert stats.path == "caller"
    assert "10 kB each, and handing one over takes 50 us of each 60 us step" in stats.verdict
    assert "larger batch_size" in stats.verdict


# The link


class DeviceClock(Clock):
    """Reads the simulated device's time."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        super().__init__()

    @property
    def now(self) -> float:
        return self.device.now

    @now.setter
    def now(self, value: float) -> None:
        assert value == 0, "the device's time passes by what is done on it"


@pytest.mark.parametrize("fetch", ["thread", "caller"])
@pytest.mark.parametrize("is_pinned", [False, True], ids=["packed", "pinned"])
def test_a_slow_link(fetch: str, is_pinned: bool) -> None:
    device = SimulatedDevice(bandwidth=1e6)
    ready = [device.pin_memory(batch) for batch in batches()] if is_pinned else batches()

    def once(body: Any = None) -> Any:
        clock = DeviceClock(device)
        # A thread copies while the loop waits, whoever gets to run first.
        source = stalling(clock, 0, ready) if fetch == "thread" else ready
        return run(timed(source, clock, device, fetch=fetch), body)

    stats = once(lambda batch: device.pass_time(1 * MS))
    assert stats.bottleneck == "link"
    assert "copying 10 kB takes 10 ms a batch at 0.001 GB/s" in stats.verdict
    assert "measured" not in stats.verdict
    assert "uint8" in stats.verdict
    measure_limits(device)
    assert "at 0.001 GB/s, of 0.001 GB/s measured" in once().verdict


# Memory


def test_page_locked_memory_refused_by_the_system() -> None:
    device = SimulatedDevice(pinned_limit=5000, bandwidth=1e6)
    with pytest.warns(PrefetchWarning, match="page-locked"):
        stats = run(timed(batches(), lambda: device.now, device, fetch="caller"))
    assert stats.bottleneck == "pinned"
    assert "100% of the bytes went the slow way" in stats.verdict
    assert "the system has to give 20 kB" in stats.verdict


def test_page_locked_memory_refused_by_the_limit_asked_for() -> None:
    device = SimulatedDevice(bandwidth=1e6)
    with pytest.warns(PrefetchWarning, match="page-locked"):
        stats = run(timed(batches(), lambda: device.now, device, fetch="caller", max_pinned_bytes=5000))
    assert stats.bottleneck == "pinned"
    assert "max_pinned_bytes=5000 has to be at least 20000" in stats.verdict


def test_a_full_device(monkeypatch: pytest.MonkeyPatch) -> None:
    met_the_limit = threading.Event()
    warn = Producer._warn_of_depth
    monkeypatch.setattr(Producer, "_warn_of_depth", lambda self: (warn(self), met_the_limit.set()))
    device = SimulatedDevice(memory_limit=25_000, bandwidth=1e6)
    prefetcher = timed(batches(), lambda: device.now, device, fetch="thread", depth=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stats = run(prefetcher, lambda batch: met_the_limit.wait(TIMEOUT))
    assert "device memory is full" in str(caught[0].message)
    assert stats.bottleneck == "memory"
    assert f"it held {stats.depth} of the 4 batches asked for ahead (the largest has 10 kB)" in stats.verdict
    assert stats.depth < 4


@pytest.mark.skipif(not gil.can_probe, reason="needs Linux")
def test_a_thread_that_keeps_the_gil_is_told_from_one_that_does_not() -> None:
    stop = threading.Event()

    def keeps() -> None:
        while not stop.is_set():
            sum(range(10_000))

    assert max(gil.probe(time.perf_counter) for _ in range(10)) == 0
    thread = threading.Thread(target=keeps)
    thread.start()
    try:
        assert any(gil.probe(time.perf_counter) for _ in range(1000))
    finally:
        stop.set()
        thread.join()
