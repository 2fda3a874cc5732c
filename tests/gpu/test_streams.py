"""Streams, devices and CUDA graphs: cases V3, V5, V7; contracts C3, C6, C13 (graph capture beside us), C18.

V5 runs through the `stream_device` fixture in tests/cases/test_values.py; here is what only CUDA has.
"""

from __future__ import annotations

import importlib.util
import itertools
import random
import threading
from pathlib import Path
from typing import Any, Self

import pytest
import torch

from prefetchpipe import GPUPrefetcher
from tests.support import TIMEOUT, Readings, Source, Thread, constants, no_synchronisation, run_script, spin

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def constant(index: int) -> torch.Tensor:
    return torch.full((1 << 16,), float(index + 1))


# Case V3, slots under a copy engine that lags behind


class BusyCopies:
    """A thread that keeps the host-to-device copy engine busy with copies of its own."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._started = threading.Event()
        self._thread = Thread(self._copy)

    def _copy(self) -> None:
        host = torch.ones(64 << 20, dtype=torch.uint8).pin_memory()
        there = torch.empty_like(host, device="cuda")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            while not self._stop.is_set():
                for _ in range(4):
                    there.copy_(host, non_blocking=True)
                self._started.set()
                stream.synchronize()

    def __enter__(self) -> Self:
        assert self._started.wait(TIMEOUT)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.result()


@pytest.mark.parametrize("depth", [1, 3])
def test_c6_v3_two_hundred_batches_of_many_sizes(fetch: str, depth: int) -> None:
    generator = random.Random(depth)
    sizes = [4 << generator.randrange(25) if i % 10 == 0 else 4 << generator.randrange(18) for i in range(200)]
    sizes[50] = 64 << 20

    source = Source(lambda index: torch.full((sizes[index] // 4,), float(index + 1)), 200)
    prefetcher = GPUPrefetcher(source, "cuda", depth=depth, fetch=fetch)
    readings = Readings("cuda", 260)
    torch.cuda.synchronize()
    with BusyCopies():
        for row, batch in enumerate(itertools.chain(itertools.islice(prefetcher, 60), prefetcher)):
            readings.queue(row, batch)
        values = readings.values()
    assert values == constants([*range(1, 61), *range(1, 201)])


def test_c6_v3_the_copy_stream_itself_is_kept_busy(fetch: str) -> None:
    """A transform runs on the copy stream; a long one delays every later copy, and slots must wait for it."""

    def transform(batch: torch.Tensor) -> torch.Tensor:
        spin(0.004)
        return batch

    prefetcher = GPUPrefetcher(Source(constant, 100), "cuda", depth=3, transform=transform, fetch=fetch)
    readings = Readings("cuda", 120)
    torch.cuda.synchronize()
    for row, batch in enumerate(itertools.chain(itertools.islice(prefetcher, 20), prefetcher)):
        readings.queue(row, batch)
    assert readings.values() == constants([*range(1, 21), *range(1, 101)])


def test_c6_v3_close_while_copies_are_in_flight(fetch: str) -> None:
    """Page-locked memory freed under a copy would show as wrong values or as an error of the driver."""

    def transform(batch: torch.Tensor) -> torch.Tensor:
        spin(0.02)
        return batch

    kept = []
    for _ in range(10):
        prefetcher = GPUPrefetcher(Source(constant, 20), "cuda", depth=4, transform=transform, fetch=fetch)
        kept += list(itertools.islice(prefetcher, 3))
        prefetcher.close()
        del prefetcher
        scratch = torch.full((1 << 18,), -1.0).pin_memory()
        del scratch
    torch.cuda.synchronize()
    assert [(float(b.min()), float(b.max())) for b in kept] == constants([1, 2, 3] * 10)


# Case V5, streams


def test_c3_v5_high_priority_and_external_streams(fetch: str) -> None:
    own = torch.cuda.Stream(priority=-1)
    external = torch.cuda.ExternalStream(torch.cuda.Stream().cuda_stream)
    readings = Readings("cuda", 60)
    torch.cuda.synchronize()
    iterator = iter(GPUPrefetcher(Source(constant, 60), "cuda", depth=3, fetch=fetch))
    for index in range(60):
        with torch.cuda.stream((own, external)[index % 2]):
            batch = next(iterator)
            spin(0.002)
            readings.queue(index, batch)
            del batch
    assert readings.values() == constants(range(1, 61))


def test_c4_v5_record_stream_by_the_user_keeps_its_meaning(fetch: str) -> None:
    side = torch.cuda.Stream()
    results = torch.full((60,), float("nan"), device="cuda")
    torch.cuda.synchronize()
    for index, batch in enumerate(GPUPrefetcher(Source(constant, 60), "cuda", depth=3, fetch=fetch)):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            spin(0.006)
            torch.amax(batch, 0, out=results[index])
        batch.record_stream(side)
        del batch
    torch.cuda.synchronize()
    assert results.tolist() == [float(i + 1) for i in range(60)]


def test_c4_v5_record_stream_on_a_view(fetch: str) -> None:
    side = torch.cuda.Stream()
    results = torch.full((60,), float("nan"), device="cuda")
    torch.cuda.synchronize()
    source = Source(lambda index: {"a": constant(index), "b": constant(1000)}, 60)
    for index, batch in enumerate(GPUPrefetcher(source, "cuda", depth=2, fetch=fetch)):
        view = batch["a"][100:5000]
        del batch
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            spin(0.006)
            torch.amax(view, 0, out=results[index])
        view.record_stream(side)
        del view
    torch.cuda.synchronize()
    assert results.tolist() == [float(i + 1) for i in range(60)]


@pytest.mark.parametrize("nested", [False, True], ids=["tensor", "dict"])
def test_c3_no_host_synchronisation_in_the_loop(fetch: str, nested: bool) -> None:
    source = Source(lambda index: {"a": constant(index), "b": [constant(index)]} if nested else constant(index), 30)
    prefetcher = GPUPrefetcher(source, "cuda", fetch=fetch)
    readings = Readings("cuda", 60)
    for index, batch in enumerate(prefetcher):
        readings.queue(index, batch["a"] if nested else batch)
    torch.cuda.synchronize()
    with no_synchronisation():
        for index, batch in enumerate(prefetcher):
            readings.queue(30 + index, batch["a"] if nested else batch)
    assert readings.values() == constants([*range(1, 31), *range(1, 31)])


# Case V7, two GPUs


def test_c18_v7_device_is_fixed_at_construction_and_the_current_one_stays() -> None:
    current = torch.cuda.current_device()
    stream = torch.cuda.current_stream()
    prefetcher = GPUPrefetcher(Source(constant, 6), "cuda")
    batches = list(prefetcher)
    assert {batch.device for batch in batches} == {torch.device("cuda", current)}
    assert torch.cuda.current_device() == current
    assert torch.cuda.current_stream() == stream


PREAMBLE = """
import ctypes, importlib.util
import torch
from prefetchpipe import GPUPrefetcher
driver = ctypes.CDLL("libcuda.so.1")
def has_context(index):
    flags, active = ctypes.c_uint(), ctypes.c_int()
    driver.cuInit(0)
    assert driver.cuDevicePrimaryCtxGetState(index, ctypes.byref(flags), ctypes.byref(active)) == 0
    return bool(active.value)
