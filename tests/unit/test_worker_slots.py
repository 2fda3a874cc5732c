"""The two sides of the worker path in one process, on the simulated device: deterministic, whatever is timed how.

The worker writes its next batch into a slot as soon as the parent has given it back, while copies complete late: one
given back too early shows as a wrong value. tests/mutants removes waits and flags one by one.
"""

from __future__ import annotations

import gc
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from prefetchpipe import GPUPrefetcher
from prefetchpipe.device.cpu import cpu_device
from prefetchpipe.errors import PrefetchWarning
from prefetchpipe.pipeline import collate as collate_module
from prefetchpipe.pipeline.collate import FREE, STATE
from prefetchpipe.pipeline.workers import WorkerBatch
from prefetchpipe.testing import SimulatedDevice
from tests.packed import Workers
from tests.support import Readings, constants, settle

SLOW = 1e6
"""Bytes a second: a copy of a batch takes milliseconds, a call of the host at most one microsecond."""

ROW = 1024  # float32: one page


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has to wait for a slot gives up at once: here the parent is the same thread."""
    monkeypatch.setattr(collate_module, "_PATIENCE_SECONDS", -1.0)


def filled(index: int, length: int = ROW) -> torch.Tensor:
    return torch.full((length,), float(index + 1))


def read_all(device: SimulatedDevice, prefetcher: Any, count: int) -> list[tuple[float, float]]:
    readings = Readings(device, count)
    for index, batch in enumerate(prefetcher):
        readings.queue(index, batch)
        del batch
    return readings.values()


# Contract 4: device memory is kept until the consumer's stream has passed its last use


def test_c4_memory_is_kept_for_the_consumers_late_kernel(fetch: str) -> None:
    device = SimulatedDevice()
    workers = Workers(device, [filled(i) for i in range(8)])
    readings = Readings(device, 8)
    for index, batch in enumerate(GPUPrefetcher(workers, device, fetch=fetch)):
        readings.queue(index, batch, seconds=0.01)
        del batch
    assert readings.values() == constants(range(1, 9))


# Contract 6: a slot is written again only when the copies out of it have passed


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
@pytest.mark.parametrize("depth", [1, 4])
def test_c6_a_slot_is_given_back_when_its_copy_has_passed(fetch: str, slots: int, depth: int) -> None:
    device = SimulatedDevice(bandwidth=SLOW)
    workers = Workers(device, [filled(i) for i in range(12)], slots=slots)
    prefetcher = GPUPrefetcher(workers, device, fetch=fetch, depth=depth)
    assert read_all(device, prefetcher, 12) == constants(range(1, 13))


@pytest.mark.parametrize("slots", [2, 3, 4])
def test_c6_no_worker_waits_for_slots_that_are_kept_while_its_batch_is_waited_for(fetch: str, slots: int) -> None:
    """Copies are so slow that all slots would be in flight; a worker that finds none here goes the plain way."""
    device = SimulatedDevice(bandwidth=10.0)
    workers = Workers(device, [filled(i) for i in range(12)], slots=slots)
    prefetcher = GPUPrefetcher(workers, device, fetch=fetch, depth=8)
    assert read_all(device, prefetcher, 12) == constants(range(1, 13))
    # One batch is packed behind the one that is on its way, so two slots are one short of what is needed at times.
    assert "plain" not in workers.ways or slots == 2


def test_c6_a_slot_is_busy_from_the_packing_to_the_copy() -> None:
    device = SimulatedDevice(bandwidth=SLOW)
    workers = Workers(device, [])
    first = pickle.loads(workers.message(filled(0)))
    second = pickle.loads(workers.message(filled(1)))
    assert type(first) is type(second) is WorkerBatch
    assert first.slot is not second.slot
    assert [leaf[0, 0].item() for batch in (first, second) for leaf in batch.copied_leaves()] == [1.0, 2.0]
    assert workers.busy() == 2


def test_c6_a_batch_that_is_dropped_unsent_gives_its_slot_back() -> None:
    workers = Workers(SimulatedDevice(), [])
    for index in range(10):
        batch = pickle.loads(workers.message(filled(index)))
        assert workers.busy() == 1
        del batch
        assert workers.busy() == 0
    assert len(workers.worker_slots) == 1


def test_c6_the_last_slots_wait_for_their_copies_at_the_end_of_a_pass(fetch: str) -> None:
    device = SimulatedDevice(bandwidth=SLOW)
    workers = Workers(device, [filled(i) for i in range(3)])
    readings = Readings(device, 3)
    for index, batch in enumerate(GPUPrefetcher(workers, device, fetch=fetch)):
        readings.queue(index, batch)
    assert workers.busy() == 0
    for slot in workers.worker_slots:  # as a worker that persists writes in the next pass
        slot.segment.tensor.fill_(0)
    assert readings.values() == constants([1, 2, 3])


def test_c6_slots_of_closed_workers_stay_until_their_copies_have_passed() -> None:
    device = SimulatedDevice(bandwidth=SLOW)
    workers = Workers(device, [filled(i) for i in range(3)])
    readings = Readings(device, 3)
    iterator = iter(GPUPrefetcher(workers, device, fetch="caller"))
    readings.queue(0, next(iterator))
    workers.table.close()  # unregisters: simulated memory is poisoned then
    held = device.pinned_bytes
    assert held > 0
    iterator.close()
    assert device.pinned_bytes == 0
    assert readings.values()[0] == (1.0, 1.0)


def test_c6_a_larger_segment_replaces_one_only_after_its_copy(fetch: str) -> None:
    device = SimulatedDevice(bandwidth=SLOW)
    samples = [filled(i, ROW * (1 + i)) for i in range(8)]
    workers = Workers(device, samples)
    assert read_all(device, GPUPrefetcher(workers, device, fetch=fetch), 8) == constants(range(1, 9))


@pytest.mark.parametrize("pinned_limit", [0, 2 * ROW * 4])
@pytest.mark.filterwarnings("ignore::prefetchpipe.errors.PrefetchWarning")
def test_c15_registration_refused_copies_out_of_the_slot_first(fetch: str, pinned_limit: int) -> None:
    device = SimulatedDevice(bandwidth=SLOW, pinned_limit=pinned_limit)
    workers = Workers(device, [filled(i) for i in range(8)], slots=2)
    assert read_all(device, GPUPrefetcher(workers, device, fetch=fetch), 8) == constants(range(1, 9))


def test_c15_one_warning_says_that_registration_was_refused() -> None:
    device = SimulatedDevice(pinned_limit=0)
    workers = Workers(device, [filled(i) for i in range(8)])
    with pytest.warns(PrefetchWarning, match="page-locked memory was refused") as caught:
        list(GPUPrefetcher(workers, device, fetch="caller"))
    assert len([w for w in caught if "worker processes are staged" in str(w.message)]) == 1


# Contract 15: device memory is short


class Short:
    """Raises as if the device were full, the first times that it is asked."""

    def __init__(self, function: Any, times: int) -> None:
        self.function = function
        self.left = times

    def __call__(self, *args: Any) -> Any:
        if self.left:
            self.left -= 1
            raise torch.OutOfMemoryError("simulated")
        return self.function(*args)


@pytest.mark.parametrize("pinned_limit", [None, 0], ids=["", "not pinned"])
@pytest.mark.parametrize("where", ["alloc", "transform"])
@pytest.mark.filterwarnings("ignore::prefetchpipe.errors.PrefetchWarning")
def test_c15_a_batch_is_sent_again_when_device_memory_was_short(
    where: str, pinned_limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimulatedDevice(bandwidth=SLOW, pinned_limit=pinned_limit)
    transform = None
    if where == "transform":
        transform = Short(lambda batch: batch, 2)
    else:
        monkeypatch.setattr(device, "alloc", Short(device.alloc, 2))
    workers = Workers(device, [filled(i) for i in range(6)])
    prefetcher = GPUPrefetcher(workers, device, fetch="thread", transform=transform)
    assert read_all(device, prefetcher, 6) == constants(range(1, 7))
    assert workers.busy() == 0


def test_c6_a_batch_that_fails_in_the_transform_gives_its_slot_back_after_the_copy() -> None:
    device = SimulatedDevice(bandwidth=SLOW)
    workers = Workers(device, [filled(i) for i in range(3)])
    prefetcher = GPUPrefetcher(workers, device, fetch="caller", transform=Short(None, 1))
    with pytest.raises(torch.OutOfMemoryError):
        next(iter(prefetcher))
    gc.collect()
    assert workers.busy() <= 1  # the batch behind it, packed already


# Contract 14 and max_pinned_bytes


def test_c14_a_slot_of_one_size_serves_smaller_batches() -> None:
    device = SimulatedDevice()
    sizes = [8, 1, 5, 8, 2, 7, 1, 8]
    workers = Workers(device, [filled(i, ROW * size) for i, size in enumerate(sizes)])
    assert read_all(device, GPUPrefetcher(workers, device, fetch="caller"), 8) == constants(range(1, 9))
    assert device.pinned_allocations <= 3
    assert all(slot.nbytes == 8 * ROW * 4 for slot in workers.worker_slots)


@pytest.mark.parametrize("pages", [1, 2, 3, 5])
def test_c14_the_limit_holds_whatever_the_batches(fetch: str, pages: int) -> None:
    limit = pages * ROW * 4
    device = SimulatedDevice(bandwidth=SLOW)
    sizes = [1, 1, 2, 1, 3, 1, 1, 4, 5, 1, 6, 2]
    workers = Workers(device, [filled(i, ROW * size) for i, size in enumerate(sizes)], limit=limit, pinned_limit=limit)
    seen: list[int] = []
    readings = Readings(device, len(sizes))
    prefetcher = GPUPrefetcher(workers, device, fetch=fetch)
    for index, batch in enumerate(prefetcher):
        readings.queue(index, batch)
        del batch
        seen.append(workers.memory.held_bytes)
        assert sum(slot.nbytes for slot in workers.worker_slots) <= limit
    assert readings.values() == constants(range(1, len(sizes) + 1))
    assert max(seen) <= limit
    # No registration was refused (that would have warned): the parent lets go of what the worker has let go.


def test_c14_one_large_slot_takes_the_place_of_several_small_ones() -> None:
    limit = 4 * ROW * 4
    device = SimulatedDevice()
    workers = Workers(device, [], limit=limit, pinned_limit=limit)
    small = [pickle.loads(workers.message(filled(i))) for i in range(3)]
    assert all(batch.slot.pin() for batch in small)
    assert device.pinned_bytes == 3 * ROW * 4
    del small
    large = pickle.loads(workers.message(filled(7, 4 * ROW)))
    assert large.slot.pin()
    assert device.pinned_bytes == workers.memory.held_bytes == limit
    assert [leaf[0, 0].item() for leaf in large.copied_leaves()] == [8.0]
    del large
    assert [pickle.loads(workers.message(filled(i))).copied_leaves()[0][0, 0].item() for i in range(5)] == [
        1,
        2,
        3,
        4,
        5,
    ]


def test_c14_retired_memory_goes_without_the_collector() -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:prefetchpipe")

    gc.collect()
    before = mapped()
    gc.disable()
    try:
        workers = Workers(SimulatedDevice(), [])
        for index in range(1, 20):
            batch = pickle.loads(workers.message(filled(index, ROW * index)))
            assert batch.slot.pin()
            batch.copied_leaves()
            del batch
        assert mapped() <= before + 2 * 3 + 1  # both sides of three slots, and the control segment
        workers.table.close()
        workers.collate._packer = None
        del workers
        assert mapped() == before
    finally:
        gc.enable()


# What is sent and understood


def test_plans_are_forgotten_on_both_sides_together() -> None:
    """More signatures than are kept, over and over."""
    workers = Workers(SimulatedDevice(), [])
    for _ in range(2):
        for length in range(1, 300):
            batch = pickle.loads(workers.message(filled(length, length)))
            assert batch.copied_leaves()[0].tolist() == [[float(length + 1)] * length]
    assert len(workers.table._plans[-1]) <= 128


class Unreadable:
    """Can be pickled, but not read."""

    def __reduce__(self) -> Any:
        return _raise, ()


def _raise() -> None:
    raise KeyError("unreadable")


def test_c7_a_batch_that_cannot_be_read_loses_no_slot_and_no_plan() -> None:
    """What workers that persist send after it is understood."""
    workers = Workers(SimulatedDevice(), [], inner=lambda samples: samples[0])
    gc.collect()
    for index in range(10):
        with pytest.raises(KeyError, match="unreadable"):
            pickle.loads(workers.message({"x": filled(index), "bad": Unreadable()}))
        assert workers.busy() == 0
    batch = pickle.loads(workers.message({"x": filled(3), "bad": None}))
    assert batch.copied_leaves()[0][0].item() == 4.0


def test_c7_a_failure_while_packing_loses_no_slot_and_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(SimulatedDevice(), [])
    monkeypatch.setattr(collate_module, "pack_alone", Short(collate_module.pack_alone, 1))
    with pytest.raises(torch.OutOfMemoryError):
        workers.message(filled(0))
    assert workers.busy() == 0
    assert pickle.loads(workers.message(filled(1))).copied_leaves()[0][0, 0].item() == 2.0


def test_c7_a_segment_that_cannot_be_opened_breaks_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker takes it for known from then on; nothing it sends may be read as something else."""
    from prefetchpipe.pipeline import workers as workers_module

    workers = Workers(SimulatedDevice(), [])
    message = workers.message(filled(0))

    def refused(handle: Any) -> Any:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(workers_module, "Segment", refused)
        with pytest.raises(OSError, match="Too many"):
            pickle.loads(message)
    assert workers.table.is_broken


