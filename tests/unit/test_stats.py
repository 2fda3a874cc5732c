"""`stats()`: what is counted, what it costs, and how it is shown."""

from __future__ import annotations

import dataclasses
import functools
import html.parser
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

from prefetchpipe import GPUPrefetcher, PinnedMemoryError
from prefetchpipe.batch import few
from prefetchpipe.pipeline import shortway, staging, transfer
from prefetchpipe.stats import Limits, Stats, known_limits, measure_limits
from prefetchpipe.testing import SimulatedDevice
from tests.clock import Clock, timed

MS = 1e-3


def batches(count: int = 20, numbers: int = 2500) -> list[torch.Tensor]:
    return [torch.full((numbers,), float(i)) for i in range(count)]


def slow(clock: Any, seconds: float, source: Any) -> Iterator[Any]:
    for batch in source:
        clock.advance(seconds)
        yield batch


# Times


def test_times_by_step_in_the_callers_thread() -> None:
    clock = Clock()

    def transform(batch: Any) -> Any:
        clock.advance(3 * MS)
        return batch

    prefetcher = timed(slow(clock, 5 * MS, batches()), clock, fetch="caller", transform=transform)
    for _ in prefetcher:
        clock.advance(2 * MS)
    stats = prefetcher.stats()
    assert stats.fetch_seconds == stats.loader_seconds == pytest.approx(20 * 5 * MS)
    assert stats.send_seconds == stats.transform_seconds == pytest.approx(20 * 3 * MS)
    assert stats.next_seconds == pytest.approx(20 * 8 * MS)
    assert stats.loop_seconds == pytest.approx(19 * 2 * MS), "the last step ends with the loop, not with a next"
    assert stats.packing_seconds == pytest.approx(0, abs=1e-9)
    assert stats.stall_seconds == stats.device_wait_seconds == stats.slot_wait_seconds == 0
    assert stats.steady.sent_batches == stats.steady.taken_batches == 17
    assert stats.steady.fetch_seconds == pytest.approx(17 * 5 * MS)
    assert stats.steady.loop_seconds == pytest.approx(17 * 2 * MS)
    assert stats.waiting_percent == pytest.approx(80)


def test_waits_for_slots_and_for_the_device() -> None:
    device = SimulatedDevice(bandwidth=4e7)
    prefetcher = timed(batches(numbers=100_000), lambda: device.now, device, fetch="caller", depth=4)
    for _ in prefetcher:
        pass
    stats = prefetcher.stats()
    assert 0.15 < stats.slot_wait_seconds < 0.21
    assert stats.slot_wait_seconds < stats.send_seconds
    busy = timed(batches(numbers=100_000), lambda: device.now, device, fetch="caller")
    for batch in busy:
        device.launch(lambda x: None, batch, seconds=20 * MS)
    assert 0.3 < busy.stats().device_wait_seconds < 0.41


@pytest.mark.parametrize(("seconds", "fewest", "most"), [(0.04 * MS, 20, 40), (20 * MS, 0, 4)], ids=["quick", "slow"])
def test_the_host_is_some_small_batches_ahead_of_the_device(seconds: float, fewest: int, most: int) -> None:
    """No copy of them waits for another stream, but page-locked memory is theirs until the device has come to them.

    Of a device that is slower by far they go the way of larger ones, with their bound.
    """
    device = SimulatedDevice()
    busy = timed(batches(100), lambda: device.now, device, fetch="caller")
    for batch in busy:
        device.launch(lambda x: None, batch, seconds=seconds)
    stats = busy.stats()
    assert (100 - most) * seconds < stats.device_wait_seconds < (100 - fewest) * seconds
    assert stats.packing_seconds == pytest.approx(0, abs=1e-3)


def test_the_clock_is_read_a_few_times_a_batch() -> None:
    clock = Clock()
    for options, most in (({"fetch": "caller"}, 5), ({"fetch": "auto"}, 7), ({"fetch": "thread"}, 4)):
        prefetcher = timed(batches(40), clock, **options)
        iterator = iter(prefetcher)
        for _ in range(20):
            next(iterator)
        before = clock.reads[clock.consumer]
        for _ in range(10):
            next(iterator)
        assert clock.reads[clock.consumer] - before <= 10 * most
        prefetcher.close()


