"""A thread that was started for what the loop does meanwhile: kept where it makes the steps shorter (contract 16)."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from prefetchpipe import GPUPrefetcher
from prefetchpipe.pipeline import fetching
from prefetchpipe.pipeline.threadtrial import ThreadTrial
from prefetchpipe.testing import SimulatedDevice
from tests.support import TIMEOUT, Thread, held_up_at, join_ours, our_threads


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may need long for a thread that is not held up."""
    monkeypatch.setattr(fetching, "_RETIRE_SECONDS", TIMEOUT)


def filled(index: int) -> torch.Tensor:
    return torch.full((64,), float(index + 1))


class Steps:
    """A loop whose parts take as long as they say, by the prefetcher's clock."""

    def __init__(self, *, usual: float, threaded: float, count: int = 400) -> None:
        self.device = SimulatedDevice()
        self.prefetcher = GPUPrefetcher([filled(index) for index in range(count)], self.device)
        self.usual, self._threaded = lambda _number: usual, threaded
        self._shared = self.prefetcher._shared
        self.now = 0.0
        self._shared.counters.clock = lambda: self.now

    def run(self) -> tuple[list[float], list[str]]:
        """The first values of the batches, and the path of each."""
        values, paths = [], []
        for batch in self.prefetcher:
            self.device.synchronize()
            values.append(float(batch[0]))
            paths.append(self._shared.counters.path)
            self.now += self._threaded if paths[-1] == "thread" else self.usual(len(paths))
        return values, paths


def test_a_thread_that_makes_steps_longer_retires() -> None:
    """The loop works for a millisecond: a thread would seem to hide what is sent meanwhile."""
    before = our_threads()
    steps = Steps(usual=1e-3, threaded=2e-3)
    # What is sent takes time too, or there is nothing to hide.
    pace_sees_sending(steps, 2e-4)
    values, paths = steps.run()
    assert values == list(range(1, 401))
    assert "thread" in paths
    assert paths[-200:] == ["caller"] * 200
    assert "a thread was tried: 2" in steps.prefetcher.stats().path_reason
    assert not join_ours(before)
    values, paths = steps.run()  # a later pass knows
    assert values == list(range(1, 401))
    assert "thread" not in paths


def test_a_thread_that_makes_steps_shorter_stays() -> None:
    steps = Steps(usual=1e-3, threaded=5e-4)
    pace_sees_sending(steps, 2e-4)
    values, paths = steps.run()
    assert values == list(range(1, 401))
    assert paths[-200:] == ["thread"] * 200
    steps.prefetcher.close()


def test_short_passes_have_a_thread_from_the_second_one_on() -> None:
    steps = Steps(usual=1e-3, threaded=5e-4, count=12)
    pace_sees_sending(steps, 2e-4)
    assert [steps.run()[1][-1] for _ in range(3)] == ["caller", "thread", "thread"]


def test_one_window_that_was_held_up_decides_nothing() -> None:
    """Another process was busy while the first steps ran without a thread."""
    steps = Steps(usual=1e-3, threaded=2e-3)
    pace_sees_sending(steps, 2e-4)
    steps.usual = lambda number: 5e-3 if number < 24 else 1e-3
    values, paths = steps.run()
    assert values == list(range(1, 401))
    assert "thread" in paths
    assert paths[-200:] == ["caller"] * 200


def test_a_long_pass_behind_a_short_one_finds_out() -> None:
    """Nothing was known of a step without a thread when it was started."""
    steps = Steps(usual=1e-3, threaded=2e-3)
    pace_sees_sending(steps, 2e-4)
    assert len(list(itertools.islice(steps.prefetcher, 5))) == 5
    values, paths = steps.run()
    assert values == list(range(1, 401))
    assert paths[16] == "thread"
    assert paths[-100:] == ["caller"] * 100
    assert "a thread was tried: 2" in steps.prefetcher.stats().path_reason


