"""Corners that were wrong once: each test is the smallest program that showed it (contracts in the names)."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import gc
import inspect
import itertools
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from prefetchpipe import GPUPrefetcher, IteratorClosedError, PrefetchWarning
from prefetchpipe import prefetcher as prefetcher_module
from prefetchpipe.pipeline import fetching, leaving, waking
from prefetchpipe.pipeline import pace as pace_module
from prefetchpipe.pipeline import producer as producer_module
from prefetchpipe.pipeline.producer import Producer
from prefetchpipe.testing import SimulatedDevice
from tests.support import TIMEOUT, Thread, held_up_at

FETCH = ["thread", "caller", "auto"]


class Rewinding:
    """The pattern of many tutorials: ``__iter__`` resets, and returns itself."""

    def __init__(self, count: int = 8) -> None:
        self.count = count
        self.position = count

    def __iter__(self) -> Rewinding:
        self.position = 0
        return self

    def __next__(self) -> int:
        if self.position >= self.count:
            raise StopIteration
        self.position += 1
        return self.position - 1


class Keeping:
    """Hands out the same iterator each time."""

    def __init__(self) -> None:
        self.iterator = iter(range(8))

    def __iter__(self) -> Iterator[int]:
        return self.iterator


def taken(iterable: Any, count: int) -> list[Any]:
    got = []
    for batch in iterable:
        got.append(batch)
        if len(got) == count:
            break
    return got


# Contract 1: sources that are iterated more than once


@pytest.mark.parametrize("fetch", FETCH)
def test_c1_a_loader_that_rewinds_itself_starts_anew(fetch: str) -> None:
    prefetcher = GPUPrefetcher(Rewinding(), "cpu", fetch=fetch)
    assert taken(prefetcher, 5) == [0, 1, 2, 3, 4]
    assert list(prefetcher) == list(range(8))
    live = iter(prefetcher)
    assert next(live) == 0
    assert list(prefetcher) == list(range(8))


@pytest.mark.parametrize("fetch", FETCH)
@pytest.mark.parametrize("make", [lambda: iter(range(8)), Keeping, lambda: (i for i in range(8))])
def test_c1_what_a_one_shot_source_gave_is_not_lost(make: Callable[[], Any], fetch: str) -> None:
    prefetcher = GPUPrefetcher(make(), "cpu", fetch=fetch)
    assert taken(prefetcher, 3) == [0, 1, 2]
    assert taken(prefetcher, 2) == [3, 4]
    assert list(prefetcher) == [5, 6, 7]
    assert list(prefetcher) == []


@pytest.mark.parametrize("fetch", FETCH)
def test_c1_two_live_passes_over_one_iterator_share_it(fetch: str) -> None:
    prefetcher = GPUPrefetcher(iter(range(8)), "cpu", fetch=fetch)
    first = iter(prefetcher)
    assert next(first) == 0
    second = iter(prefetcher)
    assert [next(second), next(first), next(second)] == [1, 2, 3]
    del first
    assert list(second) == [4, 5, 6, 7]


def test_c1_a_slow_one_shot_source_left_in_the_middle_of_a_batch() -> None:
    release, inside = threading.Event(), threading.Event()

    def rows() -> Iterator[int]:
        yield 0
        inside.set()
        release.wait(20)
        yield 1
        yield 2

    prefetcher = GPUPrefetcher(rows(), "cpu", fetch="thread", depth=1)
    first = iter(prefetcher)
    assert next(first) == 0
    assert inside.wait(20)
    del first  # gives up waiting for the loader after half a second
    again = iter(prefetcher)
    release.set()
    assert list(again) == [1, 2]


@pytest.mark.parametrize("fetch", ["caller", "auto", "thread"])
def test_c1_several_threads_share_one_iterator(fetch: str) -> None:
    iterator = iter(GPUPrefetcher(list(range(500)), "cpu", fetch=fetch))
    got: list[int] = []

    def consume() -> None:
        for batch in iterator:
            got.append(batch)  # noqa: PERF402

    threads = [Thread(consume) for _ in range(4)]
    for thread in threads:
        thread.result()
    assert sorted(got) == list(range(500))


@pytest.mark.parametrize("fetch", FETCH)
def test_c1_a_loader_that_advances_its_own_iterator_gets_an_error(fetch: str) -> None:
    def rows() -> Iterator[int]:
        yield 0
        yield next(iterator)

    iterator = iter(GPUPrefetcher(rows(), "cpu", fetch=fetch))
    assert next(iterator) == 0
    with pytest.raises(ValueError, match="advances the iterator"):
        next(iterator)


# Contract 7: errors


class MovesBadly:
    def __init__(self, index: int) -> None:
        self.index = index

    def to(self, _: Any) -> MovesBadly:
        if self.index == 1:
            next(iter(()))
        return self


@pytest.mark.parametrize("fetch", FETCH)
def test_c7_a_stray_stop_iteration_does_not_end_the_pass(fetch: str) -> None:
    iterator = iter(GPUPrefetcher([MovesBadly(i) for i in range(3)], "cpu", fetch=fetch))
    assert next(iterator).index == 0
    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        next(iterator)
    assert type(caught.value.__cause__) is StopIteration


def test_c7_an_error_at_delivery_ends_the_pass() -> None:
    class Corrupting(SimulatedDevice):
        number = 0

        def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Any) -> None:
            self.number += 1
            super().copy(dst, torch.zeros_like(src) if self.number == 2 else src, stream)

    iterator = iter(GPUPrefetcher([torch.ones(3) * i for i in range(1, 6)], Corrupting(), checked=True))
    next(iterator)
    with pytest.raises(RuntimeError, match="is not on the device"):
        next(iterator)
    assert list(iterator) == []


@pytest.mark.parametrize("fetch", FETCH)
def test_c7_the_loaders_own_context_is_kept(fetch: str) -> None:
    def rows() -> Iterator[int]:
        yield 0
        try:
            1 / 0  # noqa: B018
        except ZeroDivisionError:
            raise KeyError("row 1")  # noqa: B904

    iterator = iter(GPUPrefetcher(rows(), "cpu", fetch=fetch))
    next(iterator)
    try:
        raise OSError("the user's")
    except OSError:
        with pytest.raises(KeyError) as caught:
            next(iterator)
    assert type(caught.value.__context__) is ZeroDivisionError


# Contract 9: leaving, from anywhere


@pytest.mark.parametrize("fetch", FETCH)
def test_c9_closed_from_inside_the_loader(fetch: str) -> None:
    device = SimulatedDevice()
    prefetchers: list[GPUPrefetcher] = []

    def rows() -> Iterator[torch.Tensor]:
        yield torch.ones(1000)
        prefetchers[0].close()
        yield torch.ones(1000)

    prefetchers.append(GPUPrefetcher(rows(), device, fetch=fetch))
    iterator = iter(prefetchers[0])
    with pytest.raises(IteratorClosedError):
        for _ in range(4):
            next(iterator)
    for thread in threading.enumerate():
        if thread.name.startswith("prefetchpipe"):
            thread.join(20)
    assert device.pinned_bytes == 0


def test_c9_collected_while_memory_is_allocated() -> None:
    class Collecting(SimulatedDevice):
        def host_alloc(self, nbytes: int) -> Any:
            gc.collect()
            return super().host_alloc(nbytes)

    class Cycle:
        pass

    prefetcher = GPUPrefetcher([torch.ones(100)] * 10, Collecting(), fetch="caller")
    gc.disable()
    try:
        cycles = []
        for _ in range(2):
            cycle = Cycle()
            cycle.me = cycle
            cycle.iterator = iter(prefetcher)
            next(cycle.iterator)
            cycles.append(cycle)
        del cycle
        cycles.clear()
        next(iter(prefetcher))
    finally:
        gc.enable()
    prefetcher.close()


def test_c9_a_forked_child_starts_its_own_pass() -> None:
    loader = DataLoader(torch.arange(20), batch_size=2, num_workers=2)
    prefetcher = GPUPrefetcher(loader, "cpu")
    iterator = iter(prefetcher)
    next(iterator)
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            code = 0 if len(list(prefetcher)) == 10 else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(list(iterator)) == 9


# Contract 11: states that are nobody's business yet


def test_c11_asking_for_a_state_fails_when_it_is_asked_for() -> None:
    class NoState(list):
        def state_dict(self) -> Any:
            raise NotImplementedError("no state")

    prefetcher = GPUPrefetcher(NoState([1, 2]), "cpu")
    assert list(prefetcher) == [1, 2]
    with pytest.raises(NotImplementedError, match="no state"):
        prefetcher.state_dict()


def test_c11_a_state_that_cannot_be_copied() -> None:
    class Generators(list):
        def state_dict(self) -> Any:
            return {"rows": (i for i in ())}

    prefetcher = GPUPrefetcher(Generators([1, 2]), "cpu")
    assert list(prefetcher) == [1, 2]
    assert set(prefetcher.state_dict()) == {"rows"}


def test_c11_an_older_pass_does_not_touch_the_state() -> None:
    loader = StatefulDataLoader(list(range(40)), batch_size=2)
    prefetcher = GPUPrefetcher(loader, "cpu", fetch="thread", depth=4)
    older = iter(prefetcher)
    next(older)
    newer = iter(prefetcher)
    next(newer)
    next(older)
    resumed = StatefulDataLoader(list(range(40)), batch_size=2)
    resumed.load_state_dict(prefetcher.state_dict())
    assert next(iter(resumed)).tolist() == [2, 3]


@pytest.mark.parametrize("answer", [lambda _: {}["no"], lambda _: None])
def test_c12_a_loader_with_a_strange_getattr(answer: Callable[[str], Any]) -> None:
    class Strange:
        def __iter__(self) -> Iterator[int]:
            return iter([1, 2])

        def __getattr__(self, name: str) -> Any:
            return answer(name)

    assert list(GPUPrefetcher(Strange(), "cpu")) == [1, 2]


# Contract 12 and 2: leaves over one piece of memory


def over(base: Any, *views: Callable[[Any], Any]) -> Callable[[], list[Any]]:
    return lambda: [view(base) for view in views]


OVER_ONE_MEMORY = [
    over(np.arange(1000.0), lambda a: a[:600], lambda a: a),
    over(np.arange(1000.0), lambda a: a, lambda a: a[:600]),
    over(np.arange(1000.0), lambda a: a[:10], lambda a: a.view("i4")),
    over(torch.arange(10.0), lambda x: x.expand(4, 10), lambda x: x),
    over(torch.arange(2.0), lambda x: x[0], lambda x: x[1:2].expand(2)),
    over(torch.arange(6.0), lambda x: x[:4], lambda x: x[2:]),
]


@pytest.mark.parametrize("place", ["cpu", "sim"])
@pytest.mark.parametrize("batch", OVER_ONE_MEMORY)
def test_c12_leaves_over_one_memory(place: str, batch: Callable[[], Any]) -> None:
    device = SimulatedDevice() if place == "sim" else "cpu"
    source = batch()
    [got] = list(GPUPrefetcher([source], device))
    if place == "sim":
        device.synchronize()
    for ours, theirs in zip(got, source, strict=True):
        assert torch.equal(ours, torch.as_tensor(theirs))


@pytest.mark.parametrize("place", ["cpu", "sim"])
@pytest.mark.parametrize("make", [lambda: torch.zeros(2)[::2], lambda: torch.zeros(5, 2)[:1, ::2]])
def test_checked_takes_odd_strides(place: str, make: Callable[[], torch.Tensor]) -> None:
    device = SimulatedDevice() if place == "sim" else "cpu"
    assert len(list(GPUPrefetcher([make()] * 3, device, checked=True))) == 3


# Contract 17: modes of the thread that called iter


@pytest.mark.parametrize("fetch", FETCH)
def test_c17_the_modes_of_iter_hold_wherever_the_loader_runs(fetch: str) -> None:
    name = contextvars.ContextVar("name", default="none")

    class Loader:
        def __iter__(self) -> Iterator[Any]:
            for _ in range(6):
                yield torch.is_grad_enabled(), torch.empty(0).device.type, name.get()

    token = name.set("iter's")
    with torch.no_grad(), torch.device("meta"):
        iterator = iter(GPUPrefetcher(Loader(), "cpu", fetch=fetch))
    name.reset(token)
    assert list(iterator) == [(False, "meta", "iter's")] * 6
    assert torch.is_grad_enabled()


def test_c17_static_buffers_of_an_inference_pass_serve_the_next() -> None:
    prefetcher = GPUPrefetcher([torch.ones(3)] * 3, "cpu", static=True)
    with torch.inference_mode():
        assert len(list(prefetcher)) == 3
    assert [batch.tolist() for batch in prefetcher] == [[1.0, 1.0, 1.0]] * 3


# Contract 5 and 15


def test_c5_a_pinned_buffer_behind_a_loader_that_pins() -> None:
    device = SimulatedDevice(bandwidth=1e6)
    buffer = device.pin_memory(torch.zeros(1000))

    class Refilling(IterableDataset[Any]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            for i in range(8):
                buffer.fill_(i)
                yield buffer

    loader = DataLoader(Refilling(), batch_size=None)
    loader.pin_memory = True
    got = list(GPUPrefetcher(loader, device, fetch="thread"))
    device.synchronize()
    assert [batch.unique().tolist() for batch in got] == [[float(i)] for i in range(8)]


@pytest.mark.filterwarnings("ignore:device memory is full")
@pytest.mark.parametrize("fetch", FETCH)
def test_c15_short_of_memory_on_every_path(fetch: str) -> None:
    device = SimulatedDevice(memory_limit=900_000)
    source = [torch.full((100_000,), float(i)) for i in range(12)]
    values = []
    for batch in GPUPrefetcher(source, device, depth=4, fetch=fetch):
        device.launch(lambda view: values.append(view[0].item()), batch, seconds=1e-3)
    device.synchronize()
    assert values == [float(i) for i in range(12)]


@pytest.mark.timeout(20)
@pytest.mark.filterwarnings("ignore:device memory is full")
def test_c15_waiting_for_batches_that_are_taken_late_does_not_count() -> None:
    """Whatever wakes the thread before the consumer has taken what is there: a busy machine, other consumers."""
    failures = []

    class Counting(SimulatedDevice):
        def alloc(self, nbytes: int) -> torch.Tensor:
            try:
                return super().alloc(nbytes)
            except torch.OutOfMemoryError:
                failures.append(nbytes)
                raise

    def wait_for_failures(count: int) -> None:
        while len(failures) < count:
            time.sleep(0.001)

    inside, leave, rows = held_up_at(2, 6)
    device = Counting(memory_limit=64 * 4 * 2)
    iterator: Any = iter(GPUPrefetcher(rows, device, depth=2, fetch="thread"))
    kept = [next(iterator)]
    assert inside.wait(TIMEOUT)  # one is taken, one is there, and there is no room for the third
    for _ in range(9):
        iterator._producer._credits.put(fetching.WAITING)
    leave.set()
    wait_for_failures(10)
    kept.append(next(iterator))
    wait_for_failures(11)  # nothing is left to be taken, and the consumer has not let go yet
    device.synchronize()
    values = [float(batch[0]) for batch in kept]
    kept.clear()
    for batch in iterator:
        device.synchronize()
        values.append(float(batch[0]))
    assert values == [1, 2, 3, 4, 5, 6]


def test_l7_a_subclass_keeps_its_own_attributes() -> None:
    class Named(GPUPrefetcher):
        pass

    prefetcher = Named([1, 2], "cpu")
    prefetcher.label = "train"
    clone = copy.deepcopy(prefetcher)
    assert (clone.label, list(clone)) == ("train", [1, 2])


# A second look: passes that are left while somebody waits, and sources that go on


def numbers(first: int, slow_at: int, release: threading.Event) -> Iterator[int]:
    for i in range(first, 9):
        if i == slow_at:
            release.wait(20)
        yield i


def test_c1_a_pass_closed_while_its_consumer_waits_loses_nothing() -> None:
    release = threading.Event()
    prefetcher = GPUPrefetcher(numbers(1, 4, release), "cpu", fetch="thread")
    iterator = iter(prefetcher)
    assert [next(iterator) for _ in range(3)] == [1, 2, 3]
    waiting = Thread(lambda: next(iterator))
    while prefetcher.stats().stall_seconds == 0 and not next(iter(prefetcher._passes))._consumers_waiting:
        pass
    iterator.close()
    with pytest.raises(IteratorClosedError):
        waiting.result()
    release.set()
    assert list(prefetcher) == [4, 5, 6, 7, 8]


def wait_for_end(prefetcher: GPUPrefetcher) -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("prefetchpipe-producer"):
            thread.join(20)


def test_c1_a_second_pass_after_the_thread_has_read_to_the_end() -> None:
    prefetcher = GPUPrefetcher(iter(range(4)), "cpu", fetch="thread", depth=4)
    first = iter(prefetcher)
    assert next(first) == 0
    wait_for_end(prefetcher)
    assert (list(prefetcher), list(first)) == ([1, 2, 3], [])


def test_c7_an_error_ahead_is_not_lost_with_the_pass() -> None:
    def rows() -> Iterator[int]:
        yield 0
        yield 1
        raise ValueError("row 2")

    prefetcher = GPUPrefetcher(rows(), "cpu", fetch="thread", depth=4)
    first = iter(prefetcher)
    assert [next(first), next(first)] == [0, 1]
    wait_for_end(prefetcher)
    del first
    with pytest.raises(ValueError, match="row 2"):
        list(prefetcher)


@pytest.mark.parametrize("consumers", [1, 3])
@pytest.mark.parametrize("fetch", FETCH)
def test_c1_a_new_pass_waits_for_who_is_inside_the_old_one(fetch: str, consumers: int) -> None:
    release, inside = threading.Event(), threading.Event()

    class Holding:
        def __init__(self) -> None:
            self.rows = self.make()

        def make(self) -> Iterator[int]:
            for i in range(8):
                if i == 3:
                    inside.set()
                    release.wait(20)
                yield i

        def __iter__(self) -> Iterator[int]:
            return self.rows

    prefetcher = GPUPrefetcher(Holding(), "cpu", fetch=fetch, depth=1)
    first = iter(prefetcher)
    got = [next(first) for _ in range(3)]
    stuck = Thread(lambda: next(first))
    assert inside.wait(20)
    first.close()
    again = iter(prefetcher)
    rest: list[int] = []
    threads = [Thread(lambda: rest.extend(again)) for _ in range(consumers)]
    release.set()
    with contextlib.suppress(IteratorClosedError):
        got.append(stuck.result())
    for thread in threads:
        thread.result()
    assert sorted(got + rest) == list(range(8))
    assert consumers > 1 or rest == sorted(rest)


@pytest.mark.parametrize("fetch", FETCH)
@pytest.mark.parametrize("stop_at", [2, 5, 6])
@pytest.mark.parametrize("rows", [12, 11])
@pytest.mark.parametrize("kept", [False, True], ids=["dropped", "kept"])
def test_c10_a_pass_left_early_leaves_the_generator_as_the_plain_loop(
    fetch: str, stop_at: int, rows: int, kept: bool
) -> None:
    def two_passes(wrap: Callable[[Any], Any]) -> tuple[list[Any], list[Any]]:
        generator = torch.Generator().manual_seed(0)
        loader = wrap(DataLoader(torch.arange(rows), batch_size=2, shuffle=True, generator=generator))
        first = []
        iterator = iter(loader)
        for batch in iterator:
            first.append(batch.tolist())
            if len(first) == stop_at:
                wait_for_end(loader)
                break
        held = iterator if kept else None  # frameworks begin a new pass before they let go of the older one
        del iterator
        second = [batch.tolist() for batch in loader]
        return first + [batch.tolist() for batch in held or ()], second

    want = two_passes(lambda loader: loader)
    assert two_passes(lambda loader: GPUPrefetcher(loader, "cpu", fetch=fetch, depth=8)) == want


class Shards(BatchSampler):
    """A framework's sampler around the user's, as Accelerate's ``BatchSamplerShard``."""

    def __init__(self, batch_sampler: BatchSampler) -> None:
        self.batch_sampler = batch_sampler

    def __iter__(self) -> Any:
        return iter(self.batch_sampler)

    def __len__(self) -> int:
        return len(self.batch_sampler)