def test_starting_worker_processes_counts_as_start() -> None:
    clock = Clock()

    class Loader:
        def __iter__(self) -> Iterator[torch.Tensor]:
            clock.advance(0.5)
            return iter(batches(3))

    prefetcher = timed(Loader(), clock, fetch="caller")
    assert len(list(prefetcher)) + len(list(prefetcher)) == 6
    stats = prefetcher.stats()
    assert stats.start_seconds == pytest.approx(1.0)
    assert stats.passes == 2
    assert stats.next_seconds == 0


# Bytes and depth


def test_bytes_on_the_device_before_somebody_takes_them() -> None:
    device = SimulatedDevice()
    prefetcher = GPUPrefetcher(batches(10), device, depth=3, fetch="thread")
    iterator = iter(prefetcher)
    assert prefetcher.stats().device_bytes == 0
    next(iterator)
    producer = next(iter(prefetcher._passes))
    while producer._sent < 4:
        pass
    stats = prefetcher.stats()
    assert stats.device_bytes == 3 * 10_000
    assert stats.depth_reached == 3
    assert stats.largest_batch_bytes == 10_000
    assert 30_000 <= stats.peak_device_bytes <= 40_000
    for _ in iterator:
        pass
    assert prefetcher.stats().device_bytes == 0
    assert prefetcher.stats().batches == 10


def test_bytes_of_a_pass_that_was_left_are_gone_and_those_carried_over_count() -> None:
    prefetcher = GPUPrefetcher(batches(10), "cpu", depth=3, fetch="thread")
    next(iter(prefetcher))
    assert prefetcher.stats().device_bytes == 0
    source = iter(batches(10))
    prefetcher = GPUPrefetcher(source, "cpu", depth=3, fetch="thread")
    iterator = iter(prefetcher)
    next(iterator)
    producer = next(iter(prefetcher._passes))
    while producer._sent < 4:
        pass
    del iterator, producer
    assert prefetcher.stats().device_bytes == 3 * 10_000
    assert len(list(prefetcher)) == 9
    assert prefetcher.stats().device_bytes == 0


def test_pinned_batches_count_where_they_are() -> None:
    device = SimulatedDevice()
    prefetcher = GPUPrefetcher([device.pin_memory(batch) for batch in batches(8)], device)
    assert len(list(prefetcher)) == 8
    stats = prefetcher.stats()
    assert stats.direct_bytes == stats.copied_bytes == 80_000
    assert stats.largest_batch_bytes == 10_000
    assert stats.timed_copies == 2


# Copies on the device


@pytest.mark.parametrize("fetch", ["thread", "caller"])
def test_some_copies_are_measured_on_the_device(fetch: str) -> None:
    device = SimulatedDevice(bandwidth=2e9)
    prefetcher = GPUPrefetcher(batches(100, 100_000), device, fetch=fetch)
    for _ in prefetcher:
        pass
    device.synchronize()
    stats = prefetcher.stats()
    assert stats.timed_copies == 15 + 3, "every fourth of the first 63, every sixteenth from then on"
    assert stats.timed_bytes == stats.timed_copies * 400_000
    assert stats.copy_gb_per_second == pytest.approx(2.0, rel=0.5)
    assert stats.copy_seconds == pytest.approx(stats.timed_seconds * 100 / 18)


def test_timing_events_are_used_again() -> None:
    made = []

    class Counting(SimulatedDevice):
        def new_timing_event(self) -> Any:
            made.append(1)
            return super().new_timing_event()

    device = Counting()
    prefetcher = GPUPrefetcher(batches(200, 100_000), device, fetch="caller")
    for _ in prefetcher:
        device.synchronize()
    assert prefetcher.stats().timed_copies == 15 + 9
    assert len(made) == 2


def test_stats_waits_for_no_copy() -> None:
    device = SimulatedDevice(bandwidth=10.0)  # 1000 seconds a batch
    prefetcher = GPUPrefetcher(batches(4), device, fetch="caller")
    iterator = iter(prefetcher)
    for _ in range(2):
        next(iterator)
    now = device.now
    assert prefetcher.stats().timed_copies == 0
    for _ in iterator:
        pass
    assert device.now > now + 100, "the ring had to wait"
    assert prefetcher.stats().timed_copies == 0, "the fourth copy is measured, and still runs"
    device.synchronize()
    assert prefetcher.stats().timed_copies == 1
    assert prefetcher.stats().copy_gb_per_second == pytest.approx(1e-8, rel=0.01)


