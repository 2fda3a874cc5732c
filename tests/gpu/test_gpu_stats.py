"""Statistics, limits, traces and ranges on CUDA; on the simulated device: tests/unit/test_stats.py, test_trace.py."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from prefetchpipe import GPUPrefetcher
from prefetchpipe.ranges import ranges
from prefetchpipe.stats import known_limits, measure_limits
from prefetchpipe.trace import Trace, record
from tests.support import settle, spin

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 1 << 20


def batches(count: int, nbytes: int) -> list[torch.Tensor]:
    return [torch.full((nbytes // 4,), float(i)) for i in range(count)]


def lane(trace: Trace, name: str) -> list[Any]:
    return [span for span in trace.spans if span.lane == name]


@pytest.fixture(params=["cupy", "torch"])
def device(request: pytest.FixtureRequest) -> Any:
    """The CUDA device with CuPy's runtime calls, and with torch's."""
    from prefetchpipe.device.cuda import CudaDevice, cuda_device, cupy_status

    if request.param == "torch":
        return CudaDevice(torch.cuda.current_device(), None)
    if not cupy_status().startswith("CuPy"):
        pytest.skip("needs CuPy, an optional dependency")
    return cuda_device(None)


def test_copies_are_measured(device: Any, fetch: str) -> None:
    prefetcher = GPUPrefetcher(batches(40, 8 * MIB), device, fetch=fetch)
    for _ in prefetcher:
        pass
    settle("cuda")
    stats = prefetcher.stats()
    assert stats.timed_copies == 10
    assert stats.timed_bytes == 10 * 8 * MIB
    assert stats.copy_gb_per_second is not None
    assert 0.5 < stats.copy_gb_per_second < 1000
    prefetcher.close()


def test_a_batch_in_pieces_is_measured(device: Any) -> None:
    prefetcher = GPUPrefetcher(batches(4, 200 * MIB), device, fetch="caller")
    assert [float(batch[-1]) for batch in prefetcher] == [0, 1, 2, 3]
    settle("cuda")
    stats = prefetcher.stats()
    assert stats.timed_copies == 1
    assert 0 < stats.timed_bytes <= 64 * MIB
    prefetcher.close()


def test_stats_in_another_thread_beside_a_capture(device: Any) -> None:
    prefetcher = GPUPrefetcher(batches(64, MIB), device, fetch="thread")
    x = torch.ones(8, device="cuda")
    seen: list[Any] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            seen.append(prefetcher.stats())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in prefetcher:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = x * 2
            graph.replay()
    finally:
        done.set()
        thread.join()
    settle("cuda")
    assert float(y[0]) == 2
    assert seen[-1].batches <= 64
    prefetcher.close()


def test_a_busy_device_is_the_bottleneck(fetch: str) -> None:
    prefetcher = GPUPrefetcher(batches(30, MIB), "cuda", fetch=fetch)
    for _ in prefetcher:
        spin(0.02)  # clearly longer than what other processes on this GPU hold a launch up for
    settle("cuda")
    assert prefetcher.stats().bottleneck in ("device", "none")
    assert prefetcher.stats().steady.device_wait_seconds > 0.05
    prefetcher.close()


def test_limits(device: Any) -> None:
    limits = measure_limits(device)
    assert limits.host_to_device_gb_per_second is not None
    assert 0.5 < limits.host_to_device_gb_per_second < 1000
    assert known_limits(device) == limits
    prefetcher = GPUPrefetcher(batches(2, MIB), device)
    assert prefetcher.stats().limit_gb_per_second == limits.host_to_device_gb_per_second


def test_a_trace_on_one_time_line(device: Any, fetch: str) -> None:
    prefetcher = GPUPrefetcher(batches(20, 8 * MIB), device, fetch=fetch)
    trace = record(prefetcher, 12, lambda batch: spin(0.002))
    copies, steps = lane(trace, "copy"), lane(trace, "compute")
    assert len(steps) == 12
    assert len(copies) >= 12
    assert all(span.seconds > 0 for span in copies)
    assert all(span.seconds >= 0.0015 for span in steps)
    packing = {span.batch: span for span in lane(trace, "packing") if span.name == "pack and launch"}
    for copy in copies:
        # Launched inside its packing, so it begins after that has begun; a millisecond for the two clocks.
        assert copy.start_seconds > packing[copy.batch].start_seconds - 0.001
    for step, copy in zip(steps, copies, strict=False):
        assert step.start_seconds >= copy.start_seconds + copy.seconds - 0.001
    prefetcher.close()


def test_nvtx_ranges(fetch: str) -> None:
    with ranges():
        prefetcher = GPUPrefetcher(batches(10, MIB), "cuda", fetch=fetch)
        assert [float(batch[0]) for batch in prefetcher] == [float(i) for i in range(10)]
    prefetcher.close()