def test_c10_a_generator_inside_of_a_frameworks_samplers_is_found() -> None:
    def two_passes(wrap: Callable[[Any], Any]) -> tuple[list[Any], list[Any]]:
        sampler = RandomSampler(range(12), generator=torch.Generator().manual_seed(0))
        loader = wrap(DataLoader(torch.arange(12), batch_sampler=Shards(BatchSampler(sampler, 2, drop_last=False))))
        iterator = iter(loader)
        first = [next(iterator).tolist() for _ in range(2)]
        wait_for_end(loader)
        return first, [batch.tolist() for batch in loader]

    want = two_passes(lambda loader: loader)
    assert two_passes(lambda loader: GPUPrefetcher(loader, "cpu", fetch="thread", depth=8)) == want


@pytest.mark.parametrize("fetch", FETCH)
def test_c10_an_ended_pass_that_is_kept_takes_nothing_back(fetch: str) -> None:
    def two_passes(wrap: Callable[[Any], Any]) -> tuple[list[Any], list[Any]]:
        loader = wrap(
            DataLoader(torch.arange(11), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(0))
        )
        iterator = iter(loader)
        return [batch.tolist() for batch in iterator], [batch.tolist() for batch in loader]

    assert two_passes(lambda loader: GPUPrefetcher(loader, "cpu", fetch=fetch, depth=8)) == two_passes(lambda x: x)


