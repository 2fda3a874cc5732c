"""One wait, one event check or one reference each: what goes wrong without it, on the simulated device.

Named after the contracts. tests/mutants removes them from the code one by one and expects these tests to fail.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

from prefetchpipe import GPUPrefetcher
from prefetchpipe.batch import few
from prefetchpipe.errors import IteratorClosedError
from prefetchpipe.pipeline import producer as producer_module
from prefetchpipe.pipeline import shortway, staging, transfer
from prefetchpipe.pipeline.shortway import SMALL_BYTES
from prefetchpipe.pipeline.staging import Packers
from prefetchpipe.testing import SimulatedDevice
from tests.support import TIMEOUT, Readings, Source, Thread, constants, join_ours, our_threads, to_plain

SLOW = 1e6
"""Bytes a second: a copy of a batch takes milliseconds, a call of the host at most one microsecond."""


def filled(index: int) -> torch.Tensor:
    return torch.full((1024,), float(index + 1))


def plain(count: int) -> list[torch.Tensor]:
    return [filled(index) for index in range(count)]


def pinned(device: SimulatedDevice, count: int) -> list[torch.Tensor]:
    return [device.pin_memory(batch) for batch in plain(count)]


def read_all(device: SimulatedDevice, prefetcher: Any, count: int, seconds: float = 0.0) -> list[tuple[float, float]]:
    """Each batch is dropped right after the kernel that reads it `seconds` later was queued."""
    readings = Readings(device, count)
    for index, batch in enumerate(prefetcher):
        device.launch(lambda: None, seconds=seconds)
        readings.queue(index, batch)
        del batch
    return readings.values()


ONE_TO_EIGHT = constants(range(1, 9))


# Contract 3: ordered by events


def latched_rows() -> tuple[threading.Event, threading.Event, Callable[[], Iterator[torch.Tensor]]]:
    """A source of two batches that says when it is asked for the second, and gives it when it may."""
    entered, leave = threading.Event(), threading.Event()

    def rows() -> Iterator[torch.Tensor]:
        yield filled(0)
        entered.set()
        assert leave.wait(TIMEOUT)
        yield filled(1)

    return entered, leave, rows


def test_c3_the_consumers_stream_waits_for_the_copy(fetch: str) -> None:
    device = SimulatedDevice(bandwidth=SLOW)
    assert read_all(device, GPUPrefetcher(plain(8), device, fetch=fetch), 8) == ONE_TO_EIGHT


def test_c3_the_stream_of_the_moment_waits(fetch: str) -> None:
    device = SimulatedDevice(bandwidth=SLOW)
    readings = Readings(device, 8)
    iterator = iter(GPUPrefetcher(plain(8), device, fetch=fetch))
    for index in range(8):
        with device.use_stream(device.new_stream()):
            readings.queue(index, next(iterator))
    assert readings.values() == ONE_TO_EIGHT


def test_c3_a_batch_made_on_the_device_by_the_loader_is_waited_for() -> None:
    """Its thread has the copy stream as its current one."""
    device = SimulatedDevice()

    def make(index: int) -> torch.Tensor:
        made = device.empty(torch.Size((16,)), (1,), torch.float32)
        device.launch(lambda view: view.fill_(index + 1), made, seconds=0.01)
        return made

    assert read_all(device, GPUPrefetcher(Source(make, 8), device, fetch="thread"), 8) == ONE_TO_EIGHT


def test_c3_a_transform_sees_what_the_callers_stream_wrote_before_the_pass(fetch: str) -> None:
    device = SimulatedDevice()
    scale = device.empty(torch.Size((1,)), (1,), torch.float32)
    device.launch(lambda view: view.fill_(2), scale, seconds=0.05)

    def transform(batch: torch.Tensor) -> torch.Tensor:
        device.launch(lambda view, by: view.mul_(by), batch, scale)
        return batch

    prefetcher = GPUPrefetcher(plain(8), device, transform=transform, fetch=fetch)
    assert read_all(device, prefetcher, 8) == constants(range(2, 18, 2))


def test_c3_a_transform_sees_what_the_loader_wrote_on_the_callers_stream() -> None:
    device = SimulatedDevice()

    def make(index: int) -> torch.Tensor:
        made = device.empty(torch.Size((16,)), (1,), torch.float32)
        device.launch(lambda view: view.fill_(index + 1), made, seconds=0.01)
        return made

    def transform(batch: torch.Tensor) -> torch.Tensor:
        device.launch(lambda view: view.mul_(2), batch)
        return batch

    prefetcher = GPUPrefetcher(Source(make, 8), device, transform=transform, fetch="caller")
    assert read_all(device, prefetcher, 8) == constants(range(2, 18, 2))


def test_c3_a_transform_starts_after_the_copy(fetch: str) -> None:
    """One that calls torch at once: on a GPU its kernels queue up behind the copy."""
    device = SimulatedDevice(bandwidth=SLOW)
    prefetcher = GPUPrefetcher(plain(8), device, transform=lambda batch: batch * 2, fetch=fetch)
    assert [(float(b.min()), float(b.max())) for b in prefetcher] == constants(range(2, 18, 2))


def test_c3_static_buffers_are_filled_in_the_order_of_the_stream() -> None:
    device = SimulatedDevice(bandwidth=SLOW)
    prefetcher = GPUPrefetcher(plain(8), device, static=True)
    assert read_all(device, prefetcher, 8, seconds=0.05) == ONE_TO_EIGHT


@pytest.mark.parametrize("transform", [None, lambda batch: batch], ids=["", "transform"])
def test_c3_checked_compares_after_the_copy(fetch: str, transform: Any) -> None:
    device = SimulatedDevice(bandwidth=SLOW)
    prefetcher = GPUPrefetcher(plain(8), device, checked=True, transform=transform, fetch=fetch)
    assert read_all(device, prefetcher, 8) == ONE_TO_EIGHT


# Contract 4: device memory is not recycled early, and the host does not run ahead


@pytest.mark.parametrize("kind", ["plain", "pinned"])
def test_c4_memory_is_kept_for_the_consumers_late_kernel(fetch: str, kind: str) -> None:
    device = SimulatedDevice()
    batches = plain(24) if kind == "plain" else pinned(device, 24)
    prefetcher = GPUPrefetcher(batches, device, fetch=fetch)
    assert read_all(device, prefetcher, 24, seconds=0.05) == constants(range(1, 25))


def test_c4_memory_is_kept_for_the_stream_that_took_the_batch() -> None:
    """Sent while the consumer was on one stream, delivered to another."""
    device = SimulatedDevice()
    source = Source(filled, 24)
    iterator = iter(GPUPrefetcher(source, device, depth=2, fetch="thread"))
    readings = Readings(device, 24)
    readings.queue(0, next(iterator))
    assert source.wait_pulled(3)  # so the second one has been sent
    with device.use_stream(device.new_stream()):
        for index in range(1, 24):
            batch = next(iterator)
            device.launch(lambda: None, seconds=0.05)
            readings.queue(index, batch)
            del batch
    assert readings.values() == constants(range(1, 25))


def test_c4_memory_that_a_transform_allocates_is_kept_too(fetch: str) -> None:
    device = SimulatedDevice()

    def transform(batch: torch.Tensor) -> torch.Tensor:
        result = device.empty(batch.shape, batch.stride(), batch.dtype)
        device.launch(lambda to, of: to.copy_(of).mul_(2), result, batch)
        return result

    prefetcher = GPUPrefetcher(plain(24), device, transform=transform, fetch=fetch)
    assert read_all(device, prefetcher, 24, seconds=0.05) == constants(range(2, 50, 2))


@pytest.mark.parametrize("depth", [1, 3])
def test_c4_the_host_runs_ahead_of_the_device_by_depth_batches_only(fetch: str, depth: int) -> None:
    """Bounded by events of the consumer's stream: counts of delivered batches say nothing about a slow device."""
    device = SimulatedDevice()
    finished: list[int] = []
    ahead: list[int] = []

    def make(index: int) -> torch.Tensor:
        ahead.append(index - len(finished))
        return torch.full((SMALL_BYTES,), float(index))  # small ones need no memory that others could use

    for index, batch in enumerate(GPUPrefetcher(Source(make, 24), device, depth=depth, fetch=fetch)):
        device.launch(lambda index=index: finished.append(index), seconds=0.05)
        del batch
    device.synchronize()
    assert finished == list(range(24))
    assert max(ahead) <= depth + 1


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_c4_memory_of_a_slow_device_is_bounded(fetch: str, depth: int) -> None:
    device = SimulatedDevice()
    addresses: set[int] = set()
    for batch in GPUPrefetcher(Source(filled, 40), device, depth=depth, fetch=fetch):
        addresses.add(batch.data_ptr())
        device.launch(lambda view: None, batch, seconds=0.05)
        del batch
    # Those ahead, the one in use, those that the device is still to read: `depth` at most.
    assert len(addresses) <= 2 * (depth + 1)