def pace_sees_sending(steps: Steps, seconds: float) -> None:
    """Sending a batch takes so long by the clock."""
    transfer = type(steps._shared.lease_transfer())
    send = transfer.send

    def slow(self: Any, *args: Any, **options: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            steps.now += seconds
        return send(self, *args, **options)

    def slow_short(send: Callable[..., Any], *args: Any) -> Any:
        steps.now += seconds
        return send(*args)

    steps._shared.lease_transfer = lease_with(steps._shared.lease_transfer, slow, slow_short)  # type: ignore[method-assign]


def lease_with(lease: Callable[[], Any], send: Callable[..., Any], send_short: Callable[..., Any]) -> Callable[[], Any]:
    def leased() -> Any:
        transfer = lease()
        short = transfer.short.send
        transfer.send = send.__get__(transfer)
        transfer.short.send = lambda *args: send_short(short, *args)
        return transfer

    return leased


# Retiring itself


def threaded_pass(loader: Any, depth: int = 2) -> tuple[Any, Any]:
    """An iterator whose producer has just started its thread, and the producer."""
    prefetcher = GPUPrefetcher(loader, SimulatedDevice(), depth=depth)
    iterator: Any = iter(prefetcher)
    for _ in range(8):
        next(iterator)
    producer = iterator._producer
    with producer._inside:
        assert producer._threaded or producer._start("a test")
    return iterator, producer


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_c8_the_caller_finds_all_credits_when_the_thread_has_retired(depth: int) -> None:
    inside, leave, rows = held_up_at(8, 40)
    iterator, producer = threaded_pass(rows, depth)
    assert inside.wait(TIMEOUT)  # everything before is taken: the other credits are there for the thread
    retiring = Thread(producer._retire_thread)
    while not producer._is_retiring:
        time.sleep(0.001)
    leave.set()  # it takes one of them before it sees that it is to end
    assert retiring.result()
    left = [producer._credits.get() for _ in range(producer._credits.qsize())]
    left = [credit for credit in left if credit is not fetching.WAITING]
    assert len(left) == depth - 1  # the batch that it was at has the last one
    for credit in left:
        producer._credits.put(credit)
    values = []
    for batch in iterator:
        iterator._device.synchronize()
        values.append(float(batch[0]))
    assert values == list(range(9, 41))


def test_c8_nothing_is_lost_of_what_it_had_fetched() -> None:
    fetched = []

    def rows() -> Iterator[torch.Tensor]:
        for index in range(40):
            fetched.append(index)
            yield filled(index)

    iterator, producer = threaded_pass(rows(), 4)
    assert producer._retire_thread()
    kept = list(iterator)
    iterator._device.synchronize()
    assert [float(batch[0]) for batch in kept] == list(range(9, 41))


def test_c1_a_thread_that_somebody_waits_for_stays() -> None:
    inside, leave, rows = held_up_at(8, 20)
    iterator, producer = threaded_pass(rows)
    assert inside.wait(TIMEOUT)
    others = [Thread(lambda: next(iterator)) for _ in range(2)]
    while len(producer._consumers_waiting) < 2:
        time.sleep(0.001)
    producer._is_retiring = True
    leave.set()
    for other in others:
        other.result()
    assert producer.is_threaded
    assert len(list(iterator)) == 10


def test_a_thread_that_is_held_up_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_RETIRE_SECONDS", 0.05)
    inside, leave, rows = held_up_at(9, 20)
    iterator, producer = threaded_pass(rows)
    assert inside.wait(TIMEOUT)
    assert not producer._retire_thread()
    leave.set()
    assert len(list(iterator)) == 12


def test_an_error_of_the_loader_while_the_thread_is_to_retire() -> None:
    def rows() -> Iterator[torch.Tensor]:
        for index in range(9):
            yield filled(index)
        raise ValueError("batch 9")

    iterator, producer = threaded_pass(rows())
    producer._retire_thread()
    next(iterator)
    with pytest.raises(ValueError, match="batch 9"):
        next(iterator)


def test_c1_a_consumer_that_looks_while_the_thread_retires() -> None:
    iterator, producer = threaded_pass([filled(index) for index in range(30)], 1)
    next(iterator)
    while producer._ready.empty():
        time.sleep(0.001)
    producer._ready.poll()  # another consumer is just taking it
    thread = producer._thread
    alive, first = thread.is_alive, [True]

    def is_alive() -> bool:
        if first:
            first.clear()
            Thread(producer._retire_thread).result()
        return bool(alive())

    thread.is_alive = is_alive
    producer._credits.put(None)  # of the one that was taken
    assert next(iterator) is not None


def test_c1_c7_the_end_does_not_overtake_what_the_thread_has_put() -> None:
    """A consumer waits for its turn while another one starts the thread, which then comes to the end."""

    def rows() -> Iterator[torch.Tensor]:
        for index in range(9):
            yield filled(index)
        raise KeyError("row")

    iterator, producer = threaded_pass(rows(), 4)
    producer._thread.join(TIMEOUT)  # it has put batch 8 and the error
    assert producer._ended
    assert producer._take_here(iterator._device.current_stream()) is None
    next(iterator)
    with pytest.raises(KeyError, match="row"):
        next(iterator)


def test_windows_of_the_trial() -> None:
    trial, now = ThreadTrial(has_workers=False), 0.0
    for _ in range(30):
        now += 1.0
        trial.without_thread(now)
    assert trial.usual_seconds == 1.0
    trial.begin()
    answers = []
    for _ in range(60):
        now += 0.5
        answers.append(trial.with_thread(now))
        if answers[-1] is not None:
            break
    assert answers[-1] is True
    assert trial.thread_seconds == 0.5
