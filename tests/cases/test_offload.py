"""Batches back on the host: contracts C1-C9, C12, C14, C15 in the other direction."""

from __future__ import annotations

import collections
import copy
import functools
import gc
import itertools
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from prefetchpipe import GPUPrefetcher, HostPrefetcher
from prefetchpipe.errors import IteratorClosedError, PrefetchWarning
from prefetchpipe.memory.pinned import PageableBlock
from prefetchpipe.testing import SimulatedDevice
from tests.support import (
    TIMEOUT,
    Source,
    Surroundings,
    Thread,
    frame_names,
    is_cuda,
    is_simulated,
    kernel,
    new_stream,
    settle,
    use_stream,
)

pytestmark = pytest.mark.timeout(90)

LARGE = 1 << 18
"""Elements of float32 that fill a mebibyte: from here on a tensor is handed over where it landed."""


def put(device: Any, values: torch.Tensor, seconds: float = 0.0) -> torch.Tensor:
    """A tensor on the device that gets its values late, by a kernel on the current stream."""
    if device == "cpu":
        return values.clone(memory_format=torch.preserve_format)
    if is_simulated(device):
        made = device.empty(values.shape, values.stride(), values.dtype)
    else:
        made = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device=device)
        values = values.to(device)
    kernel(device, lambda to: to.copy_(values), made, seconds=seconds)
    return made


def filled(device: Any, value: float, size: int = 16, seconds: float = 0.0) -> torch.Tensor:
    return put(device, torch.full((size,), float(value)), seconds)


def outputs(device: Any, count: int, size: int = 16, seconds: float = 0.001) -> Iterator[torch.Tensor]:
    for index in range(count):
        yield filled(device, index + 1, size, seconds)


def lows_and_highs(batches: Any) -> list[tuple[float, float]]:
    return [(float(batch.min()), float(batch.max())) for batch in batches]


def one_to(count: int) -> list[tuple[float, float]]:
    return [(float(index), float(index)) for index in range(1, count + 1)]


# The same batches (C1)


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
def test_c1_all_batches_in_order(device: Any, count: int, depth: int) -> None:
    got = list(HostPrefetcher(outputs(device, count), depth, device=device))
    assert all(batch.is_cpu for batch in got)
    assert lows_and_highs(got) == one_to(count)


def test_c1_values_that_are_no_tensors_pass_through(device: Any) -> None:
    batches = [1, None, 0, [], {}, "text", {"id": 3}]
    assert list(HostPrefetcher(batches, device=device)) == batches


def test_c1_any_number_of_passes(device: Any) -> None:
    prefetcher = HostPrefetcher([filled(device, 1), filled(device, 2)], device=device)
    assert len(prefetcher) == 2
    assert [lows_and_highs(prefetcher) for _ in range(3)] == [one_to(2)] * 3
    first, second = iter(prefetcher), iter(prefetcher)
    assert [float(next(it)[0]) for it in (first, second, second, first)] == [1, 1, 2, 2]


def test_c1_a_one_shot_source_goes_on_where_a_pass_was_left(device: Any) -> None:
    prefetcher = HostPrefetcher(outputs(device, 7), device=device)
    assert float(next(iter(prefetcher))[0]) == 1
    for batch in prefetcher:
        assert float(batch[0]) == 2
        break
    assert [float(batch[0]) for batch in prefetcher] == [3, 4, 5, 6, 7]
    assert list(prefetcher) == []


def test_c1_a_source_that_rewinds_itself_begins_again(device: Any) -> None:
    class Rewinding:
        def __iter__(self) -> Any:
            self.at = 0
            return self

        def __next__(self) -> torch.Tensor:
            if self.at == 4:
                raise StopIteration
            self.at += 1
            return filled(device, self.at)

    prefetcher = HostPrefetcher(Rewinding(), device=device)
    next(iter(prefetcher))
    assert lows_and_highs(prefetcher) == one_to(4)
    assert lows_and_highs(prefetcher) == one_to(4)


# Owned by the consumer (C2)