# Contract 5: the source may reuse its buffer


def test_c5_a_pinned_buffer_is_not_handed_back_before_its_copy(fetch: str) -> None:
    device = SimulatedDevice(bandwidth=SLOW)
    buffer = device.pin_memory(torch.empty(1024))

    def rows() -> Iterator[torch.Tensor]:
        for index in range(8):
            yield buffer.fill_(index + 1)
        buffer.fill_(-1)

    assert read_all(device, GPUPrefetcher(rows(), device, fetch=fetch), 8) == ONE_TO_EIGHT


def test_c5_a_pinned_buffer_is_the_loops_own_again_when_the_pass_is_left(fetch: str) -> None:
    device = SimulatedDevice(bandwidth=SLOW)
    buffer = device.pin_memory(torch.empty(1024))

    def rows() -> Iterator[torch.Tensor]:
        while True:
            yield buffer.fill_(7)

    prefetcher = GPUPrefetcher(rows(), device, fetch=fetch)
    batch = next(iter(prefetcher))
    buffer.fill_(-1)
    device.synchronize()
    assert batch.unique().tolist() == [7]


def test_c5_a_pinned_buffer_may_be_written_by_the_loop_and_by_a_newer_pass() -> None:
    device = SimulatedDevice(bandwidth=SLOW)

    class Rewinding:
        def __init__(self) -> None:
            self.buffer, self.index = device.pin_memory(torch.zeros(1024)), 0

        def __iter__(self) -> Rewinding:
            self.index = 0
            self.buffer.fill_(-5)
            return self

        def __next__(self) -> torch.Tensor:
            self.index += 1
            return self.buffer.fill_(self.index)

    loader = Rewinding()
    prefetcher = GPUPrefetcher(loader, device, fetch="caller")
    older = iter(prefetcher)
    kept = [next(older), next(older), next(iter(prefetcher))]
    loader.buffer.fill_(-1)
    device.synchronize()
    assert [batch.unique().tolist() for batch in kept] == [[1], [2], [1]]


