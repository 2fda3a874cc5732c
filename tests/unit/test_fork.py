"""A forked child, a DataLoader's worker for one, has copies of our objects: not the threads, not the device."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from prefetchpipe import GPUPrefetcher, HostPrefetcher
from prefetchpipe.testing import SimulatedDevice
from tests.support import TIMEOUT, Thread


class Rewinding:
    """Its own iterator, which begins anew at each ``iter``; the second batch waits for ``go``."""

    def __init__(self, go: threading.Event | None = None) -> None:
        self.go = go
        self.next = 0

    def __iter__(self) -> Any:
        self.next = 0
        return self

    def __next__(self) -> torch.Tensor:
        if self.next == 4:
            raise StopIteration
        if self.next == 1 and self.go is not None:
            self.go.wait(TIMEOUT)
        self.next += 1
        return torch.full((3,), float(self.next))


def in_child(function: Callable[[], Any], expected: Any = None) -> None:
    """``function`` in a fork of this process: it returns, with this value."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if function() == expected else 2
        finally:
            os._exit(code)
    end = time.monotonic() + TIMEOUT
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            assert status == 0
            return
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("the child hangs")


def held_by_a_thread(lock: Any, function: Callable[[], Any]) -> None:
    """``function`` while another thread, which no child has, is inside ``lock``."""
    is_held, may_go = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            may_go.wait(TIMEOUT)

    thread = Thread(hold)
    assert is_held.wait(TIMEOUT)
    try:
        function()
    finally:
        may_go.set()
        thread.result()


def to_device(device: SimulatedDevice, *, finished: bool) -> list[Any]:
    prefetcher = GPUPrefetcher([torch.ones(100) for _ in range(9)], device)
    iterator = iter(prefetcher)
    batches = list(iterator) if finished else [next(iterator) for _ in range(4)]
    return [prefetcher, iterator, batches]


def to_host(device: SimulatedDevice, *, finished: bool) -> list[Any]:
    prefetcher = HostPrefetcher([torch.ones(1 << 19) for _ in range(9)], device=device)
    iterator = iter(prefetcher)
    batches = list(iterator) if finished else [next(iterator) for _ in range(4)]
    return [prefetcher, iterator, batches]


@pytest.mark.slow
@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("kind", [to_device, to_host])
@pytest.mark.parametrize("lock", ["prefetcher", "device"])
def test_c9_what_a_child_collects_is_the_parents(kind: Any, lock: str, finished: bool) -> None:
    """It waits for no lock that a thread of the parent's held at the fork, and asks nothing of the device."""
    device = SimulatedDevice()
    held = kind(device, finished=finished)
    shared = held[0]._shared
    inside = device._lock if lock == "device" else getattr(shared, "lock", None) or shared._lock

    def collect() -> None:
        held.clear()
        gc.collect()

    held_by_a_thread(inside, lambda: in_child(collect))


def test_c9_a_child_iterates_while_the_parent_is_inside() -> None:
    go = threading.Event()
    loader = Rewinding(go)
    prefetcher = GPUPrefetcher(loader, "cpu", fetch="thread")
    iterator = iter(prefetcher)
    assert next(iterator)[0] == 1
    loader.go = None
    try:
        in_child(lambda: [float(batch[0]) for batch in prefetcher], [1, 2, 3, 4])
    finally:
        go.set()
    assert [float(batch[0]) for batch in iterator] == [2, 3, 4]


def test_c9_a_child_goes_on_with_a_one_shot_source() -> None:
    """It does not wait for the parent's pass over it, which never ends there."""

    def numbers() -> Iterator[torch.Tensor]:
        for number in range(6):
            yield torch.full((2,), float(number))

    prefetcher = GPUPrefetcher(numbers(), "cpu", fetch="caller")
    iterator = iter(prefetcher)
    assert next(iterator)[0] == 0
    in_child(lambda: [float(batch[0]) for batch in prefetcher], [1, 2, 3, 4, 5])
    assert [float(batch[0]) for batch in iterator] == [1, 2, 3, 4, 5]