def test_c10_an_older_pass_draws_nothing_ahead_once_a_newer_one_has_begun() -> None:
    """It has batches ahead already, and is given a credit that would bring its thread to the draw at the end."""

    def run(wrap: Callable[[Any], Any]) -> Any:
        generator = torch.Generator().manual_seed(0)
        loader = wrap(DataLoader(torch.arange(8), batch_size=2, shuffle=True, generator=generator))
        older = iter(loader)
        first = [next(older).tolist() for _ in range(2)]
        newer = iter(loader)
        second = [next(newer).tolist()]
        first.append(next(older).tolist())
        second += [batch.tolist() for batch in newer]
        third = [batch.tolist() for batch in loader]
        return first + [batch.tolist() for batch in older], second, third, [batch.tolist() for batch in loader]

    want = run(lambda loader: loader)
    for _ in range(5):
        assert run(lambda loader: GPUPrefetcher(loader, "cpu", fetch="thread", depth=2)) == want


def test_c9_closed_by_the_loaders_own_iter() -> None:
    device = SimulatedDevice()
    live: list[Any] = []

    class Closing:
        position = 0

        def __iter__(self) -> Closing:
            while live:
                live.pop().close()
            return self

        def __next__(self) -> torch.Tensor:
            if self.position >= 8:
                raise StopIteration
            self.position += 1
            return torch.full((1000,), float(self.position))

    prefetcher = GPUPrefetcher(Closing(), device, fetch="caller")
    live.append(iter(prefetcher))
    next(live[0])
    assert len(list(prefetcher)) == 7
    prefetcher.close()
    assert device.pinned_bytes == 0