@pytest.mark.usefixtures("way")
def test_c5_many_leaves_are_packed_before_they_are_copied() -> None:
    """By several threads, while device memory is taken."""
    device = SimulatedDevice(bandwidth=1e9)
    source = Source(lambda index: [torch.full((40_000,), float(index * 10 + leaf)) for leaf in range(9)], 6)
    kept = list(GPUPrefetcher(source, device, copy_threads=4, fetch="thread"))
    device.synchronize()
    for index, batch in enumerate(kept):
        assert [leaf.unique().tolist() for leaf in batch] == [[float(index * 10 + leaf)] for leaf in range(9)]


def test_c5_packing_has_ended_when_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A share that another thread has taken, held up until the packing one waits for it."""
    packers = Packers(2, "prefetchpipe-packing-test")
    taken, waiting, done = threading.Event(), threading.Event(), packers._done
    copy_all = staging.copy_all

    class Done:
        put = done.put

        def get(self) -> Any:
            waiting.set()
            return done.get()

    def copy(*share: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            assert taken.wait(TIMEOUT)
        else:
            taken.set()
            assert waiting.wait(TIMEOUT)
        copy_all(*share)

    packers._done = Done()  # type: ignore[assignment]
    monkeypatch.setattr(staging, "copy_all", copy)
    sources = [torch.full((8,), float(index)) for index in range(20)]
    views = [torch.zeros(8) for _ in sources]
    try:
        packers.start(views, sources)
        packers.finish()
        assert [float(view.sum()) for view in views] == [8.0 * index for index in range(20)]
    finally:
        waiting.set()
        packers.close()


def test_c5_a_packing_thread_that_is_slow_to_wake_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    packers = Packers(4, "prefetchpipe-packing-test")
    held: list[Any] = []
    put = packers._work.put
    monkeypatch.setattr(packers, "_work", _Queue(packers._work, held.append))
    try:
        for turn in range(2):
            sources = [torch.full((8,), float(index + turn)) for index in range(20)]
            views = [torch.zeros(8) for _ in sources]
            packers.start(views, sources)
            packers.finish()
            assert [float(view.sum()) for view in views] == [8.0 * (index + turn) for index in range(20)]
            for work in held:  # they wake now, and find nothing left
                put(work)
            held.clear()
    finally:
        for _ in range(3):
            put(None)
        packers.close()


@pytest.mark.parametrize("place", ["here", "elsewhere"])
def test_c7_an_error_of_one_share_comes_when_all_have_ended(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    packers = Packers(2, "prefetchpipe-packing-test")
    taken, raised = threading.Event(), []
    copy_all = staging.copy_all

    def copy(*share: Any) -> None:
        is_here = threading.current_thread() is threading.main_thread()
        if is_here:
            assert taken.wait(TIMEOUT)
        else:
            taken.set()
        if is_here == (place == "here") and not raised:
            raised.append(1)
            raise ValueError("a share")
        copy_all(*share)

    monkeypatch.setattr(staging, "copy_all", copy)
    views = [torch.zeros(8) for _ in range(20)]
    packers.start(views, [torch.ones(8) for _ in views])
    with pytest.raises(ValueError, match="a share"):
        packers.finish()
    packers.start(views, [torch.full((8,), 2.0) for _ in views])
    packers.finish()
    assert all(float(view.sum()) == 16.0 for view in views)
    packers.close()


class _Queue:
    def __init__(self, queue: Any, put: Callable[[Any], None]) -> None:
        self.get = queue.get
        self.put = put


@pytest.mark.parametrize("depth", [1, 3])
def test_c8_c14_the_host_runs_ahead_by_depth_pinned_batches_only(depth: int) -> None:
    """They are held until their copies have passed, and go over the copy stream as others of their size."""
    device = SimulatedDevice()
    batches = [device.pin_memory(torch.full((SMALL_BYTES,), float(index + 1))) for index in range(24)]
    finished: list[int] = []
    ahead: list[int] = []
    readings = Readings(device, 24)
    for index, batch in enumerate(GPUPrefetcher(batches, device, depth=depth)):
        ahead.append(index - len(finished))
        device.launch(lambda index=index: finished.append(index), seconds=0.05)
        readings.queue(index, batch)
        del batch
    assert readings.values() == constants(range(1, 25))
    assert max(ahead) <= depth + 1


# Contract 6: slots and pinned sources


def test_c6_a_slot_is_written_again_only_after_its_copy(fetch: str) -> None:
    device = SimulatedDevice(bandwidth=SLOW)
    assert read_all(device, GPUPrefetcher(plain(24), device, depth=4, fetch=fetch), 24) == constants(range(1, 25))


def test_c6_a_ring_waits_for_its_copies_before_it_goes(fetch: str) -> None:
    device = SimulatedDevice(bandwidth=SLOW)
    prefetcher = GPUPrefetcher(plain(8), device, fetch=fetch)
    kept = list(itertools.islice(prefetcher, 2))
    prefetcher.close()
    assert device.pinned_bytes == 0
    device.synchronize()
    assert [float(batch.max()) for batch in kept] == [1, 2]


def test_c6_a_pass_that_ends_after_close_gives_its_ring_back() -> None:
    device = SimulatedDevice()
    entered, leave, rows = latched_rows()

    prefetcher = GPUPrefetcher(rows(), device, fetch="thread")
    iterator = iter(prefetcher)
    next(iterator)
    assert entered.wait(TIMEOUT)
    iterator._producer.stop(seconds=0.0)
    prefetcher._shared.close()
    assert device.pinned_bytes > 0
    leave.set()
    join_ours()
    assert device.pinned_bytes == 0
    assert prefetcher.stats().pinned_bytes == 0


def test_c6_pageable_memory_outlives_the_copy_out_of_it(fetch: str) -> None:
    device = SimulatedDevice(bandwidth=SLOW)
    prefetcher = GPUPrefetcher(plain(8), device, max_pinned_bytes=0, fetch=fetch)
    with pytest.warns(RuntimeWarning, match="page-locked"):
        assert read_all(device, prefetcher, 8) == ONE_TO_EIGHT
    assert prefetcher.stats().pageable_bytes == 8 * 4096


# A large batch, packed and copied in pieces

PIECES: dict[str, Callable[[torch.Tensor], Any]] = {
    "one leaf": lambda t: t,
    "two leaves": lambda t: [t, t.repeat(3)],
    "a slab": lambda t: {str(n): t[: 100 + n].clone() for n in range(6)},
    "strided": lambda t: (t.view(32, 32).t(), t),
    "shared": lambda t: (t[:600], t[400:]),
}


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch counts as large, and a piece has 1 KiB."""
    monkeypatch.setattr(staging, "_PIECE_BYTES", 1024)
    for module, name in ((transfer, "LARGE_BYTES"), (shortway, "LARGE_BYTES"), (few, "_LARGE_BYTES")):
        monkeypatch.setattr(module, name, 0)


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("kind", PIECES)
def test_c6_pieces_of_a_large_batch_wait_for_their_slots(fetch: str, kind: str) -> None:
    device = SimulatedDevice(bandwidth=SLOW)
    want = [PIECES[kind](filled(index)) for index in range(8)]
    prefetcher = GPUPrefetcher([PIECES[kind](filled(index)) for index in range(8)], device, fetch=fetch)
    got = list(prefetcher)
    device.synchronize()
    for one, other in zip(got, want, strict=True):
        for a, b in zip(tree_leaves(one), tree_leaves(other), strict=True):
            assert (a.dtype, a.stride()) == (b.dtype, b.stride())
            assert torch.equal(a, b)
    stats = prefetcher.stats()
    assert stats.staged_bytes >= stats.copied_bytes > 0
    if kind == "one leaf":
        assert stats.pinned_bytes <= 3 * 1024


