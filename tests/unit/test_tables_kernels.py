"""The CUDA source of the row kernels, compiled as C++ and run thread by thread: values, widths, padding, bad ids."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from prefetchpipe.device.cpu import CpuDevice
from prefetchpipe.tables.index import PAD
from prefetchpipe.tables.kernels import RowKernels
from prefetchpipe.tables.source import MOST_TABLES, NAMES, NO_KEY, PART, SOURCE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
]

SHIM = """
#define __global__
#define __device__
struct uint4 { unsigned x, y, z, w; };
struct Dim { int x, y, z; };
static Dim gridDim, blockDim, blockIdx, threadIdx;
static unsigned long long atomicCAS(unsigned long long* p, unsigned long long was, unsigned long long now) {
    unsigned long long old = *p;
    if (old == was) *p = now;
    return old;
}
static void __threadfence_system() {}
extern "C" void place(int blocks, int threads, int block, int thread) {
    gridDim.x = blocks; blockDim.x = threads; blockIdx.x = block; threadIdx.x = thread;
}
"""
BLOCKS, THREADS, ROWS, IDS = 3, 7, 20, 57


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> RowKernels:
    folder: Path = tmp_path_factory.mktemp("kernels")
    (folder / "rows.cpp").write_text(SHIM + SOURCE)
    command = ["g++", "-Wno-unknown-pragmas", "-shared", "-fPIC", "-o", "rows.so", "rows.cpp"]
    subprocess.run(command, cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "rows.so"))

    def launcher(name: str) -> Callable[..., None]:
        function = getattr(library, name)

        def launch(stream: Any, blocks: int, threads: int, args: tuple[Any, ...]) -> None:
            values = [ctypes.c_longlong(a.data_ptr() if isinstance(a, torch.Tensor) else a) for a in args]
            for block in range(BLOCKS):
                for thread in range(THREADS):
                    library.place(BLOCKS, THREADS, block, thread)
                    function(*values)

        return launch

    return RowKernels({name: launcher(name) for name in NAMES})


@pytest.mark.parametrize("dim", [1, 2, 3, 4, 5, 8, 16, 33])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.int32, torch.int64], ids=str
)
def test_rows_move_and_bad_ids_are_told(kernels: RowKernels, dtype: torch.dtype, dim: int) -> None:
    draw = torch.Generator().manual_seed(dim)
    table = torch.randint(0, 100, (ROWS, dim), generator=draw).to(dtype)
    values = torch.randint(0, 100, (IDS, dim), generator=draw).to(dtype)
    ids = torch.randint(0, ROWS, (IDS,), generator=draw)
    ids[5] = PAD
    fault = torch.zeros(3, dtype=torch.int64)
    expected = table.clone()

    wanted = table[ids.clamp(max=ROWS - 1)]
    wanted[5] = 0
    order = torch.sort(ids, stable=True)[1]
    for way in (None, order):
        out = torch.full((IDS, dim), 9).to(dtype)
        kernels.gather([table], ids, way, [out], fault=fault, stream=None)
        assert torch.equal(out, wanted)

    kernels.scatter([table], ids, order, [values], fault=fault, stream=None)
    for position, row in enumerate(ids.tolist()):
        if row != PAD:
            expected[row] = values[position]
    assert torch.equal(table, expected)

    distinct = torch.randperm(ROWS, generator=draw)[:9]
    for way in (None, torch.sort(distinct)[1]):
        kernels.scatter([table], distinct, way, [values[:9].contiguous()], fault=fault, stream=None)
        expected[distinct] = values[:9]
        assert torch.equal(table, expected)
        values = values.flip(0)

    if kernels.can_add(dtype):
        more = torch.randn(IDS, dim, generator=draw).to(dtype)
        kernels.add(table, ids, order, more, fault=fault, stream=None)
        for position, row in enumerate(ids.tolist()):
            if row != PAD:
                expected[row] += more[position]
        assert torch.equal(table, expected)
    assert fault.tolist() == [0, 0, 0]

    ids[7], ids[9] = ROWS, -3
    for way in (None, torch.sort(ids)[1]):
        kernels.gather([table], ids, way, [out], fault=fault, stream=None)
        assert fault.tolist() in ([2, ROWS, 7], [2, -3, 9])
        assert not out[[7, 9]].any()
        fault.zero_()
    kernels.scatter([table], torch.tensor([ROWS]), None, [values[:1].contiguous()], fault=fault, stream=None)
    assert fault.tolist() == [2, ROWS, 0]
    assert torch.equal(table, expected)


SEVERAL = [(torch.float32, 8), (torch.float32, 1), (torch.bfloat16, 3), (torch.uint8, 5), (torch.float64, 2)] * 2


@pytest.mark.parametrize("count", [1, 2, MOST_TABLES, MOST_TABLES + 1, len(SEVERAL)])
def test_several_tables_move_together(kernels: RowKernels, count: int) -> None:
    draw = torch.Generator().manual_seed(count)
    tables = [torch.randint(0, 100, (ROWS, dim), generator=draw).to(dtype) for dtype, dim in SEVERAL[:count]]
    ids = torch.randperm(ROWS, generator=draw)[:9].sort()[0]
    fault = torch.zeros(3, dtype=torch.int64)
    outs = [torch.empty(9, table.shape[1], dtype=table.dtype) for table in tables]
    kernels.gather(tables, ids, None, outs, fault=fault, stream=None)
    assert all(torch.equal(out, table[ids]) for out, table in zip(outs, tables, strict=True))
    outs = [out + 1 for out in outs]
    kernels.scatter(tables, ids, None, outs, fault=fault, stream=None)
    assert all(torch.equal(out, table[ids]) for out, table in zip(outs, tables, strict=True))
    assert fault.tolist() == [0, 0, 0]


def test_what_is_written_back_is_counted(kernels: RowKernels) -> None:
    table, values, counts = torch.zeros(ROWS, 2), torch.ones(4, 2), torch.zeros(ROWS, 1)
    fault = torch.zeros(3, dtype=torch.int64)
    for ids in ([3, PAD, 5, PAD], [PAD, 0, 5, 19]):
        kernels.scatter([table], torch.tensor(ids), None, [values], fault=fault, stream=None, counts=counts)
    assert table[:, 0].nonzero().view(-1).tolist() == [0, 3, 5, 19]
    assert {row: int(counts[row]) for row in counts[:, 0].nonzero().view(-1).tolist()} == {0: 1, 3: 1, 5: 2, 19: 1}
    assert fault.tolist() == [0, 0, 0]
    kernels.scatter([table], torch.tensor([1, -2, ROWS, 4]), None, [values], fault=fault, stream=None, counts=counts)
    assert int(counts.sum()) == 7
    assert fault[0] == 2


@pytest.mark.parametrize("count", [1, 9])
@pytest.mark.parametrize("other_count", [1, 8, 9])
def test_rows_take_the_values_of_others_with_the_same_id(kernels: RowKernels, count: int, other_count: int) -> None:
    draw = torch.Generator().manual_seed(other_count)
    for _ in range(20):
        ids, other_ids = (torch.randint(0, ROWS, (n,), generator=draw).unique() for n in (count, other_count))
        ids, other_ids = (torch.cat([some, torch.tensor([PAD, PAD])]) for some in (ids, other_ids))
        rows = [torch.randn(len(ids), dim, generator=draw) for dim in (8, 1)]
        others = [torch.randn(len(other_ids), dim, generator=draw) for dim in (8, 1)]
        wanted = [row.clone() for row in rows]
        for row, other in zip(wanted, others, strict=True):
            for at, row_id in enumerate(ids[:-2].tolist()):
                for place in (other_ids == row_id).nonzero().view(-1):
                    row[at] = other[place]
        kernels.patch(rows, ids, others, other_ids, stream=None)
        assert all(map(torch.equal, rows, wanted))
    keys = torch.tensor([2, 2, 2, 5, 5, 7, NO_KEY], dtype=torch.int32)  # others of the first key count
    for kind in (torch.int32, torch.int64):
        row, other = torch.zeros(3, 8), torch.arange(1.0, 8.0)[:, None].expand(7, 8).contiguous()
        kernels.patch([row], torch.tensor([5, PAD, 2]), [other], keys.to(kind), stream=None)
        assert row[:, 0].tolist() == [4.0, 0.0, 1.0]


@pytest.mark.parametrize("rows", [ROWS, NO_KEY, NO_KEY + 1])
@pytest.mark.parametrize("count", [1, 5, IDS, 20 * PART])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distinct_ids_and_sums_by_row(kernels: RowKernels, dtype: torch.dtype, count: int, rows: int) -> None:
    draw = torch.Generator().manual_seed(count)
    for most in (1, 3, ROWS):
        ids = torch.randint(0, most, (count,), generator=draw) * ((rows - 1) // ROWS)
        fault = torch.zeros(3, dtype=torch.int64)
        distinct = kernels.distinct(ids, (count,), rows, fault=fault, device=CpuDevice())
        found, inverse = torch.unique(ids, return_inverse=True)
        is_id = distinct.index.ids != PAD
        assert torch.equal(distinct.index.ids[is_id], found)
        assert torch.equal(distinct.inverse, is_id.nonzero().view(-1)[inverse])
        assert distinct.places is not None
        values = torch.randint(-9, 9, (count, 3), generator=draw).to(dtype)
        total = kernels.total(values, distinct.places, device=CpuDevice())
        assert torch.equal(total[is_id], torch.zeros(len(found), 3, dtype=dtype).index_add_(0, inverse, values))
        assert not total[~is_id].any()
        assert fault.tolist() == [0, 0, 0]


@pytest.mark.parametrize("bad", [ROWS, -1, 1 << 32])
def test_a_bad_id_among_distinct_ones_is_told_with_its_position(kernels: RowKernels, bad: int) -> None:
    """2**32 would be row 0 if it were cut down to 32 bits."""
    fault = torch.zeros(3, dtype=torch.int64)
    distinct = kernels.distinct(torch.tensor([3, bad, 3, 1, PAD]), (5,), ROWS, fault=fault, device=CpuDevice())
    assert distinct.index.ids.tolist() == [1, 3, PAD, PAD, PAD]
    assert distinct.inverse.tolist() == [1, 3, 1, 0, 3]
    assert fault.tolist() == [2, bad, 1]