def test_c15_no_thread_to_be_had_and_a_device_that_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    device = SimulatedDevice()
    count = 0
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for batch in GPUPrefetcher([torch.full((100_000,), float(i)) for i in range(20)], device):
            device.launch(lambda _: None, batch, seconds=5.0)
            count += 1
    assert count == 20


def test_c12_small_rows_arrive_with_torchs_strides() -> None:
    x = torch.arange(24.0).reshape(4, 3, 2).transpose(1, 2)
    loader = DataLoader(torch.utils.data.TensorDataset(x), batch_size=2)
    [ours], [theirs] = next(iter(GPUPrefetcher(loader, "cpu"))), next(iter(loader))
    assert (ours.stride(), ours.tolist()) == (theirs.stride(), theirs.tolist())


def test_c7_an_empty_index_is_torchs_affair() -> None:
    dataset = torch.utils.data.TensorDataset(torch.arange(4))
    loader = DataLoader(dataset, batch_sampler=[torch.empty(0, dtype=torch.int64)])
    with pytest.raises(IndexError):
        list(GPUPrefetcher(loader, "cpu"))


def test_c9_an_interrupted_wait_for_the_device_costs_no_batch() -> None:
    class Interrupted(SimulatedDevice):
        interrupts = 0

        def synchronize(self, event: Any = None) -> None:
            if event is not None and self.interrupts == 0:
                self.interrupts = 1
                raise KeyboardInterrupt
            super().synchronize(event)

    device = Interrupted()
    iterator = iter(GPUPrefetcher([torch.full((4,), float(i)) for i in range(5)], device, depth=1, fetch="caller"))
    got = []
    for _ in range(6):
        with contextlib.suppress(KeyboardInterrupt):
            batch = next(iterator)
            device.launch(lambda view: got.append(view[0].item()), batch, seconds=1.0)
    device.synchronize()
    assert (device.interrupts, got) == (1, [0.0, 1.0, 2.0, 3.0, 4.0])