@pytest.mark.usefixtures("in_pieces")
def test_c6_rows_of_a_large_batch_are_gathered_into_one_slot() -> None:
    device = SimulatedDevice(bandwidth=SLOW)
    rows = torch.arange(40_000 * 8.0).view(40_000, 8)
    loader = DataLoader(TensorDataset(rows, rows[:, 0].clone()), 4_000)
    got = list(GPUPrefetcher(loader, device))
    device.synchronize()
    assert torch.equal(torch.cat([one for one, _ in got]), rows)
    assert torch.equal(torch.cat([other for _, other in got]), rows[:, 0])


@pytest.mark.usefixtures("in_pieces")
def test_c12_one_value_with_an_odd_stride_beside_a_large_leaf() -> None:
    """The last batch of an epoch: one row of a table, and of that a column."""
    table = torch.arange(12.0).view(3, 4)
    for size in (1, 2):
        device = SimulatedDevice()
        (got,) = GPUPrefetcher([{"x": torch.zeros(1000), "y": table[:size, 1]}], device)
        device.synchronize()
        assert got["y"].tolist() == table[:size, 1].tolist()


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("kind", PIECES)
def test_c6_c15_pieces_of_a_large_batch_without_page_locked_memory(fetch: str, kind: str) -> None:
    device = SimulatedDevice(bandwidth=SLOW)
    want = [PIECES[kind](filled(index)) for index in range(8)]
    prefetcher = GPUPrefetcher(
        [PIECES[kind](filled(index)) for index in range(8)], device, max_pinned_bytes=0, fetch=fetch
    )
    with pytest.warns(RuntimeWarning, match="page-locked"):
        got = list(prefetcher)
    device.synchronize()
    for one, other in zip(got, want, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(tree_leaves(one), tree_leaves(other), strict=True))
    assert prefetcher.stats().staged_bytes == 0