def cupy_device():
    if importlib.util.find_spec("cupy") is None:
        return None
    import cupy
    return cupy.cuda.runtime.getDevice()
batches = [{"x": torch.full((100000,), float(i)), "y": [torch.full((3,), i)]} for i in range(12)]
def values(kept):
    return [(float(b["x"].min()), float(b["x"].max()), int(b["y"][0][1])) for b in kept]
expected = [(float(i), float(i), i) for i in range(12)]
"""


@needs_two
@pytest.mark.parametrize("device", ["cuda", None])
def test_c18_v7_second_gpu_current_and_nothing_on_the_first(tmp_path: Path, fetch: str, device: str | None) -> None:
    done = run_script(
        tmp_path,
        f"""{PREAMBLE}
torch.cuda.set_device(1)
torch.ones(1, device="cuda")
before, cupy_before = has_context(0), cupy_device()
prefetcher = GPUPrefetcher(batches, {device!r}, depth=3, fetch={fetch!r})
kept = list(prefetcher)
assert all(b["x"].device == torch.device("cuda:1") for b in kept)
assert values(kept) == expected
assert torch.cuda.current_device() == 1
assert cupy_device() == cupy_before
assert torch.cuda.memory_reserved(0) == 0
assert has_context(0) == before
prefetcher.close()
assert has_context(0) == before
print("RIGHT")
""",
    )
    assert "RIGHT" in done.stdout, done.stderr
    assert done.stderr == ""


@needs_two
def test_c18_v7_second_gpu_named_while_the_first_is_current(fetch: str) -> None:
    torch.cuda.set_device(0)
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved(0)
    prefetcher = GPUPrefetcher(Source(constant, 30), "cuda:1", depth=3, fetch=fetch)
    kept = []
    for batch in prefetcher:
        assert torch.cuda.current_device() == 0
        kept.append(batch)
    assert {batch.device for batch in kept} == {torch.device("cuda:1")}
    assert [(float(b.min()), float(b.max())) for b in kept] == constants(range(1, 31))
    assert torch.cuda.memory_reserved(0) == reserved
    if importlib.util.find_spec("cupy") is not None:
        import cupy

        assert cupy.cuda.runtime.getDevice() == 0


@needs_two
def test_c18_v7_the_index_is_resolved_in_the_constructing_thread(fetch: str) -> None:
    torch.cuda.set_device(1)
    try:
        prefetcher = GPUPrefetcher(Source(constant, 12), "cuda", fetch=fetch)
    finally:
        torch.cuda.set_device(0)
    kept = list(prefetcher)
    assert {batch.device for batch in kept} == {torch.device("cuda:1")}
    in_thread = Thread(lambda: list(prefetcher)).result()
    assert {batch.device for batch in in_thread} == {torch.device("cuda:1")}
    torch.cuda.synchronize(1)
    assert [float(b[0]) for b in kept + in_thread] == [float(i + 1) for i in range(12)] * 2


@needs_two
def test_c18_v7_two_prefetchers_on_two_gpus_side_by_side(fetch: str) -> None:
    pairs = zip(
        GPUPrefetcher(Source(constant, 40), "cuda:0", fetch=fetch),
        GPUPrefetcher(Source(constant, 40), "cuda:1", fetch=fetch),
        strict=True,
    )
    kept = list(pairs)
    assert {(a.device.index, b.device.index) for a, b in kept} == {(0, 1)}
    assert [(float(a.max()), float(b.min())) for a, b in kept] == [(float(i + 1), float(i + 1)) for i in range(40)]


@needs_two
def test_c3_v7_the_consumers_stream_on_the_batchs_device_waits(fetch: str) -> None:
    """The current stream is looked up for the batch's device, not for the current device."""
    stream = torch.cuda.Stream(1)
    results = torch.full((40,), float("nan"), device="cuda:1")
    torch.cuda.synchronize(1)
    iterator = iter(GPUPrefetcher(Source(constant, 40), "cuda:1", depth=3, fetch=fetch))
    for index in range(40):
        with torch.cuda.stream(stream):
            batch = next(iterator)
            spin(0.003)
            torch.amax(batch, 0, out=results[index])
            del batch
    torch.cuda.synchronize(1)
    assert results.tolist() == [float(i + 1) for i in range(40)]