def interrupted_at(number: int, function: Callable[[], Any]) -> bool:
    """Call ``function`` with Ctrl-C at the end of the ``number``-th call that the core makes: Python looks there."""
    calls = itertools.count()
    files = {inspect.getfile(module) for module in (prefetcher_module, producer_module, fetching, leaving, waking)}

    def interrupt(frame: Any, event: str, _argument: Any) -> None:
        callers = (frame, frame.f_back) if event == "return" else (frame,)
        is_end = event in ("c_return", "return") and any(f and f.f_code.co_filename in files for f in callers)
        if is_end and next(calls) == number:
            raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(interrupt)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(before)
    return False


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("fetch", FETCH)
def test_c9_ctrl_c_at_any_call_leaves_a_pass_that_goes_on(
    fetch: Any, staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer_module, "_STARVED_SECONDS", 0.01)
    monkeypatch.setattr(pace_module.Pace, "end", lambda *_: True)  # "auto": the first batch calls for a thread
    loader = list(range(6)) if staged else [torch.tensor(index) for index in range(6)]
    before = threading.active_count()
    for number in itertools.count():
        prefetcher = GPUPrefetcher(loader, SimulatedDevice() if staged else "cpu", depth=1, fetch=fetch)
        iterator: Any = iter(prefetcher)
        producer = iterator._producer
        is_hit = [interrupted_at(number, partial(next, iterator, None)) for _ in range(3)]
        assert not producer._consumers_waiting
        got = [int(batch) for batch in iterator]
        assert got in ([], *(list(range(first, 6)) for first in range(4)))
        assert [int(batch) for batch in prefetcher] == list(range(6))
        del iterator, producer
        prefetcher.close()
        if not any(is_hit):
            break
    assert number > 20
    assert threading.active_count() <= before  # one of an earlier test may have been ending


