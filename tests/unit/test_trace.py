"""Traces: spans by lane, the file that Perfetto opens, and ranges for profilers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from prefetchpipe import GPUPrefetcher, PrefetchError
from prefetchpipe.ranges import ranges
from prefetchpipe.testing import SimulatedDevice
from prefetchpipe.trace import LANES, Span, Trace, record, record_trace, recording
from tests.clock import Clock, timed

MS = 1e-3


def batches(count: int = 12) -> list[torch.Tensor]:
    return [torch.full((2500,), float(i)) for i in range(count)]


def lane(trace: Trace, name: str) -> list[Span]:
    return [span for span in trace.spans if span.lane == name]


# What is recorded


def test_spans_of_a_loop_in_one_thread() -> None:
    clock = Clock()

    def loader() -> Iterator[torch.Tensor]:
        for batch in batches():
            clock.advance(5 * MS)
            yield batch

    def transform(batch: Any) -> Any:
        clock.advance(3 * MS)
        return batch

    prefetcher = timed(loader(), clock, fetch="caller", transform=transform)
    trace = record(prefetcher, 4, lambda batch: clock.advance(2 * MS))
    for number in range(4):
        start = number * 10 * MS
        expected = [("loader", 0.0, 5 * MS), ("packing", 5 * MS, 3 * MS), ("compute", 8 * MS, 2 * MS)]
        spans = [span for span in trace.spans if span.batch == number]
        assert [span.lane for span in spans] == [name for name, _, _ in expected]
        for span, (_, offset, seconds) in zip(spans, expected, strict=True):
            assert span.start_seconds == pytest.approx(start + offset)
            assert span.seconds == pytest.approx(seconds)
    assert len(trace.spans) == 12
    assert trace.stats is not None
    assert trace.stats.batches == 4


def test_every_copy_is_on_the_copy_lane() -> None:
    device = SimulatedDevice(bandwidth=1e6)
    prefetcher = timed(batches(), lambda: device.now, device, fetch="caller")
    trace = record(prefetcher, 6, lambda batch: device.launch(lambda x: None, batch, seconds=15 * MS))
    copies = lane(trace, "copy")
    assert [span.batch for span in copies] == list(range(6))
    assert all(span.seconds == pytest.approx(10 * MS, rel=0.01) for span in copies)
    assert all(span.name == "copy 0.01 MB" for span in copies)
    assert all(b.start_seconds >= a.start_seconds + a.seconds - 1e-9 for a, b in itertools.pairwise(copies))
    assert [span.batch for span in lane(trace, "compute")] == list(range(6))
    assert all(span.seconds == pytest.approx(15 * MS, rel=0.01) for span in lane(trace, "compute"))
    assert {span.name for span in lane(trace, "packing")} >= {"pack and launch", "wait for the device"}
    assert trace.stats is not None
    assert trace.stats.timed_copies == 6


@pytest.mark.parametrize("fetch", ["thread", "caller", "auto"])
def test_lanes_of_every_path(device: Any, fetch: str) -> None:
    prefetcher = GPUPrefetcher(batches(), device, fetch=fetch)
    trace = record(prefetcher, 8)
    assert [span.batch for span in lane(trace, "compute")] == list(range(8))
    assert [span.batch for span in lane(trace, "loader")][:8] == list(range(8))
    assert len(lane(trace, "copy")) == (0 if device == "cpu" else len(lane(trace, "loader")))
    assert [span.start_seconds for span in trace.spans] == sorted(span.start_seconds for span in trace.spans)
    assert all(span.seconds >= 0 for span in trace.spans)
    assert {span.lane for span in trace.spans} <= set(LANES)
    if fetch == "caller":
        assert lane(trace, "wait") == []
    prefetcher.close()


def test_a_trace_of_a_loader_leaves_nothing_behind() -> None:
    device = SimulatedDevice()
    trace = record_trace(batches(), device=device, batches=5, step=None, depth=3, transform=lambda batch: {"x": batch})
    assert trace.stats is not None
    assert trace.stats.batches == 5
    assert trace.stats.depth == 3
    del trace
    device.synchronize()
    assert device.pinned_bytes == 0
    assert device.allocated_bytes == 0


def test_a_short_loader_and_an_empty_one() -> None:
    assert len(lane(record_trace(batches(3), "cpu", batches=20), "compute")) == 3
    assert record_trace([], "cpu").spans == []


def test_worker_processes() -> None:
    trace = record_trace(DataLoader(batches(), batch_size=None, num_workers=1), "cpu", batches=4)
    assert len(lane(trace, "compute")) == 4


def test_a_loop_of_ones_own_is_recorded_from_any_batch_on() -> None:
    prefetcher = GPUPrefetcher(batches(), "cpu", fetch="caller")
    iterator = iter(prefetcher)
    next(iterator)
    with recording(prefetcher) as trace:
        assert trace.spans == []
        for _ in range(3):
            next(iterator)
    next(iterator)
    assert [span.batch for span in lane(trace, "loader")] == [1, 2, 3]
    assert [span.batch for span in lane(trace, "compute")] == [1, 2, 3]
    prefetcher.close()


def test_the_batches_are_those_of_the_plain_loop(device: Any) -> None:
    prefetcher = GPUPrefetcher(batches(), device)
    with recording(prefetcher):
        arrived = list(prefetcher)
    if device != "cpu" and not isinstance(device, str):
        device.synchronize()
    assert [float(batch[-1]) for batch in arrived] == [float(i) for i in range(12)]


# What goes wrong


def test_errors_arrive_and_end_the_recording() -> None:
    def loader() -> Iterator[torch.Tensor]:
        yield from batches(2)
        raise KeyError("row 2")

    prefetcher = GPUPrefetcher(loader(), "cpu")
    with pytest.raises(KeyError, match="row 2"):
        record(prefetcher)
    assert prefetcher._shared.counters.recorder is None
    with pytest.raises(ZeroDivisionError):
        record(GPUPrefetcher(batches(), "cpu", fetch="thread"), step=lambda batch: 1 / 0)


def test_one_recording_at_a_time() -> None:
    prefetcher = GPUPrefetcher(batches(), "cpu")
    with recording(prefetcher), pytest.raises(PrefetchError, match="already"):
        record(prefetcher)
    assert record(prefetcher, 2).spans


@pytest.mark.parametrize(
    ("argument", "value", "kind", "says"),
    [
        ("batches", 0, ValueError, "batches must be at least 1, not 0"),
        ("batches", True, TypeError, "batches must be a whole number"),
        ("batches", "5", TypeError, "not '5' (a str)"),
        ("step", 3, TypeError, "step must be a callable or None, not 3"),
        ("depth", 0, ValueError, "depth must be at least 1, not 0"),
        ("device", "cpux", ValueError, "device"),
    ],
)
def test_wrong_arguments(argument: str, value: Any, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind) as caught:
        record_trace(batches(), **{"device": "cpu", argument: value})
    assert says in str(caught.value)


# The file


def test_the_file_is_a_chrome_trace(tmp_path: Path) -> None:
    device = SimulatedDevice()
    trace = record_trace(batches(), device, batches=5)
    trace.save(tmp_path / "trace.json")
    trace.save(str(tmp_path / "again.json"))
    assert (tmp_path / "again.json").read_text() == (tmp_path / "trace.json").read_text()
    written = json.loads((tmp_path / "trace.json").read_text())
    events = written["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert len(names) == len(LANES)
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(trace.spans)
    for event, span in zip(spans, trace.spans, strict=True):
        assert event["ts"] == pytest.approx(span.start_seconds * 1e6)
        assert event["dur"] == pytest.approx(span.seconds * 1e6)
        assert event["cat"] == span.lane
        assert names[event["tid"]].split(":")[0].split(" (")[0] in (span.lane, "the loop waits")
        assert event["args"] == {"batch": span.batch}
    assert sum(len(rows) for rows in trace.timeline().values()) == len(trace.spans)
    assert list(trace.timeline()) == list(LANES)


# Ranges


NAMES = {"prefetchpipe: loader", "prefetchpipe: pack and launch", "prefetchpipe: next"}


def profiled(prefetcher: GPUPrefetcher) -> tuple[list[float], set[str]]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        values = [float(batch[0]) for batch in prefetcher]
    return values, {event.key for event in profile.key_averages() if event.key.startswith("prefetchpipe")}


@pytest.mark.slow
def test_ranges_are_seen_by_torchs_profiler_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [float(i) for i in range(12)]
    assert profiled(GPUPrefetcher(batches(), "cpu", fetch="caller")) == (expected, set())
    with ranges():
        assert profiled(GPUPrefetcher(batches(), "cpu", fetch="caller")) == (expected, NAMES)
    monkeypatch.setenv("PREFETCHPIPE_RANGES", "0")
    assert profiled(GPUPrefetcher(batches(), "cpu", fetch="caller")) == (expected, set())
    monkeypatch.setenv("PREFETCHPIPE_RANGES", "1")
    assert profiled(GPUPrefetcher(batches(), "cpu", fetch="caller")) == (expected, NAMES)


def test_ranges_change_nothing_else(device: Any, fetch: str) -> None:
    def loader() -> Iterator[torch.Tensor]:
        yield from batches(5)
        raise KeyError("row 5")

    seen = []
    with ranges():
        prefetcher = GPUPrefetcher(loader(), device, fetch=fetch)
        with pytest.raises(KeyError, match="row 5"):
            seen.extend(prefetcher)
    if not isinstance(device, str):
        device.synchronize()
    assert [float(batch[0]) for batch in seen] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_the_devices_profiler_sees_ranges_too() -> None:
    seen: list[str] = []

    class Annotating(SimulatedDevice):
        def annotate(self, name: str) -> Any:
            seen.append(name)
            return super().annotate(name)

    with ranges():
        assert len(list(GPUPrefetcher(batches(), Annotating(), fetch="caller"))) == 12
    assert set(seen) == NAMES
    seen.clear()
    assert len(list(GPUPrefetcher(batches(), Annotating(), fetch="caller"))) == 12
    assert seen == []


def test_a_wrong_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFETCHPIPE_RANGES", "yes")
    started = []

    class Loader:
        def __iter__(self) -> Iterator[Any]:
            started.append(1)
            return iter(batches())

    with pytest.raises(ValueError, match="PREFETCHPIPE_RANGES must be 0 or 1, not 'yes'"):
        iter(GPUPrefetcher(Loader(), "cpu"))
    assert started == []