@pytest.mark.usefixtures("in_pieces")
def test_c5_a_large_batch_has_left_its_source(fetch: str) -> None:
    device = SimulatedDevice(bandwidth=SLOW)
    buffer = torch.empty(1024)
    prefetcher = GPUPrefetcher((buffer.fill_(index + 1) for index in range(8)), device, fetch=fetch)
    assert read_all(device, prefetcher, 8) == ONE_TO_EIGHT


@pytest.mark.parametrize("taken", [1, 3])
def test_c6_a_pinned_source_outlives_the_copy_out_of_it(taken: int) -> None:
    """A list does not write into its batches again, so nothing waits; but it may be emptied."""
    device = SimulatedDevice(bandwidth=SLOW)
    batches = pinned(device, 6)
    iterator = iter(GPUPrefetcher(batches, device, depth=3, fetch="caller"))
    kept = [next(iterator) for _ in range(taken)]
    batches.clear()
    device.synchronize()
    assert [float(batch.max()) for batch in kept] == list(range(1, taken + 1))


def test_c6_a_pinned_source_is_held_while_the_pass_is_closed() -> None:
    device = SimulatedDevice(bandwidth=SLOW)
    batches = pinned(device, 6)
    prefetcher = GPUPrefetcher(batches, device, fetch="caller")
    kept = list(itertools.islice(prefetcher, 2))
    batches.clear()
    prefetcher.close()
    device.synchronize()
    assert [float(batch.max()) for batch in kept] == [1, 2]