@pytest.mark.timeout(20)
def test_c8_c9_ctrl_c_when_a_credit_is_handed_to_the_thread_makes_no_second_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Interrupting(queue.SimpleQueue):
        is_due = True

        def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
            super().put(item, block, timeout)
            if self.is_due:
                self.is_due = False
                raise KeyboardInterrupt

    monkeypatch.setattr(Producer, "_is_behind", lambda *_: True)
    monkeypatch.setattr(pace_module.Pace, "may_start", True)
    iterator: Any = iter(GPUPrefetcher(range(6), "cpu", depth=1))
    producer = iterator._producer
    given = Interrupting()
    given.is_due = False
    given.put(producer._credits.get())
    given.is_due = True
    monkeypatch.setattr(producer, "_credits", given)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    while producer._ready.empty() or not given.empty():
        time.sleep(0.001)
    with producer._inside:
        assert producer._sent == 1
    assert list(iterator) == list(range(6))


def lost(producer: Any) -> None:
    """The next ticket, as by Ctrl-C at the end of the call that takes it."""
    producer._ready.get(timeout=TIMEOUT)


@pytest.mark.timeout(20)
@pytest.mark.filterwarnings("ignore:device memory is full")
def test_c9_c15_a_batch_lost_by_ctrl_c_is_not_waited_for_by_a_full_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_module, "_STARVED_SECONDS", 0.01)
    device = SimulatedDevice(memory_limit=64 * 4 * 3)
    rows = [torch.ones(64), torch.ones(64), torch.ones(64 * 100)]
    iterator: Any = iter(GPUPrefetcher(rows, device, depth=2, fetch="thread"))
    next(iterator)
    lost(iterator._producer)
    with pytest.raises(torch.OutOfMemoryError):
        next(iterator)


