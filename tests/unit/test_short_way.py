"""The short way of flat batches of few plain tensors (contract 16), and that it keeps the other contracts."""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from prefetchpipe import GPUPrefetcher
from prefetchpipe.batch.layout import OWN_BLOCK_BYTES
from prefetchpipe.errors import IteratorClosedError
from prefetchpipe.pipeline import shortway
from prefetchpipe.pipeline.shortway import NOT_SHORT, SMALL_BYTES, ShortSender
from prefetchpipe.testing import SimulatedDevice
from tests.support import TIMEOUT, Readings, Thread, constants, held_up_at

TINY = 64
LARGER = SMALL_BYTES // 4 + 16
USUAL = 6
"""Batches that go the usual way first."""


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice(bandwidth=1e6)


@pytest.fixture(autouse=True)
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each batch that went the short way."""
    found: list[int] = []
    send = ShortSender.send

    def noted(self: ShortSender, batch: Any, nbytes: int, *args: Any) -> Any:
        result = send(self, batch, nbytes, *args)
        if result is not NOT_SHORT:
            found.append(nbytes)
        return result

    monkeypatch.setattr(ShortSender, "send", noted)
    return found


@pytest.fixture(params=[TINY, LARGER], ids=["small", "larger"])
def size(request: pytest.FixtureRequest) -> int:
    """Values of a batch: copied on the consumer's stream, or on the copy stream."""
    return int(request.param)


def value(device: SimulatedDevice, batch: torch.Tensor) -> float:
    device.synchronize()
    return float(batch[0])


def filled(index: int, size: int = TINY) -> torch.Tensor:
    return torch.full((size,), float(index + 1))


def always(device: SimulatedDevice, loader: Any, **options: Any) -> GPUPrefetcher:
    """One of which no thread is started: nothing takes long by its clock."""
    prefetcher = GPUPrefetcher(loader, device, **options)
    prefetcher._shared.counters.clock = lambda: 0.0
    return prefetcher


@pytest.mark.usefixtures("way")
def test_c12_leaves_of_one_slab_are_no_views_of_it(device: SimulatedDevice, sent: list[int]) -> None:
    """A change of one is not one of its neighbours, for autograd."""
    batches = [(filled(index, LARGER), filled(index + 1, LARGER)) for index in range(20)]
    for first, second in always(device, batches):
        device.synchronize()
        assert first._base is None
        first.add_(1)
        assert (first._version, second._version) == (1, 0)
        assert torch.equal(first, second)
    assert len(sent) == 14


def test_it_begins_behind_the_batches_that_show_what_the_loader_does(
    device: SimulatedDevice, sent: list[int], size: int
) -> None:
    prefetcher = always(device, [filled(index, size) for index in range(40)])
    got = list(prefetcher)
    assert [value(device, batch) for batch in got] == list(range(1, 41))
    assert sent == [size * 4] * (40 - USUAL)
    stats = prefetcher.stats()
    assert (stats.path, stats.batches, stats.passes) == ("caller", 40, 1)
    assert stats.copied_bytes == stats.staged_bytes == 40 * size * 4
    assert stats.steady.sent_batches == stats.steady.taken_batches == 37


@pytest.mark.parametrize(
    "options",
    [{"transform": lambda batch: batch}, {"checked": True}, {"static": True}, {"fetch": "thread"}],
    ids=["transform", "checked", "static", "thread"],
)
def test_not_where_more_is_wanted(device: SimulatedDevice, sent: list[int], options: dict[str, Any]) -> None:
    for _ in always(device, [filled(0)] * 20, **options):
        pass
    assert not sent