def test_the_last_piece_of_a_large_batch_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_PIECE_BYTES", 2 << 20)
    monkeypatch.setattr(shortway, "LARGE_BYTES", 2 << 20)
    monkeypatch.setattr(transfer, "LARGE_BYTES", 2 << 20)
    monkeypatch.setattr(few, "_LARGE_BYTES", 2 << 20)
    device = SimulatedDevice(bandwidth=1e9)
    pack = staging._pack_bytes
    # Packing goes on between the copies: what is measured must not hold it.
    monkeypatch.setattr(staging, "_pack_bytes", lambda *args: (device.pass_time(1.0), pack(*args)))
    large = [{"x": torch.full((400_000,), float(i)), "y": torch.full((400_000,), -1.0)} for i in range(8)]
    prefetcher = GPUPrefetcher(large, device, fetch="caller")
    arrived = list(prefetcher)
    device.synchronize()
    assert [float(batch["x"][-1]) for batch in arrived] == [float(i) for i in range(8)]
    stats = prefetcher.stats()
    assert stats.timed_copies == 2
    assert stats.timed_bytes == 2 * 1_600_000
    assert stats.copy_gb_per_second == pytest.approx(1.0, rel=0.1)


def test_nothing_is_measured_on_the_cpu() -> None:
    prefetcher = GPUPrefetcher(batches(), "cpu")
    assert len(list(prefetcher)) == 20
    stats = prefetcher.stats()
    assert stats.timed_copies == 0
    assert stats.copy_seconds is None
    assert stats.copy_gb_per_second is None
    assert stats.limit_gb_per_second is None


# Limits


def test_limits_are_measured_when_asked_for_and_remembered() -> None:
    device = SimulatedDevice(bandwidth=3e9)
    prefetcher = GPUPrefetcher(batches(), device)
    assert len(list(prefetcher)) == 20
    assert known_limits(device) is None
    assert prefetcher.stats().limits is None
    limits = measure_limits(device)
    assert limits.host_to_device_gb_per_second == pytest.approx(3.0, rel=0.1)
    assert limits.packing_gb_per_second > 0
    assert limits.packing_threads >= 1
    assert known_limits(device) == limits
    assert prefetcher.stats().limit_gb_per_second == limits.host_to_device_gb_per_second
    prefetcher.close()
    assert device.pinned_bytes == 0
    assert known_limits(SimulatedDevice()) is None


@pytest.mark.slow
def test_limits_of_the_cpu_leave_torchs_threads_alone() -> None:
    threads = torch.get_num_threads()
    limits = measure_limits("cpu")
    assert limits.host_to_device_gb_per_second is None
    assert limits.packing_gb_per_second > 0
    assert known_limits("cpu") == limits
    assert torch.get_num_threads() == threads


def test_limits_where_pinned_memory_is_refused() -> None:
    device = SimulatedDevice(pinned_limit=1000)
    with pytest.raises(PinnedMemoryError):
        measure_limits(device)
    assert device.pinned_bytes == 0


# The snapshot


def test_a_snapshot_is_frozen() -> None:
    prefetcher = GPUPrefetcher(batches(4), "cpu")
    iterator = iter(prefetcher)
    next(iterator)
    stats = prefetcher.stats()
    next(iterator)
    assert stats.batches == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.batches = 2  # type: ignore[misc]


def test_every_number_has_its_unit_or_is_a_count() -> None:
    counts = {
        "batches",
        "passes",
        "pinned_allocations",
        "timed_copies",
        "gil_probes",
        "gil_waits",
        "num_workers",
        "copy_threads",
        "usable_cores",
    }
    counts |= {"depth", "depth_asked", "depth_reached"}
    for field in dataclasses.fields(Stats):
        if field.type in ("int", "float", "int | None", "float | None"):
            assert field.name in counts or field.name.endswith(("_bytes", "_seconds")), field.name
    for field in dataclasses.fields(Limits):
        assert field.name.endswith(("_gb_per_second", "_threads"))