@pytest.mark.timeout(20)
def test_c9_the_end_lost_by_ctrl_c_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for who has begun to wait while the thread was still about to go."""
    monkeypatch.setattr(producer_module, "_STARVED_SECONDS", 0.01)
    waits = threading.Event()
    fetch_ahead, ready_ticket = Producer._fetch_ahead, Producer._ready_ticket

    def late(self: Producer) -> bool:
        leaves = fetch_ahead(self)
        assert waits.wait(TIMEOUT)
        return leaves

    def waiting(self: Producer) -> Any:
        waits.set()
        return ready_ticket(self)

    monkeypatch.setattr(Producer, "_fetch_ahead", late)
    iterator: Any = iter(GPUPrefetcher([0], "cpu", fetch="thread"))
    assert next(iterator) == 0
    monkeypatch.setattr(Producer, "_ready_ticket", waiting)
    lost(iterator._producer)
    assert list(iterator) == []


def test_c9_an_interrupted_start_of_the_thread_costs_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace_module.Pace, "end", lambda *_: True)
    start, started = threading.Thread.start, []

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        started.append(thread)
        if len(started) == 1:
            raise KeyboardInterrupt  # as in the wait for the thread

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    iterator = iter(GPUPrefetcher(range(6), "cpu"))
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert list(iterator) == list(range(6))
    assert len(started) == 2
    started[0].join(TIMEOUT)
    assert not started[0].is_alive()


class Drawn(Dataset):
    """Each sample with a draw from its process's global generator."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.stack((torch.tensor(float(index)), torch.rand(())))


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["shared", "plain"])
def test_c10_persistent_workers_draw_as_in_the_plain_loop_after_an_early_break(workers: str) -> None:
    def run(loader: Any) -> list[Any]:
        batches = [batch.tolist() for _ in range(2) for batch in itertools.islice(loader, 3)]
        return batches + [batch.tolist() for batch in loader]

    def loader() -> Any:
        return DataLoader(Drawn(), batch_size=1, num_workers=1, persistent_workers=True)

    torch.manual_seed(0)
    expected = run(loader())
    torch.manual_seed(0)
    with GPUPrefetcher(loader(), "cpu", fetch="caller", workers=workers) as prefetcher:
        assert run(prefetcher) == expected


