"""Tables on CUDA: both ways that rows move, their order, the index check, parity, rows ahead.

The same on the simulated device: tests/unit/test_tables*.py. Cases N6 and N7 run here by tests/cases/test_tables.py.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn, optim

from prefetchpipe import GPUPrefetcher, HostEmbedding, HostTable
from prefetchpipe.device.cuda import CudaDevice, cuda_device
from prefetchpipe.errors import PrefetchWarning
from prefetchpipe.tables import RowOptimizer, ways
from prefetchpipe.tables.index import PAD
from prefetchpipe.tables.kernels import RowKernels
from tests.support import no_synchronisation, spin

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HAS_CUPY = importlib.util.find_spec("cupy") is not None
WAYS = ["kernels", "pinned", "pageable"]
ROWS, DIM = 5000, 128


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "kernels" and not HAS_CUPY:
        pytest.skip("needs CuPy, an optional dependency")
    if request.param == "pinned":
        from prefetchpipe.tables import movers

        monkeypatch.setattr(movers.RowKernels, "of", classmethod(lambda cls, device: None))
    return request.param


def content(rows: int = ROWS, dim: int = DIM) -> torch.Tensor:
    return torch.arange(rows * dim, dtype=torch.float32).view(rows, dim)


def table_by(way: str, **options: Any) -> HostTable:
    with pytest.warns(PrefetchWarning) if way == "pageable" else contextlib.nullcontext():
        table = HostTable(ROWS, DIM, device="cuda", init=content(), max_pinned_bytes=0 if way == "pageable" else None)
    assert table.pinned == (way != "pageable")
    assert table.ids_on_device == (way == "kernels")
    return table


@pytest.fixture
def no_device_sync() -> Iterator[None]:
    with no_synchronisation():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8])
@pytest.mark.parametrize("dim", [1, 3, 4, 7, 128, 129])
def test_rows_of_any_width_go_there_and_back(way: str, dtype: torch.dtype, dim: int) -> None:
    start = (content(50, dim) % 200).to(dtype)
    limit = 0 if way == "pageable" else None
    with pytest.warns(PrefetchWarning) if limit == 0 else contextlib.nullcontext():
        table = HostTable(50, dim, dtype, "cuda", start, max_pinned_bytes=limit)
    ids = torch.randint(0, 50, (3, 1000))
    for index in (ids, ids.cuda(), ids.int().cuda(), ids.numpy()):
        assert torch.equal(table.gather(index).cpu(), start[ids])
    out = torch.zeros(7001, dim, dtype=dtype, device="cuda")[1:3001].view(
        3, 1000, dim
    )  # an address that is not aligned
    assert torch.equal(table.gather(ids, out).cpu(), start[ids])
    some = torch.randperm(50)[:20]
    table.scatter(some.cuda(), table.gather(some.flip(0)), unique=True)
    expected = start.clone()
    expected[some] = start[some.flip(0)]
    assert torch.equal(table.host_tensor(), expected)


def test_the_last_of_repeated_ids_stays_and_sums_repeat(way: str) -> None:
    ids = torch.randint(0, 40, (20_000,))
    values = torch.randn(20_000, DIM)
    last = {row: position for position, row in enumerate(ids.tolist())}
    expected = content()
    expected[list(last)] = values[list(last.values())]
    table = table_by(way)
    table.scatter(ids.cuda(), values.cuda())
    assert torch.equal(table.host_tensor(), expected)
    sums = []
    for _ in range(2):
        other = table_by(way)
        other.scatter_add(ids.cuda(), values.cuda())
        sums.append(other.host_tensor())
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], content().index_add_(0, ids, values))


def test_order_over_streams_behind_a_slow_gpu(way: str) -> None:
    table = table_by(way)
    streams = [torch.cuda.Stream() for _ in range(3)]
    ids = torch.arange(1000, device="cuda")
    torch.cuda.synchronize()
    kept = []
    for step in range(30):
        with torch.cuda.stream(streams[step % 3]):
            spin(0.002)
            rows = table.gather(ids)
            kept.append(rows[:, 0].clone())
            table.scatter(ids, torch.full((1000, DIM), float(step), device="cuda"), unique=True)
            rows.zero_()
    assert table[:1000].min() == table[:1000].max() == 29
    torch.cuda.synchronize()
    assert torch.equal(kept[0].cpu(), content()[:1000, 0])
    assert [(float(k.min()), float(k.max())) for k in kept[1:]] == [(float(i), float(i)) for i in range(29)]


def test_a_host_read_waits_for_this_table_alone(way: str) -> None:
    table = table_by(way)
    side, done = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(side):
        spin(0.5)
        done.record()
    table.scatter([3], torch.full((1, DIM), 9.0, device="cuda"))
    assert table[3].tolist() == [9] * DIM
    assert not done.query()


@pytest.mark.skipif(not HAS_CUPY, reason="needs CuPy, an optional dependency")
def test_nothing_on_the_hot_path_waits_for_the_gpu(no_device_sync: None) -> None:
    embedding = HostEmbedding(ROWS, DIM, device="cuda", init=content())
    optimizer = RowOptimizer(optim.Adam, embedding, lr=0.1)
    batches = [torch.randint(0, ROWS, (64, 8), device="cuda") for _ in range(6)]
    held, done = torch.cuda.Event(), False
    for ids in embedding.lookahead(batches, lambda ids: ids):
        spin(0.05)
        embedding(ids).sum().backward()
        optimizer.step()
        held.record()
        done = held.query()
    assert not done


@pytest.mark.skipif(not HAS_CUPY, reason="needs CuPy, an optional dependency")
def test_ids_on_the_device_are_checked_without_a_wait() -> None:
    table = table_by("kernels")
    rows = table.gather(torch.tensor([1, ROWS, 2, -5], device="cuda"))
    assert rows[[0, 2]].cpu().equal(content()[[1, 2]])  # waits
    assert not rows[[1, 3]].any()
    with pytest.raises(IndexError, match=rf"index ({ROWS} at position 1|-5 at position 3) .* {ROWS} rows"):
        table.gather([0])
    table.gather([0])


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adagrad, optim.Adadelta, optim.Adamax, optim.RMSprop, optim.Rprop,
                                  optim.ASGD, optim.AdamW, optim.Adam])  # fmt: skip
@pytest.mark.parametrize("every_row", [True, False])
def test_parity_with_a_dense_embedding(way: str, kind: Any, every_row: bool) -> None:
    rows = 40
    start = torch.randn(rows, DIM)
    limit = 0 if way == "pageable" else None
    options: dict[str, Any] = {"momentum": 0.9} if kind is optim.SGD else {}
    with pytest.warns(PrefetchWarning) if limit == 0 else contextlib.nullcontext():
        embedding = HostEmbedding(rows, DIM, device="cuda", init=start, max_pinned_bytes=limit)
    optimizer = RowOptimizer(kind, embedding, lr=0.05, **options)
    dense = nn.Embedding(rows, DIM, device="cuda", _weight=start.cuda())
    if optimizer.param_groups[0].get("capturable"):  # torch's arithmetic for captured graphs: counts are float32
        options["capturable"] = True
    other = kind(dense.parameters(), lr=0.05, **options)
    few = torch.arange(10) * 3
    for _ in range(6):
        ids = torch.cat([torch.randperm(rows), torch.randint(0, rows, (30,))]) if every_row else few[torch.randperm(10)]
        weight = torch.randn(len(ids), DIM, device="cuda")
        for module, stepper, index in ((embedding, optimizer, ids), (dense, other, ids.cuda())):
            stepper.zero_grad()
            (module(index) * weight).pow(2).sum().backward()
            stepper.step()
    touched = slice(None) if every_row else few
    torch.testing.assert_close(
        embedding.table.host_tensor()[touched], dense.weight.detach().cpu()[touched], rtol=1e-4, atol=1e-5
    )
    if not every_row:
        left = [row for row in range(rows) if row not in set(few.tolist())]
        assert torch.equal(embedding.table.host_tensor()[left], start[left])


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("name", ["Adam", "Adagrad", "Adamax"])
def test_rows_ahead_change_nothing(way: str, depth: int, name: str) -> None:
    batches = [torch.randint(0, 300, (256,)) for _ in range(20)]

    def run(depth: int) -> list[torch.Tensor]:
        limit = 0 if way == "pageable" else None
        context = pytest.warns(PrefetchWarning) if limit == 0 else contextlib.nullcontext()
        with context:
            embedding = HostEmbedding(300, DIM, device="cuda", init=content(300) / 1e4, max_pinned_bytes=limit)
        optimizer = RowOptimizer(getattr(optim, name), embedding, lr=0.1)
        loader: Any = GPUPrefetcher(batches, "cuda")
        for ids in embedding.lookahead(loader, lambda ids: ids, depth=depth) if depth else loader:
            spin(0.001)
            embedding(ids).pow(2).mean().backward()
            optimizer.step()
        return [embedding.table.host_tensor(), *(table.host_tensor() for table in optimizer.tables.values())]

    for got, expected in zip(run(depth), run(0), strict=True):
        assert torch.equal(got, expected)


def test_memory_goes_back(way: str) -> None:
    def cycle() -> None:
        embedding = HostEmbedding(ROWS, DIM, device="cuda", init="zeros")
        optimizer = RowOptimizer(optim.Adam, embedding, lr=0.1)
        for ids in embedding.lookahead([torch.randint(0, ROWS, (256,)) for _ in range(5)], lambda ids: ids):
            embedding(ids).sum().backward()
            optimizer.step()

    cycle()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        cycle()
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before


def test_beside_a_graph_capture(way: str) -> None:
    table = table_by(way)
    table.gather([1])
    kept = torch.zeros(8, device="cuda")
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=side, capture_error_mode="relaxed"):
        kept.add_(1)
    rows = table.gather([2])
    graph.replay()
    assert torch.equal(rows.cpu(), content()[[2]])
    assert isinstance(table.where, CudaDevice)


@pytest.mark.skipif(not HAS_CUPY, reason="needs CuPy, an optional dependency")
def test_many_ids_of_a_large_table_as_they_come_and_sorted() -> None:
    """The first calls take turns; all of them give the same bytes."""
    rows = (ways.LEAST_BYTES >> 9) + 1
    model = content(rows)
    table = HostTable(rows, DIM, device="cuda", init=model)
    draw = torch.Generator().manual_seed(0)
    for number in range(8):
        ids = torch.randint(0, rows, (2 * ways.LEAST_IDS,), generator=draw)
        assert torch.equal(table.gather(ids.cuda()).cpu(), model[ids])
        distinct = torch.randperm(rows, generator=draw)[: 2 * ways.LEAST_IDS]
        values = torch.randn(len(distinct), DIM, generator=draw)
        table.scatter(distinct.cuda(), values.cuda(), unique=True)
        torch.cuda.synchronize()
        model[distinct] = values
        assert number < 7 or torch.equal(table.host_tensor(), model)
    assert len(table._mover._ways._choices) == 2  # type: ignore[attr-defined]
    assert all(
        choice._is_sorted is not None
        for choice in table._mover._ways._choices.values()  # type: ignore[attr-defined]
    )


@pytest.mark.skipif(not HAS_CUPY, reason="needs CuPy, an optional dependency")
@pytest.mark.parametrize("rows", [ROWS, 1 << 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distinct_ids_and_sums_by_row(dtype: torch.dtype, rows: int) -> None:
    device = cuda_device(0)
    kernels = RowKernels.of(device)
    assert kernels is not None
    fault = device.host_alloc(24).tensor.view(torch.int64).zero_()
    for count, most in ((1, 1), (1000, 3), (34_816, ROWS), (200_001, 40)):
        ids = torch.randint(0, most, (count,), device="cuda") * (rows // ROWS)
        distinct = kernels.distinct(ids, (count,), rows, fault=fault, device=device)
        found, inverse = torch.unique(ids, return_inverse=True)
        is_id = distinct.index.ids != PAD
        assert torch.equal(distinct.index.ids[is_id], found)
        assert torch.equal(distinct.inverse, is_id.nonzero().view(-1)[inverse])
        assert distinct.places is not None
        values = torch.randint(-9, 9, (count, DIM), device="cuda").to(dtype)
        total = kernels.total(values, distinct.places, device=device)
        wanted = torch.zeros(len(found), DIM, dtype=dtype, device="cuda").index_add_(0, inverse, values)
        assert torch.equal(total[is_id], wanted)
        assert not bool(total[~is_id].any())
    torch.cuda.synchronize()
    assert fault.tolist() == [0, 0, 0]


@pytest.mark.skipif(not HAS_CUPY, reason="needs CuPy, an optional dependency")
def test_a_gradient_in_the_thread_of_autograd_is_that_of_torch() -> None:
    embedding = HostEmbedding(ROWS, DIM, device="cuda", init=content() / (ROWS * DIM))
    optimizer = RowOptimizer(optim.SGD, embedding, lr=1.0)
    reference = nn.Embedding(ROWS, DIM, _weight=(content() / (ROWS * DIM)).cuda())
    ids = torch.randint(0, 50, (64, 68))
    for module, index in ((embedding, ids), (reference, ids.cuda())):
        module(index).pow(2).sum().backward()
    optimizer.step()
    assert reference.weight.grad is not None
    expected = (reference.weight - reference.weight.grad).detach().cpu()
    torch.testing.assert_close(embedding.table.host_tensor(), expected, rtol=1e-5, atol=1e-5)