def test_the_difference_of_two_snapshots_is_one_epoch() -> None:
    clock = Clock()

    class Loader:
        seconds = 1 * MS

        def __iter__(self) -> Iterator[torch.Tensor]:
            return slow(clock, self.seconds, batches(10))

    loader = Loader()
    prefetcher = timed(loader, clock, fetch="caller")
    assert len(list(prefetcher)) == 10
    first = prefetcher.stats()
    loader.seconds = 7 * MS
    assert len(list(prefetcher)) == 10
    second = prefetcher.stats().since(first)
    assert type(second) is Stats
    assert second.batches == 10
    assert second.passes == 1
    assert second.copied_bytes == first.copied_bytes
    assert second.fetch_seconds == pytest.approx(70 * MS)
    assert second.steady.taken_batches == 9
    assert second.depth == first.depth
    assert second.path == "caller"
    assert "takes 7 ms" in second.verdict


def test_the_loader_and_its_workers() -> None:
    stats = GPUPrefetcher(batches(), "cpu").stats()
    assert (stats.loader, stats.num_workers, stats.workers) == ("list", None, "none")
    stats = GPUPrefetcher(DataLoader(range(4)), "cpu").stats()
    assert (stats.loader, stats.num_workers, stats.workers) == ("DataLoader", 0, "none")
    for loader in (batches(), DataLoader(range(4))):
        prefetcher = GPUPrefetcher(loader, "cpu")
        for _ in prefetcher:
            pass
        assert prefetcher.stats().workers == "none"
        assert "workers" not in str(prefetcher.stats()).replace("num_workers", "")
    stats = GPUPrefetcher(DataLoader(range(4), num_workers=2, persistent_workers=True), "cpu").stats()
    assert (stats.num_workers, stats.workers, stats.persistent_workers) == (2, "plain", True)


def test_options_show() -> None:
    stats = GPUPrefetcher([], "cpu", depth=5, copy_threads=3, max_pinned_bytes=1000).stats()
    assert (stats.depth, stats.depth_asked, stats.depth_reached) == (5, 5, 0)
    assert stats.copy_threads == 3
    assert stats.pinned_limit_bytes == 1000
    assert stats.path == "not started"


# For people


NAMES = ("nothing yet", "slow loader", "slow link", "many digits")


@functools.cache
def snapshot(name: str) -> Stats:
    return dict(snapshots())[name]


def snapshots() -> Iterator[tuple[str, Stats]]:
    yield "nothing yet", GPUPrefetcher([], "cpu").stats()
    clock = Clock()
    prefetcher = timed(slow(clock, 5 * MS, batches()), clock, fetch="caller")
    for _ in prefetcher:
        clock.advance(2 * MS)
    yield "slow loader", prefetcher.stats()
    device = SimulatedDevice(bandwidth=1e6)
    measure_limits(device)
    prefetcher = timed(batches(), lambda: device.now, device, fetch="caller", transform=lambda batch: {"<x>": batch})
    for _ in prefetcher:
        pass
    yield "slow link", prefetcher.stats()
    yield (
        "many digits",
        dataclasses.replace(
            prefetcher.stats(),
            path_reason="a <reason> & " + "very " * 40 + "long",
            copied_bytes=123_456_789_012,
            pageable_bytes=1,
            workers="plain",
            workers_reason="w" * 30,
            num_workers=12,
        ),
    )


@pytest.mark.parametrize("name", NAMES)
def test_text_fits_a_terminal(name: str) -> None:
    stats = snapshot(name)
    assert str(stats) == f"{stats}"
    lines = str(stats).splitlines()
    assert all(0 < len(line) < 80 for line in lines), lines
    assert " ".join(lines).startswith(stats.verdict)
    assert len(repr(stats)) < 120
    assert "\n" not in repr(stats)
    assert stats.bottleneck in repr(stats)


def test_text_says_where_the_time_goes() -> None:
    lines = [" ".join(line.split()) for line in str(snapshot("slow loader")).splitlines()]
    assert "loader 5 ms ####################" in lines
    assert "loop: waiting 5 ms ####################" in lines
    assert "loop: working 2 ms ########" in lines
    assert "batches 20 in 1 pass, 200 kB to cpu" in lines