@pytest.mark.parametrize("size", [16, pytest.param(LARGE, marks=pytest.mark.slow)], ids=["small", "large"])
def test_c2_batches_kept_for_ever_stay_right(device: Any, size: int) -> None:
    kept = list(HostPrefetcher(outputs(device, 8, size), device=device))
    assert lows_and_highs(kept) == one_to(8)
    assert len({batch.data_ptr() for batch in kept}) == 8


@pytest.mark.slow
def test_c2_a_slice_keeps_its_bytes(device: Any) -> None:
    kept = [batch[5:7] for batch in HostPrefetcher(outputs(device, 6, LARGE), device=device)]
    assert lows_and_highs(kept) == one_to(6)


@pytest.mark.slow
def test_c2_an_array_over_a_batch_keeps_its_bytes(device: Any) -> None:
    kept = [batch.numpy() for batch in HostPrefetcher(outputs(device, 6, LARGE), device=device)]
    assert lows_and_highs(kept) == one_to(6)


def test_c2_batches_can_be_written_to(device: Any) -> None:
    for batch in HostPrefetcher(({"x": y, "y": y[:4]} for y in outputs(device, 3)), device=device):
        batch["x"].add_(1)
        assert batch["x"][0] == batch["y"][0]


def test_c2_what_a_host_leaf_holds_is_copied(device: Any) -> None:
    """The source may fill it again."""

    def source() -> Iterator[dict[str, Any]]:
        tensor, array = torch.zeros(4), np.zeros(4)
        for index in range(6):
            tensor.fill_(index)
            array.fill(index)
            yield {"tensor": tensor, "array": array, "words": np.array(["a", "b"])}

    got = list(HostPrefetcher(source(), device=device))
    assert [float(batch["tensor"][3]) for batch in got] == list(range(6))
    assert [float(batch["array"][3]) for batch in got] == list(range(6))
    assert all(type(batch["array"]) is np.ndarray for batch in got)


@pytest.mark.parametrize("size", [16, pytest.param(LARGE, marks=pytest.mark.slow)], ids=["small", "large"])
def test_c2_borrowed_views_last_until_the_next(device: Any, size: int) -> None:
    prefetcher = HostPrefetcher(outputs(device, 9, size), device=device, borrow=True)
    pointers = set()
    for index, batch in enumerate(prefetcher):
        assert (float(batch.min()), float(batch.max())) == (index + 1, index + 1)
        pointers.add(batch.data_ptr())
    if device != "cpu":
        assert len(pointers) <= 4
        assert prefetcher.stats().copied_out_bytes == prefetcher.stats().lent_bytes == 0


@pytest.mark.parametrize("way", ["break", "end", "close"])
@pytest.mark.parametrize("size", [16, pytest.param(LARGE, marks=pytest.mark.slow)], ids=["small", "large"])
def test_c2_the_borrowed_batch_at_which_a_loop_is_left_stays(device: Any, way: str, size: int) -> None:
    class Again:
        def __iter__(self) -> Iterator[Any]:
            return iter(outputs(device, 4, size))

    prefetcher = HostPrefetcher(Again(), device=device, borrow=True)
    held = prefetcher._shared.memory
    kept = []
    for _ in range(6):
        batch = None
        for out in prefetcher:
            batch = out
            if way != "end":
                break
        kept.append(batch)
        if way == "close":
            prefetcher.close()
    expected = 4 if way == "end" else 1
    del prefetcher
    gc.collect()
    assert lows_and_highs(kept) == [(expected, expected)] * 6
    del batch, out
    kept.clear()
    assert held.held_bytes == 0


@pytest.mark.parametrize("count", [1, 2, 4])
def test_c2_the_borrowed_batch_before_an_error_stays(device: Any, count: int) -> None:
    class Again:
        def __iter__(self) -> Iterator[Any]:
            yield from outputs(device, count, 16)
            raise LookupError("after the last")

    prefetcher = HostPrefetcher(Again(), 2, device=device, borrow=True)
    held = prefetcher._shared.memory
    kept = []
    for _ in range(6):
        with pytest.raises(LookupError, match="after the last"):
            for out in prefetcher:
                batch = out
        kept.append(batch)
    assert lows_and_highs(kept) == [(count, count)] * 6
    del batch, out, prefetcher
    kept.clear()
    gc.collect()
    assert held.held_bytes == 0