@pytest.mark.parametrize(
    "leaf",
    [
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
        torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.quint8),
        torch.ones(3, 0),
        torch.ones(3, 4).t(),
        torch.ones(2, requires_grad=True),
        np.ones(3),
        [torch.ones(2)],
        torch.ones(2).to_sparse(),
    ],
    ids=["conjugate", "negative", "quantized", "empty", "strided", "grad", "array", "nested", "sparse"],
)
def test_c12_what_is_not_just_bytes_goes_the_usual_way(device: SimulatedDevice, sent: list[int], leaf: Any) -> None:
    batches = [[leaf, filled(index)] for index in range(20)]
    for index, (arrived, other) in enumerate(always(device, batches)):
        device.synchronize()
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            assert torch.equal(*(t.dequantize() if t.is_quantized else t for t in (arrived, leaf)))
            assert (arrived.is_conj(), arrived.is_neg()) == (leaf.is_conj(), leaf.is_neg())
        assert value(device, other) == index + 1
    assert not sent


@pytest.mark.parametrize("fetch", ["auto", "caller"])
def test_c16_pinned_batches_are_copied_from_where_they_are(
    device: SimulatedDevice, sent: list[int], fetch: str
) -> None:
    pinned = [device.pin_memory(filled(index)) for index in range(30)]
    prefetcher = always(device, pinned, fetch=fetch)
    assert [value(device, batch) for batch in prefetcher] == list(range(1, 31))
    assert not sent
    assert prefetcher.stats().direct_bytes == 30 * TINY * 4


def test_c15_page_locked_memory_is_refused(sent: list[int], size: int) -> None:
    device = SimulatedDevice(pinned_limit=size * 4 - 1)
    with pytest.warns(match="page-locked memory was refused"):
        got = list(always(device, [filled(index, size) for index in range(20)]))
    assert [value(device, batch) for batch in got] == list(range(1, 21))
    assert not sent


def test_c15_a_third_slot_is_refused_without_a_word(sent: list[int]) -> None:
    device = SimulatedDevice(bandwidth=1e6)
    limit = 2 * LARGER * 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prefetcher = always(device, [filled(index, LARGER) for index in range(20)], max_pinned_bytes=limit)
        got = list(prefetcher)
    assert [value(device, batch) for batch in got] == list(range(1, 21))
    assert prefetcher.stats().pinned_bytes == limit
    assert len(sent) == 14


def test_c14_slots_are_added_while_a_ring_is_new_only(size: int) -> None:
    """A device that falls behind later makes the loop wait, and takes no more page-locked memory."""
    device = SimulatedDevice()
    prefetcher = always(device, [filled(0, size) for _ in range(200)])
    held = []
    for index, _ in enumerate(prefetcher):
        device.synchronize() if index < 100 else device.launch(lambda: None, seconds=1.0)
        held.append(prefetcher.stats().pinned_allocations)
    assert held[-1] == held[100]


def test_c12_leaves_in_one_slot_begin_where_a_device_likes_it(device: SimulatedDevice, sent: list[int]) -> None:
    batches = [(torch.tensor(index), filled(index, 3), filled(index, 5).double()) for index in range(20)]
    for index, (number, three, five) in enumerate(always(device, batches)):
        device.synchronize()
        assert (int(number), three.tolist(), five.tolist()) == (index, [index + 1.0] * 3, [index + 1.0] * 5)
    assert sent == [64 + 64 + 40] * 14


def test_c12_nine_leaves_are_too_many(device: SimulatedDevice, sent: list[int]) -> None:
    kept = list(always(device, [[filled(index)] * 1 + [filled(k) for k in range(8)] for index in range(12)]))
    device.synchronize()
    assert [float(batch[0][0]) for batch in kept] == list(range(1, 13))
    assert not sent


def test_a_large_batch_goes_the_usual_way(
    device: SimulatedDevice, sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shortway, "LARGE_BYTES", 1000)
    assert len(list(always(device, [filled(0, 251)] * 12))) == 12
    assert not sent


def test_c17_the_modes_are_those_of_iter(device: SimulatedDevice) -> None:
    seen = []

    def rows() -> Iterator[torch.Tensor]:
        for index in range(20):
            seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
            yield filled(index)

    iterator = iter(always(device, rows()))
    with torch.inference_mode():
        got = list(iterator)
    assert set(seen) == {(True, False)}
    assert not any(batch.is_inference() for batch in got)
    with torch.inference_mode():
        iterator = iter(always(device, rows()))
    got = list(iterator)
    assert set(seen[20:]) == {(False, True)}
    assert all(batch.is_inference() for batch in got)
    device.synchronize()
    assert [float(batch[0]) for batch in got] == list(range(1, 21))


