"""The way back: one wait, one event or one reference each, on the simulated device. tests/mutants removes them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import pytest
import torch

from prefetchpipe import HostPrefetcher
from prefetchpipe.testing import SimulatedDevice

SLOW = 1e6
"""Bytes a second: a copy takes milliseconds, a call of the host at most one microsecond."""

LARGE = 1 << 18
"""Elements of float32 that fill a mebibyte: from here on a tensor is handed over where it landed."""


def empty(device: SimulatedDevice, size: int) -> torch.Tensor:
    return device.empty(torch.Size((size,)), (1,), torch.float32)


def made(device: SimulatedDevice, value: float, size: int = 256, seconds: float = 0.001) -> torch.Tensor:
    tensor = empty(device, size)
    device.launch(lambda view: view.fill_(value), tensor, seconds=seconds)
    return tensor


def values(batches: Any) -> list[tuple[float, float]]:
    return [(float(batch.min()), float(batch.max())) for batch in batches]


def one_to(count: int) -> list[tuple[float, float]]:
    return [(float(index), float(index)) for index in range(1, count + 1)]


def test_c3_the_copy_waits_for_what_the_producers_stream_has_queued() -> None:
    device = SimulatedDevice()
    source = (made(device, index, seconds=0.1) for index in range(1, 7))
    assert values(HostPrefetcher(source, device=device)) == one_to(6)


def test_c3_the_host_reads_when_the_copy_has_passed() -> None:
    device = SimulatedDevice(bandwidth=SLOW)
    source = (made(device, index) for index in range(1, 7))
    assert values(HostPrefetcher(source, device=device)) == one_to(6)


@pytest.mark.parametrize("depth", [1, 3])
def test_c5_the_source_overwrites_its_tensor_at_once(depth: int) -> None:
    """On a link that is far behind."""
    device = SimulatedDevice(bandwidth=SLOW)

    def source() -> Iterator[torch.Tensor]:
        buffer = empty(device, 256)
        for index in range(1, 9):
            device.launch(lambda view, value=index: view.fill_(value), buffer)
            yield buffer
            device.launch(lambda view: view.fill_(-1), buffer)

    assert values(HostPrefetcher(source(), depth, device=device)) == one_to(8)


def test_c5_the_source_frees_its_tensor_at_once() -> None:
    device = SimulatedDevice(bandwidth=SLOW)
    source = (made(device, index) for index in range(1, 9))
    assert values(HostPrefetcher(source, depth=3, device=device)) == one_to(8)


def test_c5_the_producers_stream_does_not_wait_for_the_link() -> None:
    device = SimulatedDevice(bandwidth=SLOW)
    source = (made(device, index, seconds=0.0) for index in range(1, 9))
    next(iter(HostPrefetcher(source, depth=4, device=device)))
    assert device.current_stream().tail < 0.001
    assert device.d2h_stream.tail > 0.005


def test_c6_close_waits_for_the_copies_under_way() -> None:
    device = SimulatedDevice(bandwidth=SLOW)
    prefetcher = HostPrefetcher((made(device, index) for index in range(1, 9)), device=device)
    next(iter(prefetcher))
    prefetcher.close()
    assert device.late_writes == 0
    assert device.pinned_bytes == 0


@pytest.mark.slow
def test_c2_a_batch_taken_along_is_not_written_again() -> None:
    device = SimulatedDevice()
    kept = list(HostPrefetcher((made(device, index, LARGE) for index in range(1, 8)), depth=1, device=device))
    assert values(kept) == one_to(7)


@pytest.mark.slow
def test_c2_a_batch_in_use_is_not_written_while_the_loop_names_it() -> None:
    device = SimulatedDevice()
    before = None
    for index, batch in enumerate(HostPrefetcher((made(device, i, LARGE) for i in range(1, 8)), device=device)):
        device.synchronize()  # the copies that were launched ahead have landed, wherever that is
        if before is not None:
            assert values([before]) == [(index, index)]
        before = batch


def test_c2_a_small_leaf_is_not_written_again() -> None:
    device = SimulatedDevice()
    kept = list(HostPrefetcher((made(device, index) for index in range(1, 12)), depth=1, device=device))
    assert values(kept) == one_to(11)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_c3_an_asynchronous_source_is_waited_for_on_its_own_stream(backend: str) -> None:
    device = SimulatedDevice()

    async def source() -> AsyncIterator[torch.Tensor]:
        for index in range(1, 7):
            yield made(device, index, seconds=0.1)

    async def main() -> list[torch.Tensor]:
        batches = []
        iterator = aiter(HostPrefetcher(source(), device=device))
        for _ in range(6):
            # The task of the source runs while this one waits, so it sees this stream.
            with device.use_stream(device.new_stream()):
                batches.append(await anext(iterator))
        return batches

    assert values(anyio.run(main, backend=backend)) == one_to(6)