# C3, C5: ordered by events; the source may free and overwrite


def test_c3_the_stream_may_change_at_every_batch(stream_device: Any) -> None:
    device = stream_device
    streams = [new_stream(device) for _ in range(3)]
    prefetcher = iter(HostPrefetcher(outputs(device, 8, seconds=0.01), device=device))
    got = []
    for index in range(8):
        with use_stream(device, streams[index % 3]):
            got.append(next(prefetcher))
    assert lows_and_highs(got) == one_to(8)


@pytest.mark.parametrize("size", [16, pytest.param(LARGE, marks=pytest.mark.slow)], ids=["small", "large"])
def test_c5_a_source_that_fills_one_buffer_again_and_again(device: Any, size: int) -> None:
    def source() -> Iterator[Any]:
        buffer = filled(device, 0, size)
        for index in range(8):
            kernel(device, lambda view, value=index + 1: view.fill_(value), buffer, seconds=0.0001)
            yield buffer

    assert lows_and_highs(list(HostPrefetcher(source(), device=device, depth=3))) == one_to(8)


@pytest.mark.slow
def test_c5_a_source_that_overwrites_on_its_way_back_in(device: Any) -> None:
    def source() -> Iterator[Any]:
        for index in range(8):
            made = filled(device, index + 1, LARGE)
            yield made
            kernel(device, lambda view: view.fill_(-1), made)

    assert lows_and_highs(HostPrefetcher(source(), device=device)) == one_to(8)


@pytest.mark.slow
def test_c5_both_directions_at_once(device: Any) -> None:
    def model(batch: torch.Tensor) -> torch.Tensor:
        if not is_simulated(device):
            return batch * 2
        out = device.empty(batch.shape, batch.stride(), batch.dtype)
        device.launch(lambda to, of: torch.mul(of, 2, out=to), out, batch, seconds=0.0005)
        return out

    loader = [torch.full((LARGE,), float(index)) for index in range(1, 7)]
    with GPUPrefetcher(loader, device) as there:
        back = HostPrefetcher((model(batch) for batch in there), device=device)
        assert lows_and_highs(back) == [(2.0 * i, 2.0 * i) for i in range(1, 7)]


# Errors and interrupts


