"""Tiny batches the plain loop's way (contract 16): when it is chosen, and that it keeps the other contracts."""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from prefetchpipe import GPUPrefetcher
from prefetchpipe.errors import IteratorClosedError
from prefetchpipe.pipeline.plainway import PlainWay
from prefetchpipe.testing import SimulatedDevice
from tests.support import TIMEOUT, Readings, Thread, constants, held_up_at

TINY = 64


@pytest.fixture
def device() -> SimulatedDevice:
    device = SimulatedDevice(bandwidth=1e6)
    device.copies_plainly = True
    return device


def value(device: SimulatedDevice, batch: torch.Tensor) -> float:
    device.synchronize()
    return float(batch[0])


def filled(index: int) -> torch.Tensor:
    return torch.full((TINY,), float(index + 1))


def by_clock(
    device: SimulatedDevice, loader: Any, usual: float, plain: Callable[[int], float]
) -> tuple[GPUPrefetcher, list[bool], list[Any]]:
    """A prefetcher, which of its batches came the plain way, and the batches.

    The loop takes so many seconds a step by the prefetcher's clock: ``usual``, or ``plain(number)``.
    """
    prefetcher = GPUPrefetcher(loader, device)
    now, before = 0.0, 0
    counters = prefetcher._shared.counters
    counters.clock = lambda: now
    ways: list[bool] = []
    batches = []
    for number, batch in enumerate(prefetcher):
        ways.append(counters.plain_bytes > before)
        before = counters.plain_bytes
        batches.append(batch)
        now += plain(number) if ways[-1] else usual
    device.synchronize()
    return prefetcher, ways, batches


def always(device: SimulatedDevice, loader: Any) -> GPUPrefetcher:
    """One for which an earlier pass has found that the plain way pays."""
    prefetcher = GPUPrefetcher(loader, device)
    prefetcher._shared.plain = PlainWay(prefetcher._shared.counters)
    prefetcher._shared.plain.choose("a test")
    prefetcher._shared.counters.clock = lambda: 0.0  # nothing takes long
    return prefetcher


def test_the_quicker_way_stays(device: SimulatedDevice) -> None:
    loader = [filled(index) for index in range(200)]
    prefetcher, ways, batches = by_clock(device, loader, 2e-4, lambda _: 1e-4)
    assert [float(batch[0]) for batch in batches] == list(range(1, 201))
    assert ways[-100:] == [True] * 100
    stats = prefetcher.stats()
    assert stats.path == "plain"
    # A window's time begins with the loop's work on the batch before it.
    assert "106 us a step, through pinned memory 194 us" in stats.path_reason
    assert stats.plain_bytes == sum(ways) * TINY * 4
    for _ in itertools.islice(prefetcher, 20):  # a later pass knows
        pass
    assert prefetcher.stats().since(stats).plain_bytes == 14 * TINY * 4


@pytest.mark.parametrize(
    "leaf",
    [
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
        torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.quint8),
        torch.ones(3, 0),
    ],
    ids=["conjugate", "negative", "quantized", "empty"],
)
def test_c12_what_is_not_just_bytes(device: SimulatedDevice, leaf: torch.Tensor) -> None:
    prefetcher = always(device, [[leaf, filled(index)] for index in range(20)])
    for index, (arrived, other) in enumerate(prefetcher):
        device.synchronize()
        assert torch.equal(arrived.dequantize(), leaf.dequantize()) if leaf.is_quantized else torch.equal(arrived, leaf)
        assert (arrived.dtype, arrived.stride()) == (leaf.dtype, leaf.clone().stride())  # dense, as by .to()
        assert (arrived.is_conj(), arrived.is_neg()) == (leaf.is_conj(), leaf.is_neg())
        assert value(device, other) == index + 1
    assert prefetcher.stats().path == "plain"


def test_the_usual_way_stays_where_it_is_as_quick(device: SimulatedDevice) -> None:
    prefetcher, ways, _ = by_clock(device, [filled(0)] * 200, 1e-4, lambda _: 1e-4)
    assert sum(ways) == 32
    assert prefetcher.stats().path != "plain"


def test_one_long_pause_changes_nothing(device: SimulatedDevice) -> None:
    _, ways, _ = by_clock(device, [filled(0)] * 400, 2e-4, lambda number: 5e-2 if number == 200 else 1e-4)
    assert ways[-100:] == [True] * 100


def test_short_passes_choose_together(device: SimulatedDevice) -> None:
    prefetcher = GPUPrefetcher([filled(0)] * 30, device)
    counters, now = prefetcher._shared.counters, 0.0
    counters.clock = lambda: now
    before = 0
    for _ in range(8):
        for _batch in prefetcher:
            now += 1e-4 if counters.plain_bytes > before else 2e-4
            before = counters.plain_bytes
    assert prefetcher.stats().path == "plain"