@pytest.mark.parametrize("name", NAMES)
def test_html_is_well_formed_and_escaped(name: str) -> None:
    class Checker(html.parser.HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.open: list[str] = []
            self.text = ""

        def handle_starttag(self, tag: str, attrs: Any) -> None:
            self.open.append(tag)
            assert tag in {"div", "p", "b", "table", "tr", "th", "td"}

        def handle_endtag(self, tag: str) -> None:
            assert self.open.pop() == tag

        def handle_data(self, data: str) -> None:
            self.text += data

    stats = snapshot(name)
    checker = Checker()
    checker.feed(stats._repr_html_())
    assert checker.open == []
    assert checker.text.startswith(stats.verdict)
    assert stats.path_reason in checker.text


# For programs


@pytest.mark.parametrize("name", NAMES)
def test_a_flat_dict_of_floats_for_any_logger(name: str) -> None:
    stats = snapshot(name)
    values = stats.as_dict("prefetch/")
    assert all(type(value) is float and math.isfinite(value) for value in values.values())
    assert all(key.startswith("prefetch/") for key in values)
    assert values["prefetch/batches"] == stats.batches
    assert values["prefetch/fetch_seconds"] == stats.fetch_seconds
    assert ("prefetch/copy_gb_per_second" in values) == (stats.copy_gb_per_second is not None)
    assert "batches" in stats.as_dict()


def test_a_progress_bar_shows_it() -> None:
    clock = Clock()
    prefetcher = timed(slow(clock, 5 * MS, batches()), clock, fetch="caller")
    with open("/dev/null", "w") as nowhere, tqdm(prefetcher, file=nowhere) as progress:  # noqa: PTH123
        for _ in progress:
            clock.advance(5 * MS)
            progress.set_postfix(prefetcher.stats().postfix(), refresh=False)
        assert progress.postfix == "wait=50%, GB/s=0.00, bound=loader"


@pytest.mark.slow
def test_lightnings_logger_takes_it(tmp_path: Any) -> None:
    pytest.importorskip("lightning", exc_type=ImportError)
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(tmp_path)
    logger.log_metrics(snapshot("slow loader").as_dict("prefetch/"), step=3)
    logger.save()
    header, row = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    logged = dict(zip(header.split(","), row.split(","), strict=True))
    assert float(logged["prefetch/batches"]) == 20
    assert float(logged["prefetch/fetch_seconds"]) == pytest.approx(0.1)


def test_stats_in_the_middle_of_anything() -> None:
    """From the loader, from the transform, from another pass: never a wait."""
    seen: list[int] = []

    def loader() -> Iterator[torch.Tensor]:
        for batch in batches(6):
            seen.append(prefetcher.stats().batches)
            yield batch

    def transform(batch: Any) -> Any:
        seen.append(prefetcher.stats().batches)
        return batch

    for fetch in ("caller", "thread", "auto"):
        prefetcher = GPUPrefetcher(loader(), SimulatedDevice(), fetch=fetch, transform=transform)
        assert len(list(itertools.islice(prefetcher, 6))) == 6
        prefetcher.close()
    assert len(seen) >= 36


def test_steady_times_are_not_negative_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is full behind a wait of ``ShortSender._bound``: the wait was taken off, and never counted."""
    now = 0.0
    device = SimulatedDevice(memory_limit=40)
    synchronize = device.synchronize

    def slow(event: Any = None) -> None:
        nonlocal now
        now += 5.0
        synchronize(event)

    prefetcher = GPUPrefetcher([torch.full((8,), float(index)) for index in range(60)], device, fetch="caller")
    prefetcher._shared.counters.clock = lambda: now
    monkeypatch.setattr(device, "synchronize", slow)
    iterator = iter(prefetcher)
    kept = []
    with pytest.raises(torch.OutOfMemoryError):
        for number in range(60):
            batch = next(iterator)
            device.launch(lambda: None, seconds=1.0)
            if number == 6 + 4 * 8 - 2:  # the next one waits
                kept.append(batch)
            del batch
    assert prefetcher.stats().steady.send_seconds >= 0


def test_all_bytes_of_a_batch_in_pieces_are_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """``copied_bytes`` has the gaps between blocks, ``staged_bytes`` has not."""
    monkeypatch.setattr(transfer, "LARGE_BYTES", 2 << 20)
    monkeypatch.setattr(staging, "_PIECE_BYTES", 1 << 20)
    batch = [torch.zeros((32 << 20) + 1, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8)]
    prefetcher = GPUPrefetcher([batch], SimulatedDevice())
    assert len(list(prefetcher)) == 1
    stats = prefetcher.stats()
    assert stats.staged_bytes == stats.copied_bytes