class OddError(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(one, two)


@pytest.mark.parametrize("error", [KeyError("row 2"), OddError("a", "b"), SystemExit(3), GeneratorExit()])
def test_c7_an_error_comes_after_the_batches_before_it(device: Any, error: BaseException) -> None:
    class Failing:
        def __iter__(self) -> Any:
            def the_sources_own_frame() -> Iterator[Any]:
                yield filled(device, 1)
                yield filled(device, 2)
                raise error

            return the_sources_own_frame()

    prefetcher = HostPrefetcher(Failing(), device=device, depth=4)
    iterator = iter(prefetcher)
    assert lows_and_highs([next(iterator), next(iterator)]) == one_to(2)
    with pytest.raises(type(error)) as caught:
        next(iterator)
    assert caught.value is error
    assert "the_sources_own_frame" in frame_names(caught.tb)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(iterator)
    assert float(next(iter(prefetcher))[0]) == 1


def test_c7_an_error_of_iter(device: Any) -> None:
    class Broken:
        def __iter__(self) -> Any:
            raise ValueError("no iterator")

    with pytest.raises(ValueError, match="no iterator"):
        iter(HostPrefetcher(Broken(), device=device))


def test_c7_an_interrupt_is_raised_at_once_and_loses_nothing(device: Any) -> None:
    class Interrupted(Iterator[Any]):
        calls = 0

        def __next__(self) -> Any:
            self.calls += 1
            if self.calls == 3:
                raise KeyboardInterrupt
            if self.calls > 5:
                raise StopIteration
            return filled(device, self.calls)

    iterator = iter(HostPrefetcher(Interrupted(), device=device))
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert [float(batch[0]) for batch in iterator] == [1, 2, 4, 5]


def test_c14_a_leaf_that_fails_beside_a_packed_one_costs_no_slot(device: Any) -> None:
    class Stubborn:
        def to(self, *_: Any, **__: Any) -> Any:
            raise ValueError("stays where it is")

    prefetcher = HostPrefetcher([(filled(device, 1, LARGE), Stubborn())], depth=1, device=device)
    for _ in range(5):  # more often than there are slots
        with pytest.raises(ValueError, match="stays where it is"):
            next(iter(prefetcher))
    prefetcher.close()
    assert prefetcher.stats().pinned_bytes == 0


def test_c7_a_source_that_advances_its_own_iterator(device: Any) -> None:
    iterator: Any = None

    def source() -> Iterator[Any]:
        yield 0
        next(iterator)

    iterator = iter(HostPrefetcher(source(), device=device))
    assert next(iterator) == 0
    with pytest.raises(ValueError, match="advances the iterator"):
        next(iterator)


# Laziness


@pytest.mark.parametrize("depth", [1, 3])
def test_c8_at_most_depth_and_one_ahead(device: Any, depth: int) -> None:
    source = Source(lambda index: filled(device, index), 20)
    prefetcher = HostPrefetcher(source, depth, device=device)
    len(prefetcher), repr(prefetcher), bool(prefetcher), prefetcher.stats()
    iterator = iter(prefetcher)
    assert source.pulled == 0
    for taken in range(1, 10):
        next(iterator)
        assert source.pulled <= taken + depth
    assert source.pulled == 9 + depth


def test_c8_nothing_is_pulled_beyond_the_end(device: Any) -> None:
    ends = 0

    class Ending(Iterator[Any]):
        left = 3

        def __next__(self) -> Any:
            nonlocal ends
            if not self.left:
                ends += 1
                raise StopIteration
            self.left -= 1
            return filled(device, self.left)

    iterator = iter(HostPrefetcher(Ending(), device=device))
    assert len(list(iterator)) == 3
    assert next(iterator, None) is None
    assert ends == 1


def test_c8_the_source_runs_in_the_thread_of_the_consumer(device: Any) -> None:
    threads = []

    def source() -> Iterator[Any]:
        for index in range(5):
            threads.append((threading.get_ident(), torch.is_inference_mode_enabled()))
            yield filled(device, index)

    with torch.inference_mode():
        batches = list(HostPrefetcher(source(), device=device))
    assert threads == [(threading.get_ident(), True)] * 5
    batches[0].add_(1)  # what arrives can be used outside of inference mode


# Leaving a pass


@pytest.mark.parametrize("size", [16, pytest.param(LARGE, marks=pytest.mark.slow)], ids=["small", "large"])
@pytest.mark.parametrize("way", ["break", "close", "del", "with", "error"])
def test_c9_memory_is_back(device: Any, way: str, size: int) -> None:
    before = Surroundings(device)

    def leave() -> None:
        prefetcher = HostPrefetcher(outputs(device, 20, size, seconds=0.01), device=device)
        if way == "with":
            with prefetcher:
                next(iter(prefetcher))
            return
        iterator = iter(prefetcher)
        next(iterator)
        if way == "close":
            prefetcher.close()
            prefetcher.close()
            with pytest.raises(IteratorClosedError):
                next(iterator)
        if way == "del":
            del iterator
        if way == "error":
            with pytest.raises(ZeroDivisionError):
                for _ in prefetcher:
                    raise ZeroDivisionError

    for _ in range(2):
        leave()
    gc.collect()
    before.assert_restored()
    if is_simulated(device):
        assert device.late_writes == 0


@pytest.mark.slow
def test_c9_a_kept_batch_outlives_everything(device: Any) -> None:
    with HostPrefetcher(outputs(device, 5, LARGE), device=device) as prefetcher:
        kept = next(iter(prefetcher))
    del prefetcher
    gc.collect()
    settle(device)
    assert lows_and_highs([kept]) == one_to(1)
    if is_simulated(device):
        assert device.pinned_bytes == kept.nbytes
        del kept
        assert device.pinned_bytes == 0


def test_c9_closed_by_another_thread_while_the_source_is_asked(device: Any) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def source() -> Iterator[Any]:
        yield filled(device, 1)
        entered.set()
        assert go_on.wait(TIMEOUT)
        yield filled(device, 2)

    before = Surroundings(device)
    prefetcher = HostPrefetcher(source(), device=device)
    iterator = iter(prefetcher)
    consumer = Thread(functools.partial(next, iterator))
    assert entered.wait(TIMEOUT)
    prefetcher.close()
    go_on.set()
    consumer.result()
    with pytest.raises(IteratorClosedError):
        next(iterator)
    del consumer, iterator, prefetcher
    gc.collect()
    before.assert_restored()


# Containers, dtypes, layouts


class Pair(NamedTuple):
    x: Any
    y: Any


def test_c12_containers_keep_their_types(device: Any) -> None:
    def batch() -> Any:
        return collections.OrderedDict(
            pair=Pair(filled(device, 1), [filled(device, 2), (filled(device, 3),)]),
            more=collections.deque([filled(device, 4)], maxlen=3),
            meta={"name": "a", "size": torch.Size((2, 3))},
        )

    (got,) = HostPrefetcher([batch()], device=device)
    assert type(got) is collections.OrderedDict
    assert type(got["pair"]) is Pair
    assert type(got["pair"].y[1]) is tuple
    assert got["more"].maxlen == 3
    assert got["meta"] == {"name": "a", "size": torch.Size((2, 3))}
    leaves = [got["pair"].x, got["pair"].y[0], got["pair"].y[1][0], got["more"][0]]
    assert [float(leaf[0]) for leaf in leaves] == [1, 2, 3, 4]


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda t: t.reshape(8, 16).t(),
    "strided": lambda t: t[::3],
    "expanded": lambda t: t[:1].expand(5, 1),
    "offset": lambda t: t[7:],
    "scalar": lambda t: t[3].reshape(()),
    "empty": lambda t: t[:0],
    "channels last": lambda t: t.reshape(2, 4, 4, 4).contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_c12_shapes_and_strides_are_those_of_cpu(device: Any, name: str) -> None:
    base = torch.arange(128, dtype=torch.float32)
    expected = LAYOUTS[name](base)
    made = put(device, expected) if name == "channels last" else LAYOUTS[name](put(device, base))
    (got,) = HostPrefetcher([made], device=device)
    assert got.shape == expected.shape
    assert torch.equal(got, expected)
    assert got.stride() == expected.to("meta").stride()


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.uint16, torch.uint64, torch.int8],
    ids=str,
)
def test_c12_dtypes(device: Any, dtype: torch.dtype) -> None:
    raw = torch.arange(64, dtype=torch.uint8) % 2
    values = raw.view(dtype) if dtype is not torch.bool else raw.bool()
    batches = [{"a": put(device, values), "b": filled(device, index)} for index in range(4)]
    for index, got in enumerate(HostPrefetcher(batches, device=device)):
        assert got["a"].dtype is dtype
        assert torch.equal(got["a"].view(torch.uint8), values.view(torch.uint8))
        assert float(got["b"][0]) == index