def test_nothing_is_received_after_the_end() -> None:
    workers = Workers(SimulatedDevice(), [])
    messages = [workers.message(filled(i)) for i in range(2)]
    workers.table.close()
    assert pickle.loads(messages[0]) is None
    del workers.table
    gc.collect()
    assert pickle.loads(messages[1]) is None


def test_a_worker_stops_waiting_when_the_parent_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collate_module, "_PATIENCE_SECONDS", 1e9)
    workers = Workers(SimulatedDevice(), [], slots=1)
    held = pickle.loads(workers.message(filled(0)))
    threading.Timer(0.05, workers.table.stop).start()
    workers.message(filled(1))
    assert workers.ways == ["packed", "plain"]
    assert held.copied_leaves()[0][0, 0].item() == 1.0


def test_what_cannot_be_pickled_raises_in_the_worker() -> None:
    """Torch's queue would lose it with a message, and the parent would wait for ever."""
    for batch in ({"x": filled(0), "bad": lambda: None}, [lambda: None], lambda: None):
        workers = Workers(SimulatedDevice(), [], inner=lambda _, batch=batch: batch)
        with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
            workers.message(0)


def test_checked_overwrites_a_slot_before_it_is_given_back() -> None:
    device = SimulatedDevice()
    workers = Workers(device, [], poison=True)
    batch = pickle.loads(workers.message(filled(0)))
    segment = workers.worker_slots[0].segment
    del batch
    assert segment.flags[STATE] == FREE
    assert set(segment.tensor.tolist()) == {0xA5}


def test_a_batch_on_the_cpu_is_a_copy() -> None:
    workers = Workers(cpu_device(), [filled(i) for i in range(6)], slots=2)
    kept = list(GPUPrefetcher(workers, "cpu", fetch="caller"))
    settle("cpu")
    assert [batch[0, 0].item() for batch in kept] == [1, 2, 3, 4, 5, 6]
    assert len({batch.data_ptr() for batch in kept}) == 6