def test_a_thread_is_started_where_the_loader_becomes_slow(device: SimulatedDevice, sent: list[int]) -> None:
    now = 0.0

    def rows() -> Iterator[torch.Tensor]:
        nonlocal now
        for index in range(100):
            now += 0.0 if index < 20 else 0.01
            yield filled(index)

    prefetcher = GPUPrefetcher(rows(), device)
    prefetcher._shared.counters.clock = lambda: now
    assert [value(device, batch) for batch in prefetcher] == list(range(1, 101))
    assert prefetcher.stats().path == "thread"
    assert 10 < len(sent) < 60


KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda t: t,
    "tuple": lambda t: (t, 3, t * 2),
    "list": lambda t: [t, "name", None],
    "dict": lambda t: {"x": t.view(8, -1), "y": True},
    "no dimension": lambda t: {"x": t, "n": t[0].clone()},
    "one large": lambda t: (t, t.repeat(OWN_BLOCK_BYTES // t.nbytes + 1), t + 1),
    "dtypes": lambda t: (t > 0, t.to(torch.int64), t[:7].to(torch.uint8), t.to(torch.complex64), t),
}


@pytest.mark.parametrize("kind", KINDS)
def test_c1_c12_batches_are_those_of_the_plain_loop(
    device: SimulatedDevice, sent: list[int], kind: str, size: int
) -> None:
    batches = [KINDS[kind](filled(index, size)) for index in range(20)]
    got = list(always(device, batches))
    device.synchronize()
    assert len(sent) == 14
    for one, other in zip(got, batches, strict=True):
        assert type(one) is type(other)
        mine = [one] if isinstance(one, torch.Tensor) else list(one.values() if isinstance(one, dict) else one)
        own = [other] if isinstance(other, torch.Tensor) else list(other.values() if isinstance(other, dict) else other)
        for a, b in zip(mine, own, strict=True):
            if isinstance(b, torch.Tensor):
                assert (a.stride(), a.dtype, a.shape) == (b.stride(), b.dtype, b.shape)
                assert torch.equal(a, b)
            else:
                assert a is b
        if isinstance(other, dict):
            assert list(one) == list(other)


def test_c12_leaves_that_share_memory_go_on_sharing_it(device: SimulatedDevice, sent: list[int]) -> None:
    loader = [(batch, batch[2:]) for batch in map(filled, range(20))]
    kept = list(always(device, loader))
    device.synchronize()
    assert all(one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() for one, other in kept)
    assert not sent


@pytest.mark.parametrize("seconds", [1e-3, 1e-2])
def test_c2_c4_c6_each_batch_has_memory_of_its_own(size: int, seconds: float) -> None:
    """Behind a slow device: it reads late, memory is handed out again at once, and a copy takes a millisecond."""
    device = SimulatedDevice(bandwidth=size * 4e3)
    readings = Readings(device, 60)
    for index, batch in enumerate(always(device, (filled(index, size) for index in range(60)))):
        device.launch(lambda: None, seconds=seconds)
        readings.queue(index, batch)
        del batch
    assert readings.values() == constants(range(1, 61))


def test_c3_the_consumers_stream_waits_for_the_copy(size: int) -> None:
    device = SimulatedDevice(bandwidth=size * 40)
    readings = Readings(device, 20)
    for index, batch in enumerate(always(device, [filled(index, size) for index in range(20)])):
        readings.queue(index, batch)
    assert readings.values() == constants(range(1, 21))


@pytest.mark.parametrize("is_pinned", [False, True])
def test_c5_the_loader_may_use_its_memory_again(device: SimulatedDevice, is_pinned: bool, size: int) -> None:
    buffer = torch.empty(size)
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


def test_c1_a_batch_of_another_kind_goes_the_usual_way_and_so_do_those_behind(
    device: SimulatedDevice, sent: list[int], size: int
) -> None:
    batches: list[Any] = [filled(index, size) for index in range(60)]
    batches[30] = {"deep": [filled(30)]}
    prefetcher = always(device, batches)
    got = list(prefetcher)
    device.synchronize()
    assert float(got[30]["deep"][0][0]) == 31
    assert [float(batch[0]) for number, batch in enumerate(got) if number != 30] == [
        float(number + 1) for number in range(60) if number != 30
    ]
    assert len(sent) == 24
    assert prefetcher.stats().batches == 60


def test_c8_nothing_may_be_fetched_further_ahead_afterwards(device: SimulatedDevice, size: int) -> None:
    """Behind a batch that could not go the short way."""
    rows = ([[filled(index, size)]] if index == 30 else filled(index, size) for index in range(60))
    iterator: Any = iter(always(device, rows, fetch="caller"))
    left = [iterator._producer._credits.qsize() for _ in itertools.islice(iterator, 50)]
    assert left == [2] * 50


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
    """Neither for what the short way holds, nor for an error of a transform that nobody took."""

    class Batches(list[torch.Tensor]):
        pass

    def transform(batch: torch.Tensor) -> torch.Tensor:
        if float(batch[0]) == 3:
            raise ValueError("batch 3")
        return batch

    loader = Batches(filled(index) for index in range(12))
    alive = weakref.ref(loader)
    gc.collect()
    gc.disable()
    try:
        options: dict[str, Any] = {"transform": transform, "fetch": "thread"} if error else {}
        prefetcher = GPUPrefetcher(loader, device, **options)
        iterator: Any = iter(prefetcher)
        for _ in range(1 if error else 9):
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


class RaisesStop:
    """Its own ``.to`` is called by the usual way."""

    def to(self, *_: Any, **__: Any) -> Any:
        raise StopIteration("mine")


@pytest.mark.parametrize("fetch", ["thread", "caller", "auto"])
def test_c1_c7_stop_iteration_from_sending_is_not_the_end_of_the_loader(fetch: Any) -> None:
    batches: list[Any] = [filled(index) for index in range(12)]
    batches[8] = RaisesStop()
    got = []
    with pytest.raises(RuntimeError, match="StopIteration was raised outside of the loader"):
        got.extend(GPUPrefetcher(batches, SimulatedDevice(), fetch=fetch))


@pytest.mark.parametrize("fetch", ["thread", "caller"])
def test_c12_a_tensor_without_memory_goes_the_usual_way(fetch: Any) -> None:
    """Gradients of forward-mode differentiation are such."""
    batches = [filled(index) for index in range(12)]
    batches[8] = torch._efficientzerotensor((3,))
    device = SimulatedDevice()
    got = list(GPUPrefetcher(batches, device, fetch=fetch))
    device.synchronize()
    assert got[8].tolist() == [0.0] * 3


def test_c16_small_batches_leave_the_consumers_stream_to_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the loop waits for the device: in the order of the loop, from the small way and back to it."""
    device = SimulatedDevice(bandwidth=1e9)
    over: list[int] = []
    copied = ShortSender._copied

    def noted(self: ShortSender, *args: Any) -> Any:
        over.append(len(seen))
        return copied(self, *args)

    monkeypatch.setattr(ShortSender, "_copied", noted)
    prefetcher = GPUPrefetcher([filled(index) for index in range(300)], device, fetch="caller")
    prefetcher._shared.counters.clock = lambda: device.now
    readings, seen = Readings(device, 300), []
    for index, batch in enumerate(prefetcher):
        readings.queue(index, batch, seconds=1e-3 if 50 <= index < 200 else 0.0)
        seen.append(index)
        del batch
    assert readings.values() == constants(range(1, 301))
    assert 50 < min(over) < 120
    assert over == list(range(min(over), max(over) + 1))
    assert 200 <= max(over) < 230