def test_c12_many_leaves_in_one_copy(stream_device: Any) -> None:
    device = stream_device
    kinds = itertools.cycle([torch.float32, torch.int64, torch.uint8, torch.bfloat16])
    values = [torch.full((index + 1,), index).to(dtype) for index, dtype in zip(range(40), kinds, strict=False)]
    prefetcher = HostPrefetcher([[put(device, value) for value in values] for _ in range(3)], device=device)
    for got in prefetcher:
        assert all(torch.equal(one, other) for one, other in zip(got, values, strict=True))
    assert prefetcher.stats().copies == 3


def test_c12_shared_storage_stays_shared(device: Any) -> None:
    base = put(device, torch.arange(32, dtype=torch.float32))
    (got,) = HostPrefetcher([[base[:20], base[10:], base]], device=device)
    assert torch.equal(got[1], torch.arange(10, 32))
    if device != "cpu":
        got[2][15] = -1
        assert got[0][15] == got[1][5] == -1


def test_c12_what_requires_grad_and_sparse_ones_go_by_their_own_to(device: Any) -> None:
    weight = torch.nn.Parameter(filled(device, 2))
    settle(device)
    sparse = torch.eye(3).to_sparse() if not is_cuda(device) else torch.eye(3, device=device).to_sparse()
    ((got, there),) = HostPrefetcher([(weight * 1.0, sparse)], device=device)
    assert got.requires_grad
    assert there.layout is torch.sparse_coo
    assert there.device.type == "cpu"
    assert torch.equal(there.to_dense(), torch.eye(3))