def test_eight_passes_too_short_for_a_window_are_enough(device: SimulatedDevice) -> None:
    prefetcher = GPUPrefetcher([filled(0)] * 4, device)
    waits = []
    for _ in range(10):
        iterator: Any = iter(prefetcher)
        waits.append(iterator._producer.plain is not None)
        assert len(list(iterator)) == 4
    assert waits == [True] * 8 + [False] * 2


def test_it_is_left_when_steps_come_to_take_longer(device: SimulatedDevice) -> None:
    prefetcher, ways, _ = by_clock(device, [filled(0)] * 500, 2e-4, lambda number: 1e-4 if number < 150 else 1e-3)
    assert ways[-100:] == [False] * 100
    assert prefetcher.stats().path != "plain"


@pytest.mark.parametrize("options", [{"transform": lambda batch: batch}, {"checked": True}, {"fetch": "caller"}])
def test_not_tried_where_more_is_wanted(device: SimulatedDevice, options: dict[str, Any]) -> None:
    prefetcher = GPUPrefetcher([filled(0)] * 100, device, **options)
    for _ in prefetcher:
        pass
    assert prefetcher.stats().plain_bytes == 0


def test_large_batches_are_not_tried(device: SimulatedDevice) -> None:
    prefetcher = GPUPrefetcher([torch.zeros(2 << 20)] * 12, device)
    for _ in prefetcher:
        pass
    assert prefetcher.stats().plain_bytes == 0


KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda t: t,
    "tuple": lambda t: (t, 3, t * 2),
    "list": lambda t: [t, "name", None],
    "dict": lambda t: {"x": t.view(8, 8).t(), "y": True},
    "empty": lambda t: (torch.empty(0), t),
    "no dimension": lambda t: {"x": t, "n": t[0].clone()},
}


@pytest.mark.parametrize("kind", KINDS)
def test_c1_c12_batches_are_those_of_the_plain_loop(device: SimulatedDevice, kind: str) -> None:
    batches = [KINDS[kind](filled(index)) for index in range(40)]
    prefetcher = always(device, batches)
    got = list(prefetcher)
    device.synchronize()
    assert prefetcher.stats().plain_bytes > 0
    for one, other in zip(got, batches, strict=True):
        assert type(one) is type(other)
        mine = [one] if isinstance(one, torch.Tensor) else list(one.values() if isinstance(one, dict) else one)
        own = [other] if isinstance(other, torch.Tensor) else list(other.values() if isinstance(other, dict) else other)
        for a, b in zip(mine, own, strict=True):
            if isinstance(b, torch.Tensor):
                assert a.stride() == b.stride()
                assert a.dtype is b.dtype
                assert torch.equal(a, b)
            else:
                assert a is b
        if isinstance(other, dict):
            assert list(one) == list(other)


def test_c12_leaves_that_share_memory_go_on_sharing_it(device: SimulatedDevice) -> None:
    loader = [(batch, batch[2:]) for batch in map(filled, range(20))]
    kept = list(always(device, loader))
    device.synchronize()
    assert all(one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() for one, other in kept)


def test_c2_c4_each_batch_has_memory_of_its_own(device: SimulatedDevice) -> None:
    readings = Readings(device, 60)
    for index, batch in enumerate(always(device, (filled(index) for index in range(60)))):
        device.launch(lambda: None, seconds=1e-3)
        readings.queue(index, batch)
        del batch
    assert readings.values() == constants(range(1, 61))


@pytest.mark.parametrize("is_pinned", [False, True])
def test_c5_the_loader_may_use_its_memory_again(device: SimulatedDevice, is_pinned: bool) -> None:
    buffer = torch.empty(TINY)
    if is_pinned:
        buffer = device.pin_memory(buffer)

    def rows() -> Iterator[torch.Tensor]:
        for index in range(60):
            yield buffer.fill_(index + 1)
        buffer.fill_(-1)

    kept = list(always(device, rows()))
    device.synchronize()
    assert [float(batch.max()) for batch in kept] == list(range(1, 61))


def test_c7_an_error_comes_at_its_place_and_ends_the_pass(device: SimulatedDevice) -> None:
    def rows() -> Iterator[torch.Tensor]:
        for index in range(30):
            yield filled(index)
        raise ValueError("batch 30")

    iterator = iter(always(device, rows()))
    assert [value(device, next(iterator)) for _ in range(30)] == list(range(1, 31))
    with pytest.raises(ValueError, match="batch 30") as caught:
        next(iterator)
    assert [entry.name for entry in caught.traceback][-1] == "rows"
    with pytest.raises(StopIteration):
        next(iterator)