@pytest.mark.timeout(20)
@pytest.mark.parametrize("first", ["live", "dropped"])
def test_c9_l5_a_new_pass_begins_while_the_source_gives_nothing(first: str) -> None:
    """As over the plain generator: `iter` asks for no item, so it waits for none."""
    items: queue.SimpleQueue[int] = queue.SimpleQueue()

    def feed() -> Iterator[torch.Tensor]:
        while True:
            yield torch.tensor(items.get())

    prefetcher = GPUPrefetcher(feed(), "cpu", fetch="thread")
    iterator = iter(prefetcher)
    items.put(0)
    assert int(next(iterator)) == 0  # from here on the thread waits inside of the generator
    if first == "dropped":
        del iterator
    again = iter(prefetcher)
    items.put(1)
    assert int(next(again)) == 1
    items.put(2)  # wakes the thread for the end
    prefetcher.close()


@pytest.mark.timeout(20)
def test_c9_l5_m4_a_new_pass_begins_while_the_older_one_waits_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = threading.Event()
    until_memory_is_freed = Producer._until_memory_is_freed

    def seen(self: Producer) -> bool | None:
        waits.set()
        return until_memory_is_freed(self)

    monkeypatch.setattr(Producer, "_until_memory_is_freed", seen)
    nbytes = 100 * 1024
    device = SimulatedDevice(memory_limit=int(2.5 * nbytes))
    data = [torch.full((nbytes,), i, dtype=torch.uint8) for i in range(8)]
    loader = DataLoader(data, batch_size=1, shuffle=True, generator=torch.Generator().manual_seed(0))
    prefetcher = GPUPrefetcher(loader, device, depth=4, fetch="thread")
    seen_values = []

    def read(batch: Any) -> None:
        device.synchronize()
        seen_values.append(int(batch[0, 0]))

    def loop() -> Any:
        older = iter(prefetcher)
        read(next(older))
        assert waits.wait(TIMEOUT)
        newer = iter(prefetcher)  # holds the older one back, whose thread waits for this very consumer
        for batch in older:
            read(batch)
            del batch
        return newer

    with pytest.warns(PrefetchWarning, match="device memory is full"):
        newer = loop()
    assert sorted(seen_values) == list(range(8))
    newer.close()
    prefetcher.close()


@pytest.mark.parametrize("batch", [1, None, {}, [], "text", torch.ones(2).to_sparse()], ids=repr)
def test_c12_static_batches_without_a_tensor_of_their_own(batch: Any) -> None:
    (out,) = GPUPrefetcher([batch], "cpu", static=True)
    assert type(out) is type(batch)
    assert torch.equal(out.to_dense(), batch.to_dense()) if isinstance(batch, torch.Tensor) else out == batch


def test_c12_static_batches_keep_nested_tensors() -> None:
    batch = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)])
    (out,) = GPUPrefetcher([batch], "cpu", static=True)
    assert [part.tolist() for part in out.unbind()] == [[1, 1], [0, 0, 0]]