# C14, C15: bounded, and degraded where it must be


@pytest.mark.slow
def test_c14_pinned_memory_is_bounded_and_reused(stream_device: Any) -> None:
    device = stream_device
    depth = 2
    prefetcher = HostPrefetcher(Source(lambda index: filled(device, index, LARGE), 6), depth, device=device)
    for _ in range(3):
        for index, batch in enumerate(prefetcher):
            assert float(batch[-1]) == index
        del batch
    stats = prefetcher.stats()
    assert stats.pinned_allocations == depth + 2
    assert stats.pinned_bytes <= (depth + 2) * LARGE * 4
    assert stats.lent_bytes == stats.copied_bytes == 18 * LARGE * 4


@pytest.mark.slow
@pytest.mark.parametrize("borrow", [False, True])
def test_c14_a_loops_variable_costs_no_slot_a_pass(stream_device: Any, borrow: bool) -> None:
    device = stream_device
    source = Source(lambda index: filled(device, index, LARGE), 6)
    prefetcher = HostPrefetcher(source, 2, device=device, borrow=borrow)
    for _ in range(4):
        for index, batch in enumerate(prefetcher):
            assert float(batch[-1]) == index
        assert float(batch[-1]) == 5
    assert prefetcher.stats().pinned_allocations == 4


def test_c15_pinned_memory_is_used_again_when_a_kept_batch_goes(stream_device: Any) -> None:
    """What the consumer keeps of an earlier pass is within the limit; a refusal for its sake is not kept to."""
    device = stream_device
    source = Source(lambda index: filled(device, index, LARGE), 8)
    limit = 3 * LARGE * 4
    prefetcher = HostPrefetcher(source, 2, device=device, borrow=True, max_pinned_bytes=limit)

    def loop() -> Any:
        for index, batch in enumerate(prefetcher):
            assert float(batch[-1]) == index
        return batch

    kept = loop()
    with pytest.warns(PrefetchWarning, match=f"max_pinned_bytes={limit}"):
        loop()
    assert float(kept[-1]) == 7
    del kept
    loop()
    slots = prefetcher._shared._idle
    assert slots is not None
    assert [type(slot.block) for slot in slots._free if isinstance(slot.block, PageableBlock)] == []
    assert prefetcher.stats().pinned_bytes == limit


@pytest.mark.filterwarnings("ignore:page-locked memory was refused")
@pytest.mark.parametrize("borrow", [False, True])
def test_c15_pinned_memory_is_used_again_when_another_pass_ends(stream_device: Any, borrow: bool) -> None:
    """What one pass was refused for the sake of another is not kept to when that one has gone."""
    device = stream_device
    source = Source(lambda index: filled(device, index, LARGE), 8)
    prefetcher = HostPrefetcher(source, 2, device=device, borrow=borrow, max_pinned_bytes=4 * LARGE * 4)
    outer = iter(prefetcher)
    next(outer)
    list(prefetcher)
    list(outer)
    for index, batch in enumerate(prefetcher):
        assert float(batch[-1]) == index
    slots = prefetcher._shared._idle
    assert slots is not None
    assert not [slot for slot in slots._free if isinstance(slot.block, PageableBlock)]


@pytest.mark.slow
def test_c14_small_leaves_that_are_kept_hold_no_slot(stream_device: Any) -> None:
    device = stream_device
    source = Source(lambda index: (filled(device, index, LARGE), filled(device, index, 4)), 6)
    prefetcher = HostPrefetcher(source, device=device)
    labels = []
    for large, label in prefetcher:
        assert float(large[0]) == len(labels)
        labels.append(label)
    assert [float(label[0]) for label in labels] == list(range(6))
    assert prefetcher.stats().lent_bytes == 6 * LARGE * 4


@pytest.mark.slow
def test_c14_all_batches_kept_take_no_more_pinned_memory(stream_device: Any) -> None:
    device = stream_device
    prefetcher = HostPrefetcher(outputs(device, 7, LARGE), device=device)
    kept = list(prefetcher)
    assert lows_and_highs(kept) == one_to(7)
    assert prefetcher.stats().pinned_allocations <= 4


