"""The way back on real streams. What takes a `device` in tests/cases runs on CUDA too."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import anyio
import pytest
import torch

from prefetchpipe import GPUPrefetcher, HostPrefetcher
from tests.support import spin

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LARGE = 16 << 20
"""Elements of float32: 64 MiB, more than a millisecond on the link."""


@pytest.fixture(params=["cupy", "torch"])
def cuda(request: pytest.FixtureRequest) -> Any:
    """The device through CuPy's runtime calls, and through torch's own."""
    from prefetchpipe.device.cuda import CudaDevice

    if request.param == "torch":
        return CudaDevice(torch.cuda.current_device(), None)
    pytest.importorskip("cupy")
    return "cuda"


def one_to(count: int) -> list[tuple[float, float]]:
    return [(float(index), float(index)) for index in range(1, count + 1)]


def ends(batches: Any) -> list[tuple[float, float]]:
    return [(float(batch.min()), float(batch.max())) for batch in batches]


@pytest.mark.parametrize("size", [1024, LARGE])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_values_made_late(cuda: Any, depth: int, size: int) -> None:
    def source() -> Iterator[torch.Tensor]:
        for index in range(1, 21):
            spin(0.002)
            yield torch.full((size,), float(index), device="cuda")

    assert ends(HostPrefetcher(source(), depth, device=cuda)) == one_to(20)


@pytest.mark.parametrize("size", [1024, LARGE])
def test_a_source_that_overwrites_its_output_at_once(cuda: Any, size: int) -> None:
    def source() -> Iterator[torch.Tensor]:
        buffer = torch.empty(size, device="cuda")
        for index in range(1, 21):
            buffer.fill_(index)
            yield buffer
            buffer.fill_(-1)

    assert ends(HostPrefetcher(source(), 4, device=cuda)) == one_to(20)


def test_the_static_output_of_a_graph(cuda: Any) -> None:
    static = torch.zeros(LARGE, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static.add_(1)
    static.zero_()

    def source() -> Iterator[torch.Tensor]:
        for _ in range(20):
            graph.replay()
            yield static

    assert ends(HostPrefetcher(source(), device=cuda)) == one_to(20)


def test_a_source_that_frees_its_output_at_once(cuda: Any) -> None:
    """The block goes to the next output while the link is still behind."""
    source = (torch.full((LARGE,), float(index), device="cuda") for index in range(1, 31))
    assert ends(HostPrefetcher(source, 4, device=cuda)) == one_to(30)


def test_batches_that_are_kept(cuda: Any) -> None:
    kept = list(HostPrefetcher((torch.full((LARGE,), float(i), device="cuda") for i in range(1, 9)), device=cuda))
    assert kept[0].is_pinned()
    assert not kept[-1].is_pinned()
    assert ends(kept) == one_to(8)


def test_uploaded_again_and_dropped(cuda: Any) -> None:
    """From where it landed, on the current stream: the next copy into that slot comes behind."""
    source = (torch.full((LARGE,), float(index), device="cuda") for index in range(1, 13))
    again = [batch.to("cuda", non_blocking=True) for batch in HostPrefetcher(source, device=cuda)]
    torch.cuda.synchronize()
    assert ends(again) == one_to(12)


def test_memory_is_bounded_and_comes_back(cuda: Any) -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    reserved = []
    static = torch.ones(LARGE, device="cuda")
    prefetcher = HostPrefetcher([static] * 8, device=cuda)
    for _ in range(10):
        for batch in prefetcher:
            del batch
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] == reserved[2]
    assert prefetcher.stats().pinned_allocations <= 4
    assert torch.cuda.memory_allocated() - before <= (1 + 3) * LARGE * 4
    prefetcher.close()
    del static, prefetcher
    assert torch.cuda.memory_allocated() == before


def test_neither_stream_nor_device_is_changed(cuda: Any) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for batch in HostPrefetcher([torch.ones(8, device="cuda")] * 4, device=cuda):
            assert torch.cuda.current_stream() == stream
            assert batch.tolist() == [1] * 8


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_both_directions_in_an_event_loop(cuda: Any, backend: str) -> None:
    loader = [torch.full((LARGE,), float(index)) for index in range(1, 7)]

    async def main() -> list[tuple[float, float]]:
        stream = torch.cuda.Stream()
        seen = []
        with torch.cuda.stream(stream):
            outputs = (batch * 2 async for batch in GPUPrefetcher(loader, cuda))
            async with HostPrefetcher(outputs, device=cuda) as back:
                seen = [(float(batch.min()), float(batch.max())) async for batch in back]
        return seen

    assert anyio.run(functools.partial(main), backend=backend) == [(2.0 * i, 2.0 * i) for i in range(1, 7)]
