"""The simulated device itself: it has to bite where a GPU would, and nowhere else."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch

from prefetchpipe.device.base import Device
from prefetchpipe.errors import PinnedMemoryError
from prefetchpipe.testing import SimulatedDevice
from prefetchpipe.testing.simulated import POISON
from tests.support import Thread

SLOW = 1e3  # bytes a second


def put(device: SimulatedDevice, source: torch.Tensor, stream: Any = None) -> torch.Tensor:
    """A copy of a flat uint8 tensor under way to memory of its own."""
    target = device.alloc(source.numel())
    device.copy(target, source, device.copy_stream if stream is None else stream)
    return target


def ones(nbytes: int = 8, value: int = 1) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


ONES = ones(16)  # outlives every copy


def is_poison(tensor: torch.Tensor) -> bool:
    return bool((tensor.contiguous().view(torch.uint8) == POISON).all())


def test_it_speaks_the_protocol() -> None:
    assert isinstance(SimulatedDevice(), Device)
    assert repr(SimulatedDevice()) == "simulated"
    assert SimulatedDevice().generators() == ()


# Copies are late


def test_a_copy_takes_effect_at_its_completion_and_not_before() -> None:
    device = SimulatedDevice(bandwidth=SLOW)
    target = put(device, ONES)
    assert is_poison(target)
    event = device.new_event()
    device.record(event, device.copy_stream)
    assert not device.query(event)
    assert is_poison(target)
    device.synchronize(event)
    assert device.query(event)
    assert target.tolist() == [1] * 16
    assert device.now == pytest.approx(16 / SLOW, rel=0.1)
    assert device.copies == 1


@pytest.mark.parametrize("queued", [False, True], ids=["running", "queued"])
def test_a_source_that_is_written_under_a_copy_arrives_as_poison(queued: bool) -> None:
    device = SimulatedDevice(bandwidth=SLOW)
    first = put(device, ONES) if queued else None
    source = ones()
    target = put(device, source)
    source[3] = 2
    device.synchronize()
    assert is_poison(target)
    assert first is None or first.tolist() == [1] * 16


def test_a_source_that_is_freed_under_a_copy_arrives_as_poison() -> None:
    device = SimulatedDevice(bandwidth=SLOW)
    dropped, held = ones(), ones()
    targets = [put(device, dropped), put(device, held)]
    del dropped
    device.synchronize()
    assert is_poison(targets[0])
    assert targets[1].tolist() == [1] * 8


def test_a_view_holds_the_source_of_a_copy() -> None:
    device = SimulatedDevice(bandwidth=SLOW)
    source = ones()
    view = source[:4]
    target = put(device, source)
    del source
    device.synchronize()
    assert target.tolist() == [1] * 8
    assert view.tolist() == [1] * 4


def test_page_locked_memory_that_is_freed_under_a_copy_arrives_as_poison() -> None:
    device = SimulatedDevice(bandwidth=SLOW)
    block = device.host_alloc(8)
    block.tensor.fill_(3)
    target = put(device, block.tensor)
    block.free()
    device.synchronize()
    assert is_poison(target)


def test_the_target_of_a_copy_is_lost_from_its_start_on() -> None:
    device = SimulatedDevice(bandwidth=SLOW)
    other = ones(16, 2)
    target = put(device, ONES)
    device.synchronize()
    device.copy(target, other, device.copy_stream)
    device.query(device.new_event())
    assert is_poison(target)
    device.synchronize()
    assert target.tolist() == other.tolist()


def test_an_empty_copy_is_nothing() -> None:
    device = SimulatedDevice()
    target = put(device, ones(0))
    device.synchronize()
    assert target.numel() == 0
    assert device.allocated_bytes == 0


def test_streams_run_in_order_and_beside_each_other() -> None:
    device = SimulatedDevice(bandwidth=SLOW)
    other = device.new_stream()
    ran: list[str] = []
    for name, stream, seconds in (("a", other, 3.0), ("b", other, 1.0), ("c", device.default_stream, 2.0)):
        with device.use_stream(stream):
            device.launch(lambda name=name: ran.append(name), seconds=seconds)
    assert ran == []
    device.synchronize()
    assert ran == ["c", "a", "b"]
    assert device.now == pytest.approx(4.0, rel=1e-3)


# Events


def test_an_event_that_was_never_recorded_has_passed() -> None:
    device = SimulatedDevice()
    assert device.query(device.new_event())


def test_a_stream_waits_for_an_event_and_the_host_does_not() -> None:
    device = SimulatedDevice(bandwidth=SLOW)
    sources = [ones(), ones(value=2)]
    reads: list[tuple[int, int]] = []
    for source, ordered in zip(sources, (True, False), strict=True):
        target = put(device, source)
        event = device.new_event()
        device.record(event, device.copy_stream)
        with device.use_stream(device.new_stream()):
            if ordered:
                device.wait(device.current_stream(), event)
            device.launch(lambda view: reads.append((int(view.min()), int(view.max()))), target)
        assert device.now < 1e-3
    device.synchronize()
    assert sorted(reads) == [(1, 1), (POISON, POISON)]


def test_an_event_stands_for_what_was_queued_when_it_was_recorded_last() -> None:
    device = SimulatedDevice()
    event = device.new_event()
    done: list[int] = []
    device.launch(lambda: done.append(1), seconds=1)
    device.record(event, device.default_stream)
    device.launch(lambda: done.append(2), seconds=1)
    device.synchronize(event)
    assert done == [1]
    device.record(event, device.default_stream)
    assert not device.query(event)
    device.synchronize(event)
    assert done == [1, 2]


# Kernels


def test_a_kernel_that_starts_before_its_input_has_arrived_reads_poison() -> None:
    """However long it runs: hardware may read at once."""
    device = SimulatedDevice(bandwidth=SLOW)
    source = ones()
    target = put(device, source)
    reads: list[bool] = []
    device.launch(lambda view: reads.append(is_poison(view)), target, seconds=10)
    device.synchronize()
    assert reads == [True]
    assert target.tolist() == [1] * 8


def test_a_kernel_whose_input_is_overwritten_meanwhile_reads_poison() -> None:
    device = SimulatedDevice()
    target = put(device, ONES)
    device.synchronize()
    reads: list[bool] = []
    device.launch(lambda view: reads.append(is_poison(view)), target, seconds=1)
    source = ones(16, 9)
    device.copy(target, source, device.copy_stream)
    device.synchronize()
    assert reads == [True]


def test_kernels_may_share_a_block_if_not_their_bytes() -> None:
    device = SimulatedDevice()
    target = put(device, ONES)
    device.synchronize()
    reads: list[int] = []
    device.launch(lambda view: reads.append(int(view.sum())), target[::2], seconds=2)
    with device.use_stream(device.new_stream()):
        device.launch(lambda view: view.fill_(0), target[1::2], seconds=1)
    device.synchronize()
    assert reads == [8]
    assert target.tolist() == [1, 0] * 8


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float8_e5m2, torch.complex32, torch.uint64])
@pytest.mark.parametrize("shape", [(), (0, 3), (3, 2)])
def test_kernels_take_tensors_of_any_kind(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    device = SimulatedDevice()
    tensor = torch.zeros(shape, dtype=dtype).t() if len(shape) == 2 else torch.zeros(shape, dtype=dtype)
    seen: list[Any] = []
    device.launch(lambda view: seen.append((view.dtype, view.shape, view.stride())), tensor, seconds=1)
    device.synchronize()
    assert seen == [(tensor.dtype, tensor.shape, tensor.stride())]


def test_a_launch_holds_no_reference_to_device_memory() -> None:
    device = SimulatedDevice()
    with device.on_copy_stream():
        target = put(device, ONES)
    device.synchronize()
    reads: list[bool] = []
    device.launch(lambda view: reads.append(is_poison(view)), target, seconds=1)
    tensor = weakref.ref(target)
    del target
    assert tensor() is None
    device.query(device.new_event())
    assert device.allocated_bytes == 0
    device.synchronize()
    assert reads == [True]


# Device memory


def test_new_memory_is_poison() -> None:
    device = SimulatedDevice()
    assert is_poison(device.alloc(33))
    tensor = device.empty(torch.Size((2, 3)), (1, 2), torch.int16)
    assert (tensor.shape, tensor.stride(), tensor.dtype) == ((2, 3), (1, 2), torch.int16)
    assert is_poison(tensor.t())


def test_a_freed_block_is_poisoned_and_handed_out_again_at_once() -> None:
    device = SimulatedDevice()
    first = device.alloc(64)
    first.fill_(1)
    view = first[8:16]
    address = first.data_ptr()
    del first
    other = device.alloc(64)
    assert other.data_ptr() != address  # the view holds it
    del view
    again = device.alloc(64)
    assert again.data_ptr() == address
    device.synchronize()
    assert is_poison(again)


def test_each_stream_has_a_pool_of_its_own() -> None:
    device = SimulatedDevice()
    block = device.alloc(64)
    address = block.data_ptr()
    del block
    with device.on_copy_stream():
        assert device.alloc(64).data_ptr() != address
    assert device.alloc(64).data_ptr() == address


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_in_use_on_another_stream_is_kept_for_it_only_if_that_is_recorded(recorded: bool) -> None:
    device = SimulatedDevice()
    source = ones()
    with device.on_copy_stream():
        target = put(device, source)
    device.synchronize()
    address = target.data_ptr()
    reads: list[int] = []
    device.launch(lambda view: reads.append(int(view[0])), target, seconds=1)
    if recorded:
        device.record_use(target, device.default_stream)
    del target
    with device.on_copy_stream():
        again = device.alloc(8)
    assert (again.data_ptr() == address) == (not recorded)
    device.synchronize()
    assert reads == ([1] if recorded else [POISON])
    with device.on_copy_stream():
        device.query(device.new_event())
        last = device.alloc(8)
    assert (last.data_ptr() == address) == recorded


def test_device_memory_is_counted_and_limited() -> None:
    device = SimulatedDevice(memory_limit=100)
    kept = device.alloc(60)
    with pytest.raises(torch.OutOfMemoryError, match="60"):
        device.alloc(60)
    assert device.allocated_bytes == 60
    del kept
    device.synchronize()
    assert device.allocated_bytes == 0
    assert device.alloc(100).numel() == 100


def test_residence_is_where_the_bytes_are() -> None:
    device = SimulatedDevice()
    block = device.alloc(64)
    assert device.is_resident(block)
    assert device.is_resident(block[8:].view(torch.float32)[::2])
    assert not device.is_resident(torch.ones(3))
    assert not device.is_resident(torch.ones(3).to_sparse())
    assert not SimulatedDevice().is_resident(block)


# Page-locked memory


def test_page_locked_memory_is_counted_and_limited() -> None:
    device = SimulatedDevice(pinned_limit=100)
    block = device.host_alloc(60)
    assert block.tensor.shape == (60,)
    with pytest.raises(PinnedMemoryError, match="100"):
        device.host_alloc(41)
    assert (device.pinned_bytes, device.pinned_allocations) == (60, 1)
    block.free()
    assert (device.pinned_bytes, device.pinned_allocations) == (0, 1)
    assert device.host_alloc(100).nbytes == 100


def test_pinned_tensors_are_known_while_they_live() -> None:
    device = SimulatedDevice()
    plain = torch.arange(6).view(2, 3)
    pinned = device.pin_memory(plain)
    assert torch.equal(pinned, plain)
    assert device.is_pinned(pinned)
    assert device.is_pinned(pinned[1:])
    assert not device.is_pinned(plain)
    assert device.pinned_bytes == 0  # the user's, not ours
    del pinned
    assert not device.is_pinned(plain)


# Schedules


def schedule(seed: int) -> list[bool]:
    """Which of many short copies the host finds complete when it asks at once."""
    device = SimulatedDevice(seed=seed, bandwidth=8e6)
    source = ones()
    answers = []
    for _ in range(64):
        target = put(device, source)
        event = device.new_event()
        device.record(event, device.copy_stream)
        answers.append(device.query(event))
        del target
    return answers


def test_a_seed_is_a_schedule() -> None:
    schedules = [schedule(seed) for seed in range(8)]
    assert len({tuple(s) for s in schedules}) == 8
    assert all(any(s) and not all(s) for s in schedules)
    assert schedules == [schedule(seed) for seed in range(8)]


def test_each_thread_has_a_current_stream() -> None:
    device = SimulatedDevice()
    stream = device.new_stream()
    with device.use_stream(stream):
        assert device.current_stream() is stream
        assert Thread(device.current_stream).result() is device.default_stream
        with device.on_copy_stream():
            assert device.current_stream() is device.copy_stream
        assert device.current_stream() is stream
    assert device.current_stream() is device.default_stream

    def bound() -> Any:
        device.bind_thread()
        return device.current_stream()

    assert Thread(bound).result() is device.copy_stream
    assert device.current_stream() is device.default_stream


@pytest.mark.slow
def test_many_threads_may_call_at_once() -> None:
    device = SimulatedDevice(bandwidth=1e7)
    start = threading.Barrier(4)

    def work(number: int) -> bool:
        stream = device.new_stream()
        right = []
        start.wait(5)
        with device.use_stream(stream):
            for index in range(100):
                source = ones(64, (number * 50 + index) % 100)
                target = put(device, source, stream)
                want = source.tolist()
                device.launch(lambda view, want=want: right.append(view.tolist() == want), target)
                event = device.new_event()
                device.record(event, stream)
                del target
                device.synchronize(event)
        return len(right) == 100 and all(right)

    threads = [Thread(lambda number=number: work(number)) for number in range(4)]
    assert [thread.result() for thread in threads] == [True] * 4
    device.synchronize()
    assert device.allocated_bytes == 0


# Device to host


def test_a_copy_to_the_host_arrives_late_and_reads_what_was_there_when_it_started() -> None:
    device = SimulatedDevice(bandwidth=1e6)
    host = device.host_alloc(16)
    source = device.alloc(16)
    device.launch(lambda view: view.fill_(7), source, seconds=0.01)
    device.copy_to_host(host.tensor, source, device.default_stream)
    assert 7 not in host.tensor.tolist()
    device.synchronize()
    assert host.tensor.tolist() == [7] * 16


def test_a_source_that_changes_under_a_copy_to_the_host_arrives_as_poison() -> None:
    device = SimulatedDevice(bandwidth=1e3)
    host = device.host_alloc(16)
    source = device.alloc(16).fill_(7)
    device.copy_to_host(host.tensor, source, device.default_stream)
    with device.use_stream(device.new_stream()):
        device.launch(lambda view: view.fill_(8), source, seconds=0.001)
    device.synchronize()
    assert host.tensor.tolist() == [0xAB] * 16


def test_a_copy_to_the_host_keeps_no_host_memory_alive() -> None:
    device = SimulatedDevice(bandwidth=1e3)
    source = device.alloc(16).fill_(7)
    device.copy_to_host(torch.empty(16, dtype=torch.uint8), source, device.default_stream)
    device.synchronize()


def test_torch_calls_see_what_is_queued_before_them_on_the_current_stream() -> None:
    device = SimulatedDevice()
    made = device.alloc(16)
    device.launch(lambda view: view.fill_(7), made, seconds=0.5)
    with device.use_stream(device.new_stream()):
        device.before_kernels()
        assert 7 not in made.tolist()
    device.before_kernels()
    assert made.tolist() == [7] * 16


def test_a_block_with_recorded_uses_goes_back_in_the_order_of_its_own_stream() -> None:
    """As torch's allocator has it: the pool of a stream needs no event for that stream's own work."""
    device = SimulatedDevice(bandwidth=1e3)
    host = device.host_alloc(16)
    user = device.new_stream()
    source = device.alloc(16).fill_(7)
    device.record_use(source, user)
    device.copy_to_host(host.tensor, source, device.default_stream)
    del source
    device.synchronize()
    assert host.tensor.tolist() == [7] * 16


def test_a_kernel_may_take_one_value_with_an_odd_stride() -> None:
    device = SimulatedDevice()
    seen: list[list[float]] = []
    device.launch(lambda view: seen.append(view.tolist()), torch.arange(8.0)[3:4].as_strided((1,), (4,), 3))
    device.synchronize()
    assert seen == [[3.0]]