# Contracts 1 and 7: order, errors, the end


def exhausted(make: Callable[[], Iterator[Any]], depth: int) -> tuple[Any, list[Any]]:
    """A pass of which one batch was taken, and whose source has come to its end."""
    ended = threading.Event()

    def rows() -> Iterator[Any]:
        try:
            yield from make()
        finally:
            ended.set()

    class Loader:
        def __iter__(self) -> Iterator[Any]:
            return rows()

    iterator = iter(GPUPrefetcher(Loader(), "cpu", depth=depth, fetch="thread"))
    first = [next(iterator)]
    assert ended.wait(TIMEOUT)
    assert join_ours() == set()  # its last ticket is in the queue
    return iterator, first


def test_c7_an_error_arrives_after_the_batches_before_it() -> None:
    def rows() -> Iterator[int]:
        yield from (1, 2, 3)
        raise KeyError("row 3")

    iterator, seen = exhausted(rows, 4)
    seen += [next(iterator), next(iterator)]
    with pytest.raises(KeyError, match="row 3"):
        next(iterator)
    assert seen == [1, 2, 3]
    assert list(iterator) == []


def test_c1_the_end_arrives_after_the_batches_before_it() -> None:
    iterator, seen = exhausted(lambda: iter((1, 2, 3)), 4)
    assert seen + list(iterator) == [1, 2, 3]
    assert list(iterator) == []


def test_c1_every_thread_that_waits_hears_of_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_module, "_STARVED_SECONDS", TIMEOUT)  # at once, not when it looks for itself
    device = SimulatedDevice()
    entered, gate = threading.Event(), threading.Event()

    def rows() -> Iterator[int]:
        yield 0
        entered.set()
        assert gate.wait(TIMEOUT)

    iterator = iter(GPUPrefetcher(rows(), device, fetch="thread"))
    assert next(iterator) == 0
    assert entered.wait(TIMEOUT)
    said = iterator._producer._credits
    known = said.qsize()
    threads = [Thread(lambda: list(iterator)) for _ in range(3)]
    while said.qsize() < known + 3:  # each says so before it waits
        time.sleep(0)
    gate.set()
    assert [thread.result(5) for thread in threads] == [[], [], []]