def test_c1_a_batch_of_another_kind_goes_the_usual_way_and_so_do_those_behind(device: SimulatedDevice) -> None:
    batches: list[Any] = [filled(index) for index in range(60)]
    batches[30] = {"deep": [filled(30)]}
    prefetcher = always(device, batches)
    got = list(prefetcher)
    device.synchronize()
    assert float(got[30]["deep"][0][0]) == 31
    assert [float(batch[0]) for number, batch in enumerate(got) if number != 30] == [
        float(number + 1) for number in range(60) if number != 30
    ]
    assert prefetcher.stats().plain_bytes <= 30 * TINY * 4
    assert prefetcher.stats().batches == 60


def test_c8_nothing_may_be_fetched_further_ahead_afterwards(device: SimulatedDevice) -> None:
    """Behind a batch that could not go the plain way."""
    iterator: Any = iter(always(device, [[[filled(index)]] if index == 30 else filled(index) for index in range(60)]))
    left = [iterator._producer._credits.qsize() for _ in itertools.islice(iterator, 31)]
    assert left == [2] * 31


def test_c9_a_pass_that_is_left_leaves_the_source_where_it_is(device: SimulatedDevice) -> None:
    source = iter(range(60))
    rows = (filled(index) for index in source)
    prefetcher = always(device, rows)
    assert [value(device, batch) for batch in itertools.islice(prefetcher, 20)] == list(range(1, 21))
    assert next(source) == 20
    assert [value(device, batch) for batch in prefetcher] == list(range(22, 61))


def test_c3_c4_a_batch_of_a_pass_that_was_left_goes_to_another_stream(device: SimulatedDevice) -> None:
    inside, leave, rows = held_up_at(30, 60)
    prefetcher = always(device, rows)
    iterator: Any = iter(prefetcher)

    def first() -> None:
        with contextlib.suppress(IteratorClosedError):
            for _ in iterator:
                pass

    thread = Thread(first)
    assert inside.wait(TIMEOUT)
    iterator.close()
    leave.set()
    thread.result()
    read = []
    with device.use_stream(device.new_stream()):
        batch = next(iter(prefetcher))
        device.launch(lambda: None, seconds=1e-2)
        device.launch(lambda view: read.append(float(view.max())), batch)
        del batch
    other = device.alloc(4 * TINY)  # of the stream that the batch was made on
    device.launch(lambda view: view.fill_(7), other)
    device.synchronize()
    assert read == [31.0]


@pytest.mark.parametrize("error", [False, True])
def test_c9_nothing_waits_for_the_collector(device: SimulatedDevice, error: bool) -> None:
    """Neither for what chooses the way, nor for an error of a transform that nobody took."""

    class Batches(list[torch.Tensor]):
        pass

    def transform(batch: torch.Tensor) -> torch.Tensor:
        if float(batch[0]) == 3:
            raise ValueError("batch 3")
        return batch

    loader = Batches(filled(index) for index in range(9))
    alive = weakref.ref(loader)
    gc.collect()
    gc.disable()
    try:
        options: dict[str, Any] = {"transform": transform, "fetch": "thread"} if error else {}
        prefetcher = GPUPrefetcher(loader, device, **options)
        iterator: Any = iter(prefetcher)
        next(iterator)
        while error and not iterator._producer._ended:
            time.sleep(0.001)
        del iterator, prefetcher, loader
        assert alive() is None
    finally:
        gc.enable()


def test_c9_closed_by_the_loader_itself(device: SimulatedDevice) -> None:
    def rows() -> Iterator[torch.Tensor]:
        for index in range(60):
            if index == 30:
                prefetcher.close()
            yield filled(index)

    prefetcher = always(device, rows())
    iterator = iter(prefetcher)
    for _ in range(30):
        next(iterator)
    with pytest.raises(IteratorClosedError):
        next(iterator)


def test_the_loader_advances_the_iterator_that_waits_for_it(device: SimulatedDevice) -> None:
    def rows() -> Iterator[torch.Tensor]:
        for index in range(60):
            if index == 30:
                next(iterator)
            yield filled(index)

    iterator = iter(always(device, rows()))
    with pytest.raises(ValueError, match="the loader advances"):
        for _ in iterator:
            pass


def test_c1_two_threads_at_one_iterator(device: SimulatedDevice) -> None:
    inside, leave, rows = held_up_at(30, 60)
    iterator = iter(always(device, rows))
    values = [value(device, next(iterator)) for _ in range(30)]
    other: list[float] = []
    first = Thread(lambda: other.append(value(device, next(iterator))))
    assert inside.wait(TIMEOUT)
    second = Thread(lambda: other.append(value(device, next(iterator))))
    leave.set()
    first.join()
    second.join()
    rest = [value(device, batch) for batch in iterator]
    assert values + sorted(other) + rest == list(range(1, 61))