# CUDA graphs


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_c13_graph_capture_in_another_thread(fetch: str, mode: str) -> None:
    """Captures go on in this thread while another one starts passes, grows their rings and ends them.

    The other thread itself calls nothing that a capture forbids: it copies into memory that is there already.
    """
    x = torch.ones(1000, device="cuda")
    y = torch.zeros_like(x)
    stream = torch.cuda.Stream()
    results = torch.full((30, 2, 500), float("nan"), device="cuda")
    y.add_(x)
    results[0, 0].copy_(x[:500])
    torch.cuda.synchronize()
    capturing = threading.Event()
    passes = 0

    def one_pass(scale: int) -> None:
        # Growing sizes, so that slots and device memory have to be allocated during captures too.
        source = Source(lambda index: torch.full((1000 * scale * (index + 1),), float(index)), 30)
        prefetcher = GPUPrefetcher(source, "cuda", depth=3, fetch=fetch)
        with torch.cuda.stream(stream):
            for index, batch in enumerate(prefetcher):
                results[index, 0].copy_(batch[:500])
                results[index, 1].copy_(batch[-500:])
        prefetcher.close()

    def consume() -> None:
        nonlocal passes
        assert capturing.wait(TIMEOUT)
        while passes < 6:
            one_pass(passes + 1)
            passes += 1

    consumer = Thread(consume)
    graphs = []
    while consumer.is_alive() and len(graphs) < 2000:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=mode):
            capturing.set()
            for _ in range(200):
                y.add_(x)
        graphs.append(graph)
    consumer.result(60)
    torch.cuda.synchronize()
    assert passes == 6
    assert results.amin((1, 2)).tolist() == list(range(30))
    assert results.amax((1, 2)).tolist() == list(range(30))
    y.zero_()
    for graph in graphs[-10:]:
        graph.replay()
    assert y.tolist() == [200.0 * len(graphs[-10:])] * 1000


@pytest.mark.parametrize("depth", [1, 3])
def test_c2_static_batches_feed_a_captured_graph(depth: int) -> None:
    source = Source(lambda index: {"x": constant(index), "y": torch.full((7,), index)}, 40)
    prefetcher = GPUPrefetcher(source, "cuda", depth=depth, static=True)
    addresses = set()
    out = torch.zeros(2, device="cuda")
    results = torch.full((80, 2), float("nan"), device="cuda")
    graph: Any = None
    for row, batch in enumerate(itertools.chain(prefetcher, prefetcher)):
        addresses.add((batch["x"].data_ptr(), batch["y"].data_ptr()))
        if graph is None:
            torch.cuda.synchronize()
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                torch.amax(batch["x"], 0, out=out[0])
                torch.add(batch["y"][3], 0.0, out=out[1])
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                torch.amax(batch["x"], 0, out=out[0])
                torch.add(batch["y"][3], 0.0, out=out[1])
        spin(0.004)
        graph.replay()
        results[row].copy_(out)
    torch.cuda.synchronize()
    assert len(addresses) == 1
    assert results.tolist() == [[float(i + 1), float(i)] for i in range(40)] * 2


def test_c2_static_batches_hold_until_the_next(fetch: str) -> None:
    """Whatever is queued on the consumer's stream before `next` still reads the old batch."""
    prefetcher = GPUPrefetcher(Source(constant, 60), "cuda", depth=2, static=True, fetch=fetch)
    readings = Readings("cuda", 60)
    torch.cuda.synchronize()
    for index, batch in enumerate(prefetcher):
        spin(0.006)
        readings.queue(index, batch)
    assert readings.values() == constants(range(1, 61))