@pytest.mark.slow
def test_c14_device_memory_is_bounded(sim: Any) -> None:
    most = 0
    for _ in HostPrefetcher(outputs(sim, 8, LARGE), 2, device=sim):
        most = max(most, sim.allocated_bytes)
    assert most <= (3 + 1) * LARGE * 4  # three slabs, and the source's own last tensor


@pytest.mark.slow
def test_c14_sizes_that_change(device: Any) -> None:
    sizes = [5, LARGE, 17, LARGE + 100, 1, 300, LARGE * 2, 2]
    batches = (filled(device, index + 1, size) for index, size in enumerate(sizes))
    got = list(HostPrefetcher(batches, device=device))
    assert [len(batch) for batch in got] == sizes
    assert lows_and_highs(got) == one_to(8)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, LARGE * 4])
def test_c15_pinned_memory_refused(limit: int) -> None:
    device = SimulatedDevice(pinned_limit=limit)
    with pytest.warns(PrefetchWarning, match="page-locked memory was refused"):
        got = list(HostPrefetcher(outputs(device, 8, LARGE), device=device))
    assert lows_and_highs(got) == one_to(8)


@pytest.mark.slow
def test_c15_a_budget_for_pinned_memory(stream_device: Any) -> None:
    device = stream_device
    prefetcher = HostPrefetcher(outputs(device, 8, LARGE), device=device, max_pinned_bytes=LARGE * 8)
    with pytest.warns(PrefetchWarning, match="max_pinned_bytes"):
        got = list(prefetcher)
    assert lows_and_highs(got) == one_to(8)
    assert prefetcher.stats().pinned_bytes <= LARGE * 8


@pytest.mark.slow
def test_c15_device_memory_full() -> None:
    device = SimulatedDevice(memory_limit=LARGE * 4)  # no room for a slab beside the source's own tensor
    with pytest.warns(PrefetchWarning, match="device memory is full"):
        got = list(HostPrefetcher(outputs(device, 6, LARGE), device=device))
    assert lows_and_highs(got) == one_to(6)


# Options


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"batches": 3}, TypeError, "batches must be an iterable"),
        ({"depth": 0}, ValueError, "depth must be at least 1"),
        ({"depth": "2"}, TypeError, "depth must be a whole number"),
        ({"borrow": 1}, TypeError, "borrow must be True or False"),
        ({"device": "tpu"}, ValueError, "device must be"),
        ({"max_pinned_bytes": -1}, ValueError, "max_pinned_bytes"),
    ],
)
def test_a_wrong_option_is_named(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    given = {"batches": [], "device": "cpu"} | arguments
    with pytest.raises(error, match=match):
        HostPrefetcher(**given)


def test_the_device_is_that_of_a_prefetcher_given(sim: Any) -> None:
    prefetcher = HostPrefetcher(GPUPrefetcher([torch.ones(3)], sim))
    assert repr(sim) in repr(prefetcher)
    assert [batch.tolist() for batch in prefetcher] == [[1, 1, 1]]
    assert prefetcher.stats().copies == 1


def test_an_asynchronous_source_wants_async_for(device: Any) -> None:
    async def source() -> Any:
        yield 1

    with pytest.raises(TypeError, match="async for"):
        iter(HostPrefetcher(source(), device=device))


@pytest.mark.slow
def test_copies_carry_the_configuration(device: Any) -> None:
    prefetcher = HostPrefetcher([1, 2, 3], 3, device=device, borrow=True)
    next(iter(prefetcher))
    twins = [copy.deepcopy(prefetcher)]
    if not is_simulated(device):
        twins.append(pickle.loads(pickle.dumps(prefetcher)))
    for twin in twins:
        assert repr(twin) == repr(prefetcher)
        assert list(twin) == [1, 2, 3]


def test_batches_can_be_pickled(device: Any) -> None:
    (batch,) = HostPrefetcher(outputs(device, 1, LARGE), device=device)
    assert torch.equal(pickle.loads(pickle.dumps(batch)), batch)