def test_c1_what_a_dropped_pass_took_from_a_one_shot_source_is_not_lost(fetch: str) -> None:
    source = (filled(index) for index in range(8))
    device = SimulatedDevice()
    prefetcher = GPUPrefetcher(source, device, depth=3, fetch=fetch)
    kept = [batch for count in (1, 2, 0, 3, 8) for batch in itertools.islice(prefetcher, count)]
    device.synchronize()
    assert [float(batch.max()) for batch in kept] == list(range(1, 9))


@pytest.mark.slow
def test_c1_a_pass_over_a_one_shot_source_waits_for_what_the_one_before_is_fetching() -> None:
    entered, leave = threading.Event(), threading.Event()

    def rows() -> Iterator[int]:
        yield 0
        entered.set()
        assert leave.wait(TIMEOUT)
        yield from (1, 2)

    source = rows()
    prefetcher = GPUPrefetcher(source, "cpu", fetch="thread")
    assert next(iter(prefetcher)) == 0
    assert entered.wait(TIMEOUT)
    rest = Thread(lambda: list(prefetcher))
    rest.join(0.05)  # whoever does not wait is in the source by now
    leave.set()
    assert rest.result() == [1, 2]


def test_c1_two_passes_over_one_iterator_take_turns() -> None:
    class OneShot:
        def __init__(self) -> None:
            self.numbers = iter(range(6))
            self.overlap = Overlap()

        def __iter__(self) -> OneShot:
            return self

        def __next__(self) -> int:
            self.overlap.pass_through()
            return next(self.numbers)

    source = OneShot()
    prefetcher = GPUPrefetcher(source, "cpu", depth=1, fetch="thread")
    both = Thread(lambda: list(prefetcher)), Thread(lambda: list(prefetcher))
    assert sorted(both[0].result() + both[1].result()) == list(range(6))
    assert not source.overlap.seen.is_set()


class Overlap:
    """Code that must not be entered twice at once; waits a moment for somebody who does."""

    def __init__(self) -> None:
        self.inside = 0
        self.seen = threading.Event()

    def pass_through(self) -> None:
        self.inside += 1
        if self.inside > 1:
            self.seen.set()
        self.seen.wait(0.02)
        self.inside -= 1


def test_c1_two_threads_at_one_iterator_do_not_send_at_once() -> None:
    """There is one ring in the caller's thread too."""
    device = SimulatedDevice()
    overlap = Overlap()

    def transform(batch: torch.Tensor) -> torch.Tensor:
        overlap.pass_through()
        return batch

    iterator = iter(GPUPrefetcher(plain(6), device, transform=transform, fetch="caller"))
    both = Thread(lambda: list(iterator)), Thread(lambda: list(iterator))
    batches = both[0].result() + both[1].result()
    device.synchronize()
    assert not overlap.seen.is_set()
    assert sorted(float(batch.max()) for batch in batches) == list(range(1, 7))


# Contracts 8, 9 and 11


@pytest.mark.parametrize("depth", [1, 3])
def test_c8_a_pass_that_is_not_advanced_pulls_depth_batches(depth: int) -> None:
    source = Source(lambda index: index, 20)
    iterator = iter(GPUPrefetcher(source, "cpu", depth=depth, fetch="thread"))
    assert next(iterator) == 0
    assert source.wait_pulled(depth + 1)
    assert not source.wait_pulled(depth + 3, timeout=0.1)


def test_c9_a_dropped_iterator_ends_its_thread() -> None:
    before = our_threads()
    iterator = iter(GPUPrefetcher(Source(lambda index: index, 20), "cpu", fetch="thread"))
    assert next(iterator) == 0
    assert len(our_threads() - before) == 1
    del iterator
    assert our_threads() - before == set()


def test_c9_closing_drops_the_batches_that_were_ahead() -> None:
    device = SimulatedDevice()
    source = Source(filled, 20)
    prefetcher = GPUPrefetcher(source, device, depth=4, fetch="thread")
    iterator = iter(prefetcher)
    assert float(next(iterator).numel()) == 1024
    assert source.wait_pulled(5)
    prefetcher.close()
    device.synchronize()
    assert device.allocated_bytes == 0
    with pytest.raises(IteratorClosedError):
        next(iterator)


def test_c9_dropping_an_iterator_drops_the_batches_that_were_ahead(fetch: str) -> None:
    """Only what a one-shot source would lose is kept."""
    device = SimulatedDevice()
    source = Source(filled, 20)
    prefetcher = GPUPrefetcher(source, device, depth=4, fetch=fetch)
    iterator = iter(prefetcher)
    batch = next(iterator)
    assert fetch == "caller" or source.wait_pulled(5)
    del iterator, batch
    device.synchronize()
    assert device.allocated_bytes == 0
    again = [float(batch.max()) for batch in prefetcher if device.synchronize() is None]
    assert again == list(range(1, 21))


def test_c9_closing_while_another_thread_fetches_for_itself() -> None:
    """Its batch is still to be sent: the ring is not to be given back, or handed to another pass, under its hands."""
    device = SimulatedDevice()
    entered, leave, rows = latched_rows()

    class Loader:
        def __iter__(self) -> Iterator[torch.Tensor]:
            return rows()

    prefetcher = GPUPrefetcher(Loader(), device, fetch="caller")
    iterator = iter(prefetcher)
    next(iterator)
    consumer = Thread(lambda: next(iterator, None))
    assert entered.wait(TIMEOUT)
    prefetcher.close()
    leave.set()
    with contextlib.suppress(IteratorClosedError):
        batch = consumer.result()
        device.synchronize()
        assert batch.unique().tolist() == [2]
    assert device.pinned_bytes == 0
    assert prefetcher.stats().pinned_bytes == 0


def test_c9_the_last_reference_to_an_iterator_may_go_in_its_producers_thread() -> None:
    """The collector runs in any thread: what the batch under way is sent with is given back after it."""
    device = SimulatedDevice()
    leave = threading.Event()
    holder: list[Any] = []

    def rows() -> Iterator[torch.Tensor]:
        yield filled(0)
        assert leave.wait(TIMEOUT)
        holder.clear()
        yield filled(1)

    class Loader:
        def __iter__(self) -> Iterator[torch.Tensor]:
            return rows()

    before = our_threads()
    holder.append(iter(GPUPrefetcher(Loader(), device, fetch="thread")))
    next(holder[0])
    leave.set()
    assert join_ours(before) == set()
    device.synchronize()
    assert (device.pinned_bytes, device.allocated_bytes) == (0, 0)


def test_c9_closing_wakes_a_consumer_that_waits_in_another_thread() -> None:
    """Although the loader does not come back."""
    entered, leave = threading.Event(), threading.Event()

    def rows() -> Iterator[int]:
        yield 0
        entered.set()
        leave.wait(TIMEOUT)

    prefetcher = GPUPrefetcher(rows(), "cpu", fetch="thread")
    iterator = iter(prefetcher)
    assert next(iterator) == 0
    assert entered.wait(TIMEOUT)
    consumer = Thread(lambda: next(iterator))
    iterator._producer.stop(seconds=0.0)
    with pytest.raises(IteratorClosedError):
        consumer.result(5)
    leave.set()
    join_ours()


class Positions:
    """A loader whose state is one dict that it goes on writing to."""

    def __init__(self) -> None:
        self.state = {"position": 0}
        self.at_end = threading.Event()

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(6):
            self.state["position"] = index + 1
            yield filled(index)
        self.at_end.set()

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = copy.copy(state)


def test_c11_the_state_is_that_after_the_batch_last_yielded(fetch: str) -> None:
    loader = Positions()
    iterator = iter(prefetcher := GPUPrefetcher(loader, "cpu", depth=8, fetch=fetch))
    for index in range(6):
        assert float(to_plain(next(iterator)).max()) == index + 1
        assert fetch == "caller" or loader.at_end.wait(TIMEOUT)
        assert prefetcher.state_dict() == {"position": index + 1}
